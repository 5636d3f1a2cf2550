"""Notice when a forward pass writes parameters that replicas share, and put them back."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices import bits
from scatterpar.devices.fingerprints import Fingerprints
from scatterpar.devices.readout import Readout
from scatterpar.replicas.broadcast import versions
from scatterpar.replicas.replica import Replica
from scatterpar.replicas.replicas import Replicas
from scatterpar.replicas.writes import FirstWrite

__all__ = ["guarded"]


@contextlib.contextmanager
def guarded(parts: Sequence[Replicas]) -> Iterator[None]:
    """Leave the parameters that replicas share as they are, whatever the body does to them.

    Raises:
        FirstWrite: one was written: from now on each replica has a copy of its own.
        RuntimeError: likewise, by several replicas in one memory that left it alone so far, so
            that no copy of its values was kept.
    """
    guards = [_Guard(part) for part in parts if part.shared]
    try:
        yield
    except BaseException as error:
        written = [name for guard in guards for name in guard.settle()]
        torch_s = isinstance(error, RuntimeError)  # perhaps because of the writing
        if written and torch_s and not any(guard.is_spoilt for guard in guards):
            raise FirstWrite(*written) from error
        for guard in guards:
            guard.tell_of_losses(error)
        raise
    written = [name for guard in guards for name in guard.settle()]
    for guard in guards:
        guard.require_values()
    if written:
        raise FirstWrite(*written)
    for part in parts:
        part.is_trusted = True


class _Guard:
    """The parameters of one part as they were before the body.

    In a part's first step the host keeps a copy of them, and fingerprints tell whether they were
    written, in every memory, since writes through ``.data`` leave no version behind. Later steps
    look at versions and storages only, and what is written in one of those cannot be put back. If
    one replica alone wrote it in the master's memory, the step is computed again from there, and
    fails only if the values change once more (``merge_writes``). What several wrote at the same
    time may be anything.
    """

    def __init__(self, part: Replicas) -> None:
        self._part = part
        self._versions = [self._versions_of(replica) for replica in part.replicas]
        self._kept: list[Tensor] = []
        self._before: dict[torch.device, Fingerprints] = {}
        self._lost: list[str] = []
        if not part.is_trusted:
            self._kept = [part.tensors[i].detach().to("cpu", copy=True) for i in part.shared]
            self._before = self._fingerprints()

    def settle(self) -> list[str]:
        """Put back what was written to the master's memory; the names of what was written."""
        part = self._part
        touched = self._touched()
        edited = {} if part.is_trusted and not touched else self._edited()
        written = touched.union(*edited.values())
        if not written:
            return []
        master = part.device_ids[0]
        for i, kept in zip(part.shared, self._kept, strict=False):
            if i in edited.get(master, ()):
                with torch.no_grad():
                    part.tensors[i].copy_(kept)
        if not self._kept:
            here = [replica for replica in part.replicas if replica.device == master]
            lost = {i for replica in here for i in self._written_in_place(replica)}
            self._lost = [part.name_of(i) for i in sorted(lost)]
            if len(here) == 1:
                part.lost += [part.tensors[i] for i in lost]
        part.give_copies_of(written)
        return [part.name_of(i) for i in sorted(written)]

    @property
    def is_spoilt(self) -> bool:
        """Whether values could not be put back, and nobody can go on from those that are there."""
        return bool(self._lost) and not self._part.lost

    def require_values(self) -> None:
        """Refuse to go on with values that several replicas wrote at the same time."""
        if self.is_spoilt:
            raise RuntimeError(
                f"the forward pass wrote the parameter {self._lost[0]!r}, which it had not done "
                f"in this engine's steps before: no gradient was added, but its earlier values "
                f"are lost; the next step gives each replica a copy of it"
            )

    def tell_of_losses(self, error: BaseException) -> None:
        """Add a note to the user's own error, if a value could not be put back."""
        self._part.lost.clear()
        with contextlib.suppress(Exception):
            for name in self._lost:
                error.add_note(
                    f"before that the forward pass wrote the parameter {name!r}, which it had not "
                    f"done in this engine's steps before: its earlier values are lost"
                )

    def _touched(self) -> set[int]:
        """Positions that were written in place, or whose storage was exchanged for other values."""
        found: set[int] = set()
        moved = defaultdict(list)
        for replica in self._part.replicas:
            found.update(self._written_in_place(replica))
            strays = replica.strays()
            for i in set(self._part.shared).intersection(strays) if strays else ():
                tensor, home = replica.tensors[i], self._part.sources[replica.device][i]
                if _kind(tensor) == _kind(home):
                    moved[replica.device].append((i, tensor, home))
                else:
                    found.add(i)
        for positions, tensors, homes in (zip(*those, strict=True) for those in moved.values()):
            flags = bits.changed(tensors, homes)  # the host waits once for each memory
            found.update(i for i, flag in zip(positions, flags, strict=True) if flag)
        return found

    def _written_in_place(self, replica: Replica) -> list[int]:
        before = self._versions[replica.index]
        now = self._versions_of(replica)
        if now == before:
            return []
        strays = set(replica.strays())
        return [
            i
            for i, old, new in zip(self._part.shared, before, now, strict=True)
            if old != new and i not in strays
        ]

    def _edited(self) -> dict[torch.device, set[int]]:
        """Positions whose bits are not those that they were, by memory."""
        if not self._before:
            return {}
        now, readout = self._fingerprints(), Readout()
        values = readout.ask([f.values for f in (*self._before.values(), *now.values())])()
        found = {}
        for (device, own), before, after in zip(
            now.items(), values[: len(now)], values[len(now) :], strict=True
        ):
            pairs = zip(self._part.shared, own.read(before), own.read(after), strict=True)
            found[device] = {i for i, old, new in pairs if old != new}
        return found

    def _fingerprints(self) -> dict[torch.device, Fingerprints]:
        """Of what the replicas share, in each memory."""
        return {
            device: Fingerprints([sources[i] for i in self._part.shared], device)
            for device, sources in self._part.sources.items()
        }

    def _versions_of(self, replica: Replica) -> list[int]:
        return versions([replica.tensors[i] for i in self._part.shared])


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
