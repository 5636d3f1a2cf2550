"""The values of buffers after a step: those of replica 0, written in place if possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scatterpar.devices.coalescing import copy_lists, grouped, is_unexpanded
from scatterpar.devices.fingerprints import same_bits

Buffers = MutableMapping[str, "Tensor | None"]
BufferValue = tuple[Buffers, str, "Tensor | None"]  # where it is, its name, its value

RUNNING = ("running_mean", "running_var", "num_batches_tracked")


class ModuleBuffers(NamedTuple):
    """The buffers of a module, and the names of its non-persistent buffers."""

    buffers: Buffers
    non_persistent: set[str]


def buffers_of(module: nn.Module) -> ModuleBuffers:
    """The containers in which ``module`` registers buffers: to read and to write."""
    return ModuleBuffers(module._buffers, module._non_persistent_buffers_set)


def values_after(
    modules: Sequence[ModuleBuffers], copies: Sequence[ModuleBuffers], copy_of: Callable[[Any], Any]
) -> Iterator[tuple[int, Buffers, str, Tensor | None]]:
    """Yield (module's number, its buffers, name, value in the copy) for each buffer.

    ``copy_of`` returns the copy of a tensor before the forward pass. Raises ``ValueError`` if a
    forward pass registered or deleted buffers.
    """
    yielded: set[int] = set()  # one tensor may be a buffer under several names
    for m, (module, copy) in enumerate(zip(modules, copies, strict=True)):
        names = module.buffers.keys() ^ copy.buffers.keys()
        names |= module.non_persistent ^ copy.non_persistent
        if names:
            raise ValueError(
                f"the forward pass registers or deletes buffers ({', '.join(sorted(names))}), on "
                f"each replica separately: nothing was changed; register them in __init__, or call "
                f"the module once on one micro-batch before the first step"
            )
        for name, value in copy.buffers.items():
            before = module.buffers[name]
            if value is None or value is not copy_of(before):
                yield m, module.buffers, name, value
            elif id(before) not in yielded:
                yielded.add(id(before))
                yield m, module.buffers, name, value


class BufferWriter:
    """Prepared writes of buffers, in place if possible.

    The constructor allocates, so that the call need not. Buffers that cannot be written in place
    are replaced if they have changed.
    """

    def __init__(self, buffers: Iterable[BufferValue]) -> None:
        self.buffers = list(buffers)
        into: dict[int, tuple[Tensor, Tensor]] = {}
        self.replacements: list[BufferValue] = []
        for place, name, value in self.buffers:
            target = place.get(name)
            if value is target is None:
                continue
            if value is None or target is None or not _fits(target, value):
                self.replacements.append((place, name, value if value is None else value.detach()))
                continue
            # One tensor under two names that got two values.
            if into.get(id(target), (target, value))[1] is not value:
                self.replacements.append((place, name, value.detach()))
            elif _can_be_written(target):
                into[id(target)] = target, value
            elif not same_bits(target, value):
                self.replacements.append((place, name, value.detach().clone()))
        self._pairs = grouped(
            [target for target, _ in into.values()], [v for _, v in into.values()]
        )

    def __call__(self) -> None:
        """Write the buffers."""
        with torch.no_grad():
            copy_lists(self._pairs)
        for place, name, value in self.replacements:
            place[name] = value


def _can_be_written(tensor: Tensor) -> bool:
    """Whether a tensor is not expanded, and was not made in inference mode."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return False
    return is_unexpanded(tensor)


def _fits(target: Tensor, value: Tensor) -> bool:
    return (target.shape, target.dtype, target.layout) == (value.shape, value.dtype, value.layout)
