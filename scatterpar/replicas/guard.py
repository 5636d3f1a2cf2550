"""Forward passes read the parameters that replicas share; one that writes them is refused by name.

Replicas in one memory would read what others have half written, and nothing tells what one device
would have after the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.ledger import Ledger
from scatterpar.replicas.broadcast import Broadcast, versions

_INSTEAD = (
    "write it after the optimizer's step, or keep what forward passes write in a buffer "
    "(register_buffer)"
)


class Shared:
    """The parameters of some modules, as their replicas share them.

    Args:
        roots: the user's modules.
        broadcast: their tensors in each memory.
        copies: each replica's tensors, of which parameters have the values there.
        proven: modes in which a pass has written none.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        broadcast: Broadcast,
        copies: Sequence[tuple[torch.device, Sequence[Tensor]]],
        proven: set[Hashable],
    ) -> None:
        self._roots, self._broadcast, self.proven = roots, broadcast, proven
        at = broadcast.parameters
        self.memories = {  # the master's first
            device: [broadcast.at(device)[i] for i in at] for device in broadcast.memories
        }
        self.originals = self.memories[broadcast.memories[0]]
        self.copies = [(device, [tensors[i] for i in at]) for device, tensors in copies]

    def distrust(self) -> None:
        """Somebody wrote: nothing is known of modes, nor of values in any memory."""
        self.proven.clear()
        self._broadcast.distrust()

    def name_of(self, position: int) -> str:
        """What the user calls the parameter at ``position``."""
        original = self.originals[position]
        modules = [root for root in self._roots if isinstance(root, nn.Module)]
        named = (item for module in modules for item in module.named_parameters())
        names = (repr(name) for name, tensor in named if tensor is original)
        return next(names, f"of shape {tuple(original.shape)}")


@contextlib.contextmanager
def read_only(shared: Shared, mode: Hashable) -> Iterator[None]:
    """Leave the parameters as they are, whatever the body's forward passes do to them.

    In the first pass of each ``mode`` the host keeps a copy of them, with which they are compared
    in every memory, since writes through ``.data`` leave no version behind. Later passes look at
    versions and storages only, and what is written in place in the master's memory then cannot be
    put back.

    Raises:
        ValueError: one was written; all are as they were.
        RuntimeError: likewise, but its earlier values are lost.
    """
    guard = _Guard(shared, keeps=mode not in shared.proven)
    try:
        yield
    except BaseException as error:
        refusal = guard.refusal()
        if type(error) is RuntimeError and refusal is not None:  # torch's, because of the writing
            raise refusal from error
        if refusal is not None:
            with contextlib.suppress(Exception):
                error.add_note(f"before that, {refusal}")
        raise
    refusal = guard.refusal()
    if refusal is not None:
        raise refusal
    shared.proven.add(mode)


class _Guard:
    """The parameters as they were before a pass; with ``keeps``, what puts them back."""

    def __init__(self, shared: Shared, *, keeps: bool) -> None:
        self._shared = shared
        self._master = next(iter(shared.memories))
        self._watched = [(self._master, shared.originals), *shared.copies]
        self._versions = [versions(tensors) for _, tensors in self._watched]
        self._kept = [t.detach().to("cpu", copy=True) for t in shared.originals] if keeps else []

    def refusal(self) -> ValueError | RuntimeError | None:
        """Put back what was written, and refuse it."""
        places = self._written()
        if not places:
            return None
        written = {i for i, _ in places}
        lost = {i for i, memory in places if memory == self._master}
        self._shared.distrust()
        if self._kept:
            with torch.no_grad():
                for i in lost:
                    self._shared.originals[i].copy_(self._kept[i])
        elif lost:
            name = self._shared.name_of(min(lost))
            return RuntimeError(
                f"the forward pass wrote the parameter {name}, which it had not done before: no "
                f"gradient was added, but the parameter's earlier values are lost; {_INSTEAD}"
            )
        name = self._shared.name_of(min(written))
        return ValueError(
            f"the forward pass writes the parameter {name}, which all replicas read: nothing was "
            f"changed; {_INSTEAD}"
        )

    def _written(self) -> set[tuple[int, torch.device | None]]:
        """Which were written, and in which memory; ``None`` where a replica's moved elsewhere.

        A pass may exchange a parameter's storage for another with the same values, as
        ``flatten_parameters`` does; then its version may move too.
        """
        moved: set[tuple[int, torch.device | None]] = set()
        exchanged: set[tuple[int, torch.device | None]] = set()
        written: set[tuple[int, torch.device | None]] = set()
        for (device, tensors), before in zip(self._watched, self._versions, strict=True):
            now, homes = versions(tensors), self._shared.memories[device]
            if now == before and (tensors is homes or all(map(Tensor.is_set_to, tensors, homes))):
                continue
            for i, (tensor, home) in enumerate(zip(tensors, homes, strict=True)):
                if not tensor.is_set_to(home):
                    exchanged.add((i, device))
                    written |= {(i, None)} if _differ(tensor, home) else set()
                elif now[i] != before[i]:
                    moved.add((i, device))
        for device, values in self._shared.memories.items():
            for i, kept in enumerate(self._kept):  # in the host: a device has no room to spare
                value = Ledger().copy(values[i].detach(), kept.device, "replicate")
                if not same_bits(value, kept):
                    written.add((i, device))
        return written | (moved - exchanged)


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.device != other.device or not same_bits(one, other)
