"""Replicas: built once, kept, and updated to match the master's module before every
step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, starmap
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scatterpar.devices.coalescing import copy_each
from scatterpar.devices.device_ids import physical
from scatterpar.devices.transfers import Transfers, to_host
from scatterpar.errors import restored
from scatterpar.replicas.batch_statistics import (
    Layer,
    Records,
    StepStatistics,
    moments_on,
    pooled,
    record,
)
from scatterpar.replicas.broadcast import Broadcast
from scatterpar.replicas.buffers import RUNNING, BufferValue, values_after
from scatterpar.replicas.checks import check_placement, parameters_of
from scatterpar.replicas.compiled import Compiler
from scatterpar.replicas.module_copy import (
    ModuleContents,
    ModuleCopy,
    Snapshot,
    is_leaf,
    root_to_replicate,
)
from scatterpar.replicas.parameter_guard import ParameterGuard
from scatterpar.torch_private import CompileFn

_REQUIRES_GRAD = attrgetter("requires_grad")


class ReplicaOptions(NamedTuple):
    """How replicas are made.

    Attributes:
        accumulate_dtype: the dtype in which gradients are added, if theirs is not wider.
        record_statistics: replicas record the statistics of batch normalisation, from
            which the running ones are updated once per step.
        compile_fn: compiles the whole module; ``None`` if it runs as it is.
    """

    accumulate_dtype: torch.dtype | None = None
    record_statistics: bool = False
    compile_fn: CompileFn | None = None


class Replicas:
    """The replicas of a module, one per entry of ``device_ids``, and of
    its criterion.
    """

    def __init__(
        self, device_ids: Sequence[torch.device], options: ReplicaOptions
    ) -> None:
        self._device_ids, self.options = tuple(device_ids), options
        self.discard()

    def discard(self) -> None:
        """Forget the replicas: threads of an interrupted step may still use them."""
        self.of_model = ReplicaSet(self.options)
        self._of_criterion = ReplicaSet(self.options._replace(compile_fn=None))
        # and that of the criterion, if it needs replicas
        self.replica_sets = [self.of_model]
        self.criteria: list[Any] = []  # one per replica

    def refresh(
        self,
        module: nn.Module,
        criterion: Any,
        transfers: Transfers,
        number: int | None = None,
    ) -> None:
        """Update all replicas to match the user's modules.

        A criterion that is a module, or a method of one, is replicated like the model,
        or only ``number`` times, on the first devices. So are the modules and tensors
        that a ``functools.partial`` binds. Any other callable is called unchanged.
        """
        root, device_ids = root_to_replicate(criterion), self._device_ids
        self.replica_sets = [self.of_model]
        with torch.inference_mode(False), torch.no_grad():
            self.of_model.follow(module, device_ids)
            if root is not None and not self.of_model.contains_all_of(root):
                self._of_criterion.follow(root, device_ids[:number])
                self.replica_sets.append(self._of_criterion)
            # The host waits once, for the model's and the criterion's.
            differences = to_host(
                [each.broadcast.compare() for each in self.replica_sets]
            )
            for each, found in zip(self.replica_sets, differences, strict=True):
                each.send(transfers, found)
            replicas = self.replica_sets[-1].replicas
            self.criteria = [
                criterion if root is None else r.copy_of(criterion) for r in replicas
            ]

    def statistics_after(
        self, active: int, transfers: Transfers
    ) -> StepStatistics | None:
        """The statistics of the step, on the master; ``None`` if none are recorded.

        Only the first ``active`` replicas have a share of the batch.
        """
        if not self.options.record_statistics:
            return None
        layers: list[Layer] = []
        for replica_set in self.replica_sets:
            layers += replica_set.recorded(active, transfers)
        return StepStatistics(layers)

    def end_substep(self) -> None:
        """The sub-step of this thread's replica has ended: other
        replicas may compile.
        """
        for each in self.replica_sets:
            if each.compiler is not None:
                each.compiler.release()

    def clear_step_state(self) -> None:
        """Drop the replicas' gradients and the references to the user's criterion."""
        self.criteria = []
        for each in self.replica_sets:
            each.clear_gradients()


class ReplicaSet:
    """The replicas of one root: a module, or a partial that binds modules or tensors.

    On the master's device, parameters share the master's storage. Every other device
    has one copy of them, which its replicas share. Each replica has private buffers.
    ``follow`` and ``send`` make all replicas match the master, whatever the user has
    changed in the module.

    By the number of a tensor, ``trained`` has the dtype in which its gradients are
    added, and ``leaves`` the master's tensor, unless it was computed from parameters.
    """

    def __init__(self, options: ReplicaOptions) -> None:
        self.options = options
        self.compiler: Compiler | None = None  # if a module is compiled
        self.changes = 0  # how often the modules changed, except in values of tensors
        # how often more than plain values changed, so that replicas were made
        self.builds = 0
        self.flags = 0  # a hash of all switches, such as ``training``
        self.root: Any = None
        self.device_ids: tuple[torch.device, ...] = ()
        self.replicas: list[Replica] = []
        self.broadcast = Broadcast(ModuleContents(()), ())
        self._state: Snapshot | None = None

    def follow(self, root: Any, device_ids: tuple[torch.device, ...]) -> None:
        """Update or rebuild the replicas to match ``root``, except
        values of tensors.
        """
        is_other = root is not self.root or device_ids != self.device_ids
        self.root, self.device_ids = root, device_ids
        if is_other or not self._update_in_place():
            self._build()

    def send(self, transfers: Transfers, differences: Tensor) -> None:
        """Send the values of tensors to all replicas. Call it under
        ``torch.no_grad()``.
        """
        self.broadcast.update(transfers, differences)
        for replica in self.replicas:
            replica.refresh()

    def contains_all_of(self, root: Any) -> bool:
        """Whether the modules and tensors of ``root`` are all replicated here."""
        modules = self.contents.modules.keys()
        if isinstance(root, nn.Module):
            return id(root) in modules
        held = ModuleContents((root,))
        return (
            modules >= held.modules.keys()
            and set(map(id, self.tensors)) >= held.tensors.keys()
        )

    def clear_gradients(self) -> None:
        """Drop the replicas' gradients."""
        for replica in self.replicas:
            for i in self.trained:
                replica.tensors[i].grad = None

    def _update_in_place(self) -> bool:
        """Copy changed plain values, and set which tensors require grad.

        Returns ``False`` if anything else has changed, so that new replicas are needed.
        Plain values are numbers, strings and flags: schedules change these at every
        step.
        """
        if self._state is None or not self.broadcast.fits():
            return False
        if not self._state.unchanged():
            changed = self._state.value_changes()
            if changed is None:
                return False
            for state in (self._state, *(replica.state for replica in self.replicas)):
                state.apply_changes(changed)
            self.flags = self._state.flags()
            self._count_change()
        if list(map(_REQUIRES_GRAD, self.tensors)) != self._required:
            self._set_requires_grad()
        return True

    def _set_requires_grad(self) -> None:
        """Set which tensors require grad, and the dtypes in which their gradients are
        added.
        """
        self._required = list(map(_REQUIRES_GRAD, self.tensors))
        self.trained = {
            i: sum_dtype(tensor, self.options.accumulate_dtype)
            for i, tensor in enumerate(self.tensors)
            if tensor.requires_grad and not tensor.is_inference()
        }
        self.leaves = {
            i: self.tensors[i] for i in self.trained if is_leaf(self.tensors[i])
        }
        self._count_change()
        for replica in self.replicas:
            replica.set_requires_grad(self.trained)

    def _count_change(self) -> None:
        self.changes += 1
        if self.compiler is not None:
            self.compiler.forget()

    def _build(self) -> None:
        self._state = None
        self.builds += 1
        check_placement(self.root, self.device_ids)
        self.contents = found = ModuleContents(
            (self.root,), physical(self.device_ids[0])
        )
        self.modules = list(found.modules.values())
        self.tensors = list(found.tensors.values())  # the master's
        if not self.broadcast.is_of(found, self.device_ids):
            self.broadcast = Broadcast(found, self.device_ids)
        if (compile_fn := self.options.compile_fn) is not None:
            found.compiled.setdefault(id(self.root), (self.root, compile_fn))
        if found.compiled and self.compiler is None:
            self.compiler = Compiler()
        self.replicas = [Replica(self, device) for device in self.device_ids]
        self.guard = ParameterGuard(
            self.broadcast, [(r.device, r.tensors) for r in self.replicas]
        )
        self._set_requires_grad()
        self._state = Snapshot(found.containers, found.facts)
        self.flags = self._state.flags()

    def _refuse_created(self) -> None:
        """Refuse trained parameters that forward passes create: the user's module lacks
        them.
        """
        for replica in self.replicas:
            known = set(map(id, replica.tensors))
            for name, parameter in parameters_of(replica.root):
                if parameter.requires_grad and id(parameter) not in known:
                    raise ValueError(
                        f"the forward pass creates the parameter {name!r} on each "
                        "replica, where "
                        "no optimizer finds it; nothing was changed. Create it "
                        "before the first "
                        f"step: call the module once on one micro-batch"
                    )

    def buffers_after(self) -> list[BufferValue]:
        """Replica 0's buffers, without running statistics that are updated once per
        step.
        """
        first = self.replicas[0]
        return [
            (self.modules[m]._buffers, name, value)
            for m, name, value in values_after(
                self.modules, first.modules, first.copy_of
            )
            if m not in first.records or name not in RUNNING
        ]

    def recorded(self, active: int, transfers: Transfers) -> list[Layer]:
        """Each recording layer, with the moments of the first ``active`` replicas."""
        replicas = self.replicas[:active]
        master = replicas[0].device
        by_replica = [
            moments_on(master, replica.records, replica.device, transfers)
            for replica in replicas
        ]
        layers: list[Layer] = []
        for number in replicas[0].records:
            layer: Any = self.modules[number]
            if layer.running_mean is not None:
                moments = [
                    of_replica[number]
                    for of_replica in by_replica
                    if number in of_replica
                ]
                layers.append((layer, pooled(moments)))
        return layers


@contextlib.contextmanager
def parameter_writes_refused(
    replica_sets: Sequence[ReplicaSet], *, second_pass: bool = False
) -> Iterator[None]:
    """Refuse forward passes in the body that write or create parameters, in each pass's
    modes.
    """
    with contextlib.ExitStack() as stack:
        for each in replica_sets:
            mode = each.flags, second_pass
            stack.enter_context(each.guard.read_only(mode, each._refuse_created))
        yield


def sum_dtype(tensor: Tensor, accumulate_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a leaf's gradients are added: at least
    ``accumulate_dtype``.
    """
    dtype = (tensor.grad_dtype if is_leaf(tensor) else None) or tensor.dtype
    return (
        dtype
        if accumulate_dtype is None
        else torch.promote_types(dtype, accumulate_dtype)
    )


class Replica(ModuleCopy):
    """A working copy of the modules, with its tensors in the order of the master's."""

    def __init__(self, of: ReplicaSet, device: torch.device) -> None:
        self.device, contents = device, of.contents
        storages, sources = of.broadcast.storages(device), of.broadcast.at(device)
        # ``.data``: an alias with its own version counter, so that writes can be
        # attributed.
        self.tensors = [
            *map(parameter_like, of.tensors, [storage.data for storage in storages])
        ]
        self._places = list(zip(self.tensors, storages, strict=True))
        private = [i for i, storage in enumerate(storages) if storage is not sources[i]]
        self._private = [self.tensors[i] for i in private]
        self._sources = [sources[i] for i in private]
        super().__init__(contents, self.tensors, of.compiler)
        self.root = self.copy_of(of.root)
        self.modules = [self.copy_of(module) for module in of.modules]
        self.records: Records = {}
        if of.options.record_statistics:
            self.records = record(self.modules)
        tensors = self.tensors  # not `self`, which would be a cycle
        self.state = Snapshot(
            self.containers, lambda: list(map(_REQUIRES_GRAD, tensors))
        )
        self._trained: Mapping[int, torch.dtype] = {}

    def refresh(self) -> None:
        """Undo what a forward pass rebound, and copy the sources' buffers, under
        ``no_grad``.

        A forward pass or the user may exchange the storage of a tensor (``p.data =``,
        ``p.set_``, ``flatten_parameters``), or set ``requires_grad``.
        """
        if not self.is_as_refreshed():
            for tensor, storage in self._places:
                if not tensor.is_set_to(storage):
                    tensor.data = storage
            self.set_requires_grad(self._trained)
            self.state.restore()
        copy_each(self._private, self._sources)
        self.clear_records()

    def clear_records(self) -> None:
        """Forget what modules have recorded in this step."""
        self.records.update({m: [] for m in self.records})

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """The body begins with the state of the last refresh; then the present state is
        restored.

        The state is the registered buffers, the values of private tensors, and the
        records.
        """
        names = [(m._buffers, m._non_persistent_buffers_set) for m in self.modules]
        registered = Snapshot([*chain(*names), self.records])
        with torch.inference_mode(False), torch.no_grad():
            saved = list(map(Tensor.clone, self._private))
            self.refresh()

        def restore() -> None:
            with torch.inference_mode(False), torch.no_grad():
                self.refresh()
                copy_each(self._private, saved)
            registered.restore()

        with restored(restore):
            yield

    def is_as_refreshed(self) -> bool:
        """Whether forward passes have rebound nothing since the last refresh."""
        return self.state.unchanged() and all(starmap(Tensor.is_set_to, self._places))

    def set_requires_grad(self, trained: Mapping[int, torch.dtype]) -> None:
        """Set which tensors are ``trained``, and the dtypes in which their gradients
        are added.
        """
        self._trained = trained
        for i, tensor in enumerate(self.tensors):
            if tensor.is_leaf:
                tensor.requires_grad_(i in trained)
                if i in trained:
                    tensor.grad_dtype = trained[i]


def parameter_like(original: Tensor, values: Tensor) -> Tensor:
    """A parameter of the original's class that uses the memory of ``values``.

    If the original is no parameter, ``values`` itself.
    """
    if not isinstance(original, nn.Parameter):
        return values
    kind = type(original) if issubclass(type(original), nn.Parameter) else nn.Parameter
    # Not the constructor of a subclass, which may need more arguments.
    return nn.Parameter.__new__(kind, values, requires_grad=False)
