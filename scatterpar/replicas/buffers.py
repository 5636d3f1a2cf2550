"""The values of buffers after a step: those of replica 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.bits import same_bits
from scatterpar.devices.coalescing import copy_each, is_unexpanded, messages
from scatterpar.devices.copies import write
from scatterpar.replicas.shared_buffers import BufferDict, MemoryChanges, MemoryPart

# The module's dictionary of buffers, the buffer's name, and its value.
BufferValue = tuple[BufferDict, str, "Tensor | None"]

_kind_of_buffer = attrgetter("shape", "dtype", "layout")
_REGISTERED_BUFFERS = attrgetter("_buffers")
_NON_PERSISTENT = attrgetter("_non_persistent_buffers_set")
RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def written_unseen(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The running statistics that forward passes of ``modules`` write as they are now.

    Kernels of normalisations count no version of them.
    """
    statistics: list[Tensor] = []
    for module in modules:
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.training:
            buffers = map(module._buffers.get, RUNNING)
            statistics += [buffer for buffer in buffers if buffer is not None]
    return statistics


class Registrations:
    """The buffers that modules register, remembered.

    Compared without a Python call per module, as a ``Snapshot`` is.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._facts, self._buffers = self._present()

    def unchanged(self) -> bool:
        """Whether the same buffers are registered under the same names."""
        facts, buffers = self._present()
        return facts == self._facts and all(map(is_, buffers, self._buffers))

    def _present(self) -> tuple[Any, list[Any]]:
        registries = list(map(_REGISTERED_BUFFERS, self._modules))
        sizes = list(map(len, registries))
        names = list(chain.from_iterable(registries))
        non_persistent = list(map(frozenset, map(_NON_PERSISTENT, self._modules)))
        buffers = list(chain.from_iterable(map(dict.values, registries)))
        return (sizes, names, non_persistent), buffers


def values_after(
    modules: Sequence[nn.Module],
    copies: Sequence[nn.Module],
    copy_of: Callable[[Any], Any],
) -> Iterator[tuple[int, str, Tensor | None]]:
    """Yield (module's number, name, value in the copy) for each buffer.

    ``copy_of`` returns the copy of a tensor before the forward pass. Raises
    ``ValueError`` if a forward pass registered or deleted buffers.
    """
    yielded: set[int] = set()  # one tensor may be a buffer under several names
    for number, (module, copy) in enumerate(zip(modules, copies, strict=True)):
        # Most modules have none.
        if not module._buffers and not copy._buffers:
            continue
        _refuse_registrations(module, copy)
        for name, value in copy._buffers.items():
            before = module._buffers[name]
            # The forward pass has replaced the buffer.
            if value is None or value is not copy_of(before):
                yield number, name, value
            elif id(before) not in yielded:
                yielded.add(id(before))
                yield number, name, value


def _refuse_registrations(module: nn.Module, copy: nn.Module) -> None:
    names = module._buffers.keys() ^ copy._buffers.keys()
    names |= module._non_persistent_buffers_set ^ copy._non_persistent_buffers_set
    if names:
        raise ValueError(
            "the forward pass registers or deletes buffers "
            f"({', '.join(sorted(names))}), on each replica separately: nothing was "
            "changed; register buffers in __init__, or call the module once on one "
            "micro-batch before the first step"
        )


class RegisteredBuffers:
    """The registered buffers of the user's modules, and their values in a replica.

    Attributes:
        values: as they were registered when the replica was made.
        of_modules: the registrations in the user's modules.
        of_all: those in the replica's modules, too.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        copies: Sequence[nn.Module],
        copy_of: Callable[[Any], Any],
    ) -> None:
        self._modules = modules
        self._copies = copies
        self.of_modules = Registrations(modules)
        self.of_all = Registrations([*modules, *copies])
        self.values = self.values_after(copy_of)

    def values_after(self, copy_of: Callable[[Any], Any]) -> list[BufferValue]:
        """As they are registered now."""
        values: list[BufferValue] = []
        present = values_after(self._modules, self._copies, copy_of)
        for number, name, value in present:
            values.append((self._modules[number]._buffers, name, value))
        return values


class BufferWriter:
    """Writes the user's buffers, in place if possible, and takes it back.

    Buffers that cannot be written in place are replaced if they have changed.
    ``write`` allocates nothing.
    """

    def __init__(
        self,
        buffers: Iterable[BufferValue],
        unchanged: Iterable[Tensor] = (),
        memory_changes: MemoryChanges | None = None,
    ) -> None:
        """``unchanged`` are values that the buffers have already.

        Raises ``ValueError`` if a buffer cannot share memory as in the replica.
        """
        changes = memory_changes or {}
        equal = set(map(id, unchanged))
        # In inference mode also tensors that were made there can be written.
        can_write_all = torch.is_inference_mode_enabled()
        self._targets: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._unchanged: list[tuple[Tensor, Tensor]] = []
        self._replacements: list[BufferValue] = []
        self._messages: Sequence[Sequence[int]] | None = None  # of the targets
        self._buffers = list(buffers)
        self._earlier_values: list[Tensor] = []
        self._earlier_buffers: list[BufferValue] = []
        is_simple = not changes and not equal
        if self._buffers and is_simple and self._find_plain(can_write_all):
            return
        parts: list[tuple[BufferDict, str, MemoryPart]] = []
        for container, name, value in self._buffers:
            # By name: a hook or the user may have replaced it since.
            target = container.get(name)
            key = id(container), name
            if value is None:
                self._replacements.append((container, name, None))
            elif key in changes:
                part = changes[key]
                if part is not None:
                    parts.append((container, name, part))
                else:
                    own = value.detach().clone()
                    self._replacements.append((container, name, own))
            elif id(value) in equal and target is not None:
                self._unchanged.append((target, value))
            elif (
                target is None
                or _kind_of_buffer(target) != _kind_of_buffer(value)
                or self._values.get(id(target), value) is not value
            ):
                self._replacements.append((container, name, value.detach()))
            elif (can_write_all or not target.is_inference()) and is_unexpanded(target):
                self._targets[id(target)] = target
                self._values[id(target)] = value
            elif not same_bits(target, value):
                # A copy: the value is a replica's, which changes in the next step.
                self._replacements.append((container, name, value.detach().clone()))
        replaced = {
            (id(container), name): value
            for container, name, value in self._replacements
        }
        for container, name, part in parts:
            owner = part.registry[part.name]
            owner = replaced.get((id(part.registry), part.name), owner)
            assert owner is not None
            self._replacements.append((container, name, part.of(owner)))

    def _find_plain(self, can_write_all: bool) -> bool:
        """Find the targets if all buffers are plain tensors that can be written.

        Mostly they are. So hundreds are asked in few calls. Returns ``False``, and
        finds nothing, if one is not.
        """
        targets: list[Any] = []
        values: list[Any] = []
        for container, name, value in self._buffers:
            # By name: a hook or the user may have replaced it since.
            targets.append(container.get(name))
            values.append(value)
        if not {Tensor}.issuperset(map(type, targets + values)):
            return False
        # One tensor may be a buffer under several names.
        by_id = dict(zip(map(id, targets), targets, strict=True))
        kinds = list(map(_kind_of_buffer, values))
        if len(by_id) < len(targets) or list(map(_kind_of_buffer, targets)) != kinds:
            return False
        if any(map(Tensor.is_inference, targets)) and not can_write_all:
            return False
        # Others may repeat memory.
        if not all(map(Tensor.is_contiguous, targets)):
            return False
        self._targets = by_id
        self._values = dict(zip(by_id, values, strict=True))
        self._messages = messages(dict(enumerate(targets)))
        return True

    def write(self) -> None:
        """Write all buffers."""
        with torch.no_grad():
            # In few kernels: most buffers are small.
            targets = list(self._targets.values())
            copy_each(targets, list(self._values.values()), self._messages)
        # After the kernels: assignments cannot fail.
        for container, name, value in self._replacements:
            container[name] = value

    def save(self) -> None:
        """Save the buffers for ``restore``, before ``write`` and the user's hooks."""
        targets = self._targets.values()
        self._earlier_values = [target.detach().clone() for target in targets]
        self._earlier_buffers = [
            (container, name, container.get(name))
            for container, name, _ in self._buffers
        ]

    def restore(self) -> None:
        """Undo what was written since ``save``, by whomever."""
        for container, name, buffer in self._earlier_buffers:
            container[name] = buffer
        with torch.no_grad():
            copy_each(list(self._targets.values()), self._earlier_values)
            for target, value in self._unchanged:  # a hook may have written it
                write(target, value)
