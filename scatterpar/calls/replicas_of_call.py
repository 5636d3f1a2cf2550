"""The replicas of a module as its calls need them: followed in every call.

Parameters are sent when they have changed::

    a call              versions and storages are compared
    the first call      values, too: a write through ``.data`` raises no version
    after a backward
    pass, or of another
    mode, or after a
    failed one
    a call without a    values, too: no backward pass follows, after which the next
    graph, or of what   call would read them
    is not trained
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from itertools import chain
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.calls.gradients import CallGradients
from scatterpar.calls.shared_data import SharedData
from scatterpar.devices.coalescing import copy_each
from scatterpar.devices.transfers import Transfers
from scatterpar.devices.write_counters import versions
from scatterpar.errors import warn
from scatterpar.objects.reach import closed_over
from scatterpar.objects.references import MUTABLE_CONTAINERS
from scatterpar.objects.whose import is_user_function
from scatterpar.replicas.buffers import written_unseen
from scatterpar.replicas.replicas import Replica, ReplicaSet
from scatterpar.threads.workers import Workers

_PARAMETERS = attrgetter("_parameters")
_IS_LEAF = attrgetter("is_leaf")
HooksOfModule = Callable[[nn.Module], dict[int, Any]]
FORWARD_HOOKS: Sequence[HooksOfModule] = (
    attrgetter("_forward_hooks"),
    attrgetter("_forward_pre_hooks"),
)
ALL_HOOKS: Sequence[HooksOfModule] = (
    *FORWARD_HOOKS,
    attrgetter("_backward_hooks"),
    attrgetter("_backward_pre_hooks"),
)


class _Root(nn.Module):
    """A module, and the containers that its hooks close over: the roots of replicas."""

    def __init__(self, root: nn.Module, boxes: list[Any]) -> None:
        super().__init__()
        self.root = root
        self.boxes = boxes


class ReplicasOfCall:
    """The replicas of ``root``, of which the first is ``root`` itself.

    Attributes:
        device_ids: one entry per replica.
        gradients: those of the replicas.
        replica_set: the copies. That of the first replica is not called: it has the
            values of the buffers before a call.
        shared_data: what calls have left in the modules.
    """

    def __init__(
        self,
        root: Any,
        device_ids: Sequence[torch.device],
        replica_set: ReplicaSet,
    ) -> None:
        self.root = root
        self.gradients = CallGradients(device_ids)
        self.replica_set = replica_set
        self.shared_data = SharedData(replica_set)
        self.device_ids = tuple(device_ids)
        self._replicated: Any = root
        self._compiled_calls: dict[tuple[int, int], Callable[..., Any]] = {}
        self._versions: Sequence[int] = ()
        self._unseen: frozenset[int] = frozenset()
        self._seen: tuple[int, int] = (-1, -1)  # builds and sends
        self._adoptions = 0  # of the broadcast
        self._has_told_of_hooks = False
        self._mode: Any = None  # of the last call: flags, and whether it had a graph

    def refresh(self, transfers: Transfers, workers: Workers) -> None:
        """Update the replicas, which ``workers`` call, to match the root."""
        self._find_boxes()
        replica_set = self.replica_set
        is_recorded = torch.is_grad_enabled()
        seen_before = self._seen
        # If this fails, such as a copy, the next call reads all values.
        self._seen = (-1, -1)
        # Tensors that are made in inference mode could not be trained later.
        with torch.inference_mode(False), torch.no_grad():
            if not self.shared_data.is_as_left():
                replica_set.forget()
            replica_set.follow(
                self._replicated,
                self.device_ids,
                share=self.shared_data.share_removals,
            )
            # Also in a step that has failed since, before it sent values.
            are_in_place = replica_set.broadcast.adoptions == self._adoptions
            seen = replica_set.builds, replica_set.sends
            # Between training and evaluation a loop may swap values, through ``.data``.
            mode = replica_set.flags, is_recorded
            is_other_mode = mode != self._mode
            self._mode = mode
            is_read_again = self.gradients.were_added or is_other_mode
            # ``.data = values`` raises no version, either.
            is_read_again |= not are_in_place
            # Such as a teacher, whose weights follow another module's.
            is_read_again |= not is_recorded or not replica_set.slots.trained
            is_other = seen != seen_before
            reads_values = is_other or is_read_again
            changed: Set[int] = frozenset()
            # Whether it has all that differ from the copies of the first replica.
            is_complete = not reads_values
            broadcast = replica_set.broadcast
            if reads_values:
                comparison = broadcast.compare()
                present = comparison.versions
                sent = broadcast.send_changed(transfers, comparison)
                # Those copies get the same values as other memories.
                is_complete = sent is not None
                changed = sent or changed
                self.gradients.were_added = False
            else:
                present = versions(replica_set.tensors)
                if present != self._versions or self._unseen:
                    pairs = enumerate(zip(present, self._versions, strict=True))
                    written = {n for n, (now, before) in pairs if now != before}
                    changed = broadcast.with_sharing(written | self._unseen)
                    broadcast.send_written(present, self._unseen, transfers)
            for number, replica in enumerate(replica_set.replicas):
                # Calls of the first one are those of the user's module, but steps call
                # it, and it uses the memory of the user's parameters.
                may_be_written = number > 0 or is_other or not are_in_place
                replica.reset_written(
                    changed,
                    uncounted=self._unseen,
                    reads_values=reads_values,
                    is_complete=is_complete and not may_be_written,
                    may_be_written=may_be_written,
                )
                # So the first one need not be asked for writes of parameters.
                replica.was_called = number > 0
            # Of before values were read: the next call sees a write meanwhile.
            self._versions = present
            self._adoptions = broadcast.adoptions
            self._seen = seen
            unseen = set(map(id, written_unseen(replica_set.modules)))
            if unseen:
                numbers = enumerate(replica_set.tensors)
                self._unseen = frozenset(n for n, t in numbers if id(t) in unseen)
            else:
                self._unseen = frozenset()
        self.gradients.connect(replica_set, workers)

    def modules_of(self, module: Any, count: int) -> list[Any]:
        """A module, or a method of one, and its copies in the other replicas."""
        replicas = self.replica_set.replicas[1:count]
        copies = [replica.copy_of(module) for replica in replicas]
        return [self._compiled(module), *copies]

    def _compiled(self, module: Any) -> Any:
        """The user's module, which runs compiled if replicas of it do."""
        replica_set = self.replica_set
        compiled = replica_set.contents.compiled.get(id(module))
        if replica_set.compiler is None or compiled is None:
            return module
        key = id(module), replica_set.builds
        # Kept between calls, because a new one would be compiled again.
        if key not in self._compiled_calls:
            # Those of earlier builds are not called again.
            self._compiled_calls.clear()
            _, compile_fn = compiled
            self._compiled_calls[key] = replica_set.compiler.compiled_call(
                module, module, compile_fn
            )
        return self._compiled_calls[key]

    def others(self, count: int) -> Sequence[Replica]:
        """The first ``count`` replicas, except the first one."""
        return self.replica_set.replicas[1:count]

    def restore_buffers(self) -> None:
        """Restore the attributes of the user's modules, which of their tensors require
        grad, and the values of buffers.
        """
        replica_set = self.replica_set
        self._seen = (-1, -1)  # the next call reads all values
        registries: set[int] = set()
        for module in replica_set.modules:
            registries |= {id(module._buffers), id(module._parameters)}
            registries |= {id(module._modules), id(vars(module))}
        for _, container, saved in self.shared_data.changed_containers():
            # Other data stays as the failed forward pass has left it, as in torch.
            if id(container) in registries:
                container.clear()
                container.update(saved)
        for slot in replica_set.slots.all:
            tensor = slot.tensor
            if tensor.is_leaf and not tensor.is_inference():
                tensor.requires_grad_(slot.is_trained)
        if not replica_set.replicas:
            return
        # The copy of the first replica is never called: it has the values from before.
        copies = replica_set.replicas[0].own_tensors()
        with torch.no_grad():
            # Not all: a write to what has not changed would break the user's graphs.
            targets: list[Tensor] = []
            values: list[Tensor] = []
            for number, value in copies.items():
                target = replica_set.tensors[number]
                is_written = target._version != self._versions[number]
                if is_written or number in self._unseen:
                    targets.append(target)
                    values.append(value)
            copy_each(targets, values)

    def _find_boxes(self) -> None:
        """Find containers that hooks close over: replicas fill their own."""
        if not isinstance(self.root, nn.Module):  # such as a partial
            return
        hooks = user_hooks(modules_in(self.root))
        if hooks and len(self.device_ids) > 1 and not self._has_told_of_hooks:
            self._has_told_of_hooks = True
            warn(
                "hooks inside of the module run once per replica, each for its own "
                "rows; nothing to do if forward hooks keep tensors with one entry per "
                "row: the engine joins them. If hooks keep other values, such as "
                "gradients, do not rely on them: you get the values of replica 0 only"
            )
        # By identity: equal lists are not the same list.
        boxes = list(_boxes_of(hooks)) if hooks else []
        present = getattr(self._replicated, "boxes", [])
        if list(map(id, boxes)) == list(map(id, present)):
            return
        self._replicated = _Root(self.root, boxes) if boxes else self.root


def modules_in(root: nn.Module) -> list[nn.Module]:
    """A module and what it consists of, each once.

    As ``root.modules()``, in a fifth of its time, because each call reads them.
    """
    modules = [root]
    seen = {root}
    for module in modules:
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return modules


def user_hooks(
    modules: Sequence[nn.Module], kinds: Sequence[HooksOfModule] = ALL_HOOKS
) -> list[Any]:
    """The hooks of ``modules`` that are functions of the user's."""
    hooks: list[Any] = []
    for hooks_of in kinds:
        for registry in filter(None, map(hooks_of, modules)):
            hooks += registry.values()
    return [hook for hook in hooks if is_user_function(hook)]


def first_computed(modules: Sequence[nn.Module]) -> Tensor | None:
    """The first parameter of ``modules`` that is computed from others, if there is one.

    As ``torch.func.functional_call`` sets them. Without a Python call per parameter,
    because each call asks.
    """
    registries = map(_PARAMETERS, modules)
    values = chain.from_iterable(map(dict.values, registries))
    parameters: list[Tensor] = [value for value in values if value is not None]
    if all(map(_IS_LEAF, parameters)):
        return None
    return next(parameter for parameter in parameters if not parameter.is_leaf)


def _boxes_of(hooks: Iterable[Any]) -> Iterable[Any]:
    functions = [hook for hook in hooks if isinstance(hook, FunctionType)]
    for value in closed_over(functions):
        if type(value) in MUTABLE_CONTAINERS:
            yield value
