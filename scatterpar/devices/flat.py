"""Tensors of one dtype travel as one flat tensor: one message instead of hundreds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from scatterpar.devices import verbs

__all__ = ["FlatCopy", "by_dtype"]

_ALIGNMENT = 256  # bytes

_Key = TypeVar("_Key")


def by_dtype(tensors: Iterable[tuple[_Key, Tensor]]) -> dict[torch.dtype, list[_Key]]:
    """The keys of the tensors of each dtype, in order."""
    groups: dict[torch.dtype, list[_Key]] = defaultdict(list)
    for key, tensor in tensors:
        groups[tensor.dtype].append(key)
    return groups


class FlatCopy:
    """Room for tensors that travel together: a flat buffer per dtype, and a view for each tensor.

    Views keep the strides of what they stand for (``channels_last`` stays so), and begin where an
    allocation could: a kernel that finds a tensor at 60 of 64 bytes goes about the same sum in
    another order. Tensors that lie one after the other in one storage do so here, from the start
    of a storage of its own: so cuDNN takes the weights of a recurrent layer as they are.

    Args:
        like: the tensors.
        device: whose memory this is in.

    Attributes:
        order: positions of the tensors in the order in which they lie.
        views: every tensor's view.
        pieces: the same memory, 1-D.
        flats: the buffer of each dtype.
        offsets: where in it each tensor begins.
    """

    def __init__(self, like: Sequence[Tensor], device: torch.device) -> None:
        self.order: list[int] = []
        self.views = list(like)
        self.pieces = list(like)
        self.flats: dict[torch.dtype, Tensor] = {}
        self.offsets = [0] * len(like)
        runs = _runs(like)
        for dtype, firsts in by_dtype((run, like[run[0]]) for run in runs).items():
            self._lay(firsts, like, dtype, device)

    def _lay(
        self,
        runs: Sequence[Sequence[int]],
        like: Sequence[Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Give the tensors of one dtype their places: those first that leave no gap behind."""
        unit = max(1, _ALIGNMENT // dtype.itemsize)
        sizes = {run[0]: sum(like[i].numel() for i in run) for run in runs}
        runs = sorted(runs, key=lambda run: sizes[run[0]] % unit > 0)
        flat = verbs.empty(sum(-(-size // unit) * unit for size in sizes.values()), dtype, device)
        self.flats[dtype] = flat
        start = 0
        for run in runs:
            room = flat[start : start + sizes[run[0]]]
            if len(run) > 1:
                first, last = (part * dtype.itemsize for part in (start, start + len(room)))
                storage = flat.untyped_storage()[first:last]
                room = flat.new_empty(0).set_(storage, 0, (len(room),), (1,))
            offset = start
            for i in run:
                stop = offset + like[i].numel()
                strides = torch.empty_like(like[i], device="meta").stride()
                inside = room[offset - start : stop - start]
                self.views[i] = inside.as_strided(like[i].shape, strides)
                self.pieces[i] = flat[offset:stop]
                self.offsets[i] = offset
                offset = stop
            self.order += run
            start = -(-offset // unit) * unit


def _runs(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Positions of the tensors, those together that lie one after the other in one storage."""
    places = []
    runs = []
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, nn.Parameter) and tensor.numel() and tensor.is_contiguous():
            places.append((tensor.untyped_storage().data_ptr(), tensor.data_ptr(), i))
        else:
            runs.append([i])
    end: Any = None
    for storage, start, i in sorted(places):
        key = (storage, tensors[i].dtype, start)
        if key == end:
            runs[-1].append(i)
        else:
            runs.append([i])
        end = (storage, tensors[i].dtype, start + tensors[i].nbytes)
    return sorted(runs)
