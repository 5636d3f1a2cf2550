"""Forward passes read the parameters that replicas share; one that writes them is refused by name.

Replicas in one memory would read what others have half written, and nothing tells what one device
would have after the whole batch.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from scatterpar.devices.fingerprints import Fingerprints, Readout, changes
from scatterpar.replicas.broadcast import versions

__all__ = ["Shared", "read_only"]

_INSTEAD = (
    "write it after the optimizer's step, or keep what forward passes write in a buffer "
    "(register_buffer)"
)


@dataclass
class Shared:
    """The parameters of some modules, as their replicas share them.

    Attributes:
        roots: the user's modules.
        originals: the user's parameters.
        memories: their values in each memory, the master's first.
        copies: each replica's memory, and its tensors on the values there.
        proven: modes in which a pass has shown that it writes none.
        spoilt: positions of those whose values in another memory are no longer the user's.
    """

    roots: Sequence[nn.Module]
    originals: Sequence[Tensor]
    memories: Mapping[torch.device, Sequence[Tensor]]
    copies: Sequence[tuple[torch.device, Sequence[Tensor]]]
    proven: set[Hashable] = field(default_factory=set)
    spoilt: set[int] = field(default_factory=set)

    def name_of(self, position: int) -> str:
        """What the user calls the parameter at ``position``."""
        original = self.originals[position]
        named = (item for root in self.roots for item in root.named_parameters())
        names = (repr(name) for name, tensor in named if tensor is original)
        return next(names, f"of shape {tuple(original.shape)}")


@contextlib.contextmanager
def read_only(shared: Shared, mode: Hashable) -> Iterator[None]:
    """Leave the parameters as they are, whatever the body's forward passes do to them.

    In the first pass of each ``mode`` the host keeps a copy of them, and fingerprints tell whether
    they were written, in every memory, since writes through ``.data`` leave no version behind.
    Later passes look at versions and storages only, and what is written in place in the master's
    memory then cannot be put back.

    Raises:
        ValueError: one was written; all are as they were.
        RuntimeError: likewise, but its earlier values are lost.
    """
    guard = _Guard(shared, keeps=mode not in shared.proven)
    try:
        yield
    except BaseException as error:
        refusal = guard.settle()
        if type(error) is RuntimeError and refusal is not None:  # torch's, because of the writing
            raise refusal from error
        if refusal is not None:
            with contextlib.suppress(Exception):
                error.add_note(f"before that, {refusal}")
        raise
    refusal = guard.settle()
    if refusal is not None:
        raise refusal
    shared.proven.add(mode)


class _Guard:
    """The parameters as they were before a pass; with ``keeps``, what puts them back."""

    def __init__(self, shared: Shared, *, keeps: bool) -> None:
        self._shared = shared
        self._memories = list(shared.memories.items())
        self._watched = [(self._memories[0][0], shared.originals), *shared.copies]
        self._versions = [versions(tensors) for _, tensors in self._watched]
        self._kept: list[Tensor] = []
        self._before: list[Fingerprints] = []
        if keeps:
            self._kept = [tensor.detach().to("cpu", copy=True) for tensor in shared.originals]
            self._before = self._fingerprints()

    def settle(self) -> ValueError | RuntimeError | None:
        """Put back what was written, and refuse it."""
        in_place, exchanged = self._written()
        for position, memories in self._edited():
            in_place[position] |= memories
        written = exchanged | in_place.keys()
        if not written:
            return None
        self._shared.proven.clear()
        self._shared.spoilt |= written
        lost = [i for i, memories in in_place.items() if self._memories[0][0] in memories]
        if self._before:
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

    def _written(self) -> tuple[dict[int, set[torch.device]], set[int]]:
        """In which memories versions have moved, by position; whose storage has other values now.

        A pass may exchange a parameter's storage for another with the same values, as
        ``flatten_parameters`` does; then its version may move too.
        """
        moved: set[tuple[torch.device, int]] = set()
        exchanged: list[tuple[torch.device, int, Tensor, Tensor]] = []
        for (device, tensors), before in zip(self._watched, self._versions, strict=True):
            homes, now = self._shared.memories[device], versions(tensors)
            if now != before:
                moved |= {(device, i) for i, old in enumerate(before) if now[i] != old}
            if not all(map(Tensor.is_set_to, tensors, homes)):
                pairs = enumerate(zip(tensors, homes, strict=True))
                exchanged += [(device, i, t, h) for i, (t, h) in pairs if not t.is_set_to(h)]
        in_place: dict[int, set[torch.device]] = defaultdict(set)
        for device, i in moved - {(device, i) for device, i, *_ in exchanged}:
            in_place[i].add(device)
        others = {i for _, i, tensor, home in exchanged if _kind(tensor) != _kind(home)}
        alike = [one for one in exchanged if one[1] not in others]
        flags = changes([tensor for *_, tensor, _ in alike], [home for *_, home in alike])
        answers = Readout().ask(flags)()  # the host waits once for each memory
        others |= {i for (_, i, *_), flag in zip(alike, answers, strict=True) if flag}
        return in_place, others

    def _edited(self) -> Iterator[tuple[int, set[torch.device]]]:
        """Whose bits are not those that they were, and in which memory."""
        after = self._fingerprints() if self._before else []
        values = Readout().ask([f.values for f in (*self._before, *after)])()
        for (device, _), own, old, new in zip(
            self._memories, after, values, values[len(after) :], strict=False
        ):
            for i, (before, now) in enumerate(zip(own.read(old), own.read(new), strict=True)):
                if before != now:
                    yield i, {device}

    def _fingerprints(self) -> list[Fingerprints]:
        """Of the values in each memory."""
        return [Fingerprints(tensors, device) for device, tensors in self._memories]


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device
