"""Small tensors that the host reads in one go: it waits once for each device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Readout"]


class Readout:
    """Tensors that the host wants to know: all that were asked for arrive when one is needed.

    >>> readout = Readout()
    >>> flags = readout.ask([torch.tensor(True)])
    >>> counts = readout.ask([torch.tensor(3), torch.tensor(4)])
    >>> flags(), counts()
    ([tensor(True)], [tensor(3), tensor(4)])
    """

    def __init__(self) -> None:
        self._asked: list[Tensor] = []
        self._arrived: list[Tensor] = []

    def ask(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Ask for dense tensors, which must not be written before; what fetches them."""
        start = len(self._asked)
        self._asked += tensors
        stop = len(self._asked)
        return lambda: self._read()[start:stop]

    def _read(self) -> list[Tensor]:
        missing = self._asked[len(self._arrived) :]
        self._arrived += _on_the_host(missing)
        return self._arrived


def _on_the_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of all dtypes travel as bytes, so that there is one message from each device."""
    arrived = [tensor.detach() for tensor in tensors]
    away: dict[torch.device, list[int]] = defaultdict(list)
    for i, tensor in enumerate(arrived):
        if tensor.device.type != "cpu":
            away[tensor.device].append(i)
    for positions in away.values():
        parts = [_as_bytes(arrived[i]) for i in positions]
        pieces = torch.cat(parts).cpu().split([len(part) for part in parts])
        for i, piece in zip(positions, pieces, strict=True):
            arrived[i] = piece.clone().view(arrived[i].dtype).view(arrived[i].shape)
    return arrived


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
