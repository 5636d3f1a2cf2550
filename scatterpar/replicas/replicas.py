"""Replicas: built once, kept, and updated to match the master's module before every step."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices import runtime
from scatterpar.devices.coalescing import (
    copy_each,
    copy_lists,
    empty_like_on,
    grouped,
    has_flat_view,
)
from scatterpar.devices.transfers import Transfers, to_host
from scatterpar.replicas.broadcast import Broadcast, is_plain
from scatterpar.replicas.buffers import (
    RUNNING,
    BufferPolicy,
    Buffers,
    batch_norms,
    buffers_of,
    record_moments,
    values_after,
)
from scatterpar.replicas.checks import check_placement
from scatterpar.replicas.compiled import CompileFn, Compiler
from scatterpar.replicas.module_copy import ModuleContents, ModuleCopy, Snapshot, root_to_replicate
from scatterpar.replicas.parameter_guard import ParameterGuard

ParameterCopies = dict[Tensor, dict[torch.device, Tensor]]  # a parameter as each memory has it

_REQUIRES_GRAD = attrgetter("requires_grad")


class ReplicaSet:
    """The replicas of a module on some devices, and of the criterion that it is trained with.

    On the master's device, parameters share the master's storage. Every other device has one copy
    of them, which its replicas share. Each replica has private buffers. ``refresh`` makes all
    replicas match the master, whatever the user has changed in the module.

    Args:
        device_ids: one entry per replica; the module lives on the first, the master.
        accumulate_dtype: gradients are added in this dtype if their own is narrower.
        compile_fn: the function that compiles the whole module.
        buffer_policy: which buffers a step leaves.
    """

    def __init__(
        self,
        device_ids: Sequence[torch.device],
        accumulate_dtype: torch.dtype | None = None,
        compile_fn: CompileFn | None = None,
        buffer_policy: BufferPolicy | None = None,
    ) -> None:
        self._accumulate_dtype = accumulate_dtype
        self.buffer_policy = buffer_policy or BufferPolicy.named("master")
        self.criteria: list[Any] = []  # one per replica
        self.compiler = Compiler(compile_fn)
        self.changes = 0  # how often the modules changed, except in values of tensors
        self.warmed_up_kinds: set[Hashable] = set()  # keys of sub-steps that have run compiled
        self.roots: tuple[Any, ...] = ()
        self.device_ids = tuple(device_ids)
        self.discard()

    def discard(self) -> None:
        """Forget the replicas: threads of an interrupted step may still use them."""
        self.replicas: list[Replica] = []
        self.tensors: list[Tensor] = []  # the master's
        self._state: Snapshot | None = None
        self._broadcast = Broadcast((), self.device_ids)
        self._replicates_criterion = False
        vars(self).pop("_of_criterion", None)

    @cached_property
    def _of_criterion(self) -> ReplicaSet:
        return ReplicaSet(self.device_ids, self._accumulate_dtype, None, self.buffer_policy)

    @property
    def replica_sets(self) -> list[ReplicaSet]:
        """The set itself and, if the criterion needs replicas, the set of the criterion."""
        return [self, self._of_criterion] if self._replicates_criterion else [self]

    def refresh(
        self,
        module: nn.Module,
        criterion: Callable[..., Any] | None,
        transfers: Transfers,
        criterion_once: bool = False,
    ) -> None:
        """Update all replicas to match the user's modules.

        A criterion that is a module, or a method of one, is replicated like the model, or with
        ``criterion_once`` on the master only. So are the modules and tensors that a
        ``functools.partial`` binds. Any other callable is called unchanged.
        """
        root = root_to_replicate(criterion)
        with torch.inference_mode(False), torch.no_grad():
            to_read = [self._follow((module,), self.device_ids)]
            self._replicates_criterion = root is not None and not self._contains_all_of(root)
            if self._replicates_criterion:
                devices = self.device_ids[:1] if criterion_once else self.device_ids
                to_read.append(self._of_criterion._follow((root,), devices))
            replicas = self.replica_sets[-1].replicas
            self.criteria = [criterion if root is None else r.copy_of(criterion) for r in replicas]
            values = iter(to_host([*chain(*to_read)]))
            for each, tensors in zip(self.replica_sets, to_read, strict=True):
                each._broadcast.send(transfers, list(islice(values, len(tensors))))
                for replica in each.replicas:
                    replica.refresh()

    def clear_step_state(self) -> None:
        """Drop the replicas' gradients and the references to the user's criterion."""
        self.criteria = []
        for each in self.replica_sets:
            each.clear_gradients()

    def _contains_all_of(self, root: Any) -> bool:
        """Whether the model contains all modules and tensors of ``root``."""
        if isinstance(root, nn.Module):
            return self.contains(root)
        held = ModuleContents((root,))
        tensors = set(map(id, self.tensors))
        return (
            tensors >= held.tensors.keys()
            and self._module_contents.modules.keys() >= held.modules.keys()
        )

    def parameter_copies(self) -> ParameterCopies:
        """The parameters that code outside may write, each with its copy on every device.

        They are dense, and share their memory with no other. After writing call
        ``broadcast_updates``, or ``guard.invalidate`` if the write failed.
        """
        starts = Counter(map(Tensor.data_ptr, self.tensors))  # not two parameters in one place
        return {
            tensor: {device: copies[i] for device, copies in self.guard.memories.items()}
            for i, tensor in enumerate(self.guard.originals)
            if has_flat_view(tensor) and starts[tensor.data_ptr()] == 1
        }

    def broadcast_updates(
        self, owners: Mapping[Tensor, torch.device], transfers: Transfers
    ) -> None:
        """Copy the new values of parameters from their owners' memories to all others."""
        positions = {i: owners[t] for i, t in enumerate(self.tensors) if t in owners}
        self._broadcast.receive_updates(positions, transfers)

    def contains(self, module: nn.Module) -> bool:
        """Whether ``module`` is one of the replicated modules."""
        return id(module) in self._module_contents.modules

    @property
    def shared_objects(self) -> list[Any]:
        """The objects in the modules that replicas share instead of copying them."""
        return list(self._module_contents.objects.values())

    @property
    def flags(self) -> tuple[Any, ...]:
        """Every switch of the modules, such as ``training``: plain values that are not numbers."""
        return () if self._state is None else self._state.flags

    def _refuse_created(self) -> None:
        """Refuse trained parameters that forward passes create: the user's module lacks them."""
        for replica in self.replicas:
            known = set(map(id, [*replica.tensors, *replica.sparse]))
            modules = (root for root in replica.roots if isinstance(root, nn.Module))
            named = (item for module in modules for item in module.named_parameters())
            name = next((n for n, p in named if p.requires_grad and id(p) not in known), None)
            if name is not None:
                raise ValueError(
                    f"the forward pass creates the parameter {name!r} on each replica, where no "
                    f"optimizer finds it; nothing was changed. Create it before the first step, "
                    f"for example by calling the module once on one micro-batch. To change its "
                    f"values, write it after the optimizer's step"
                )

    def clear_gradients(self) -> None:
        """Drop the replicas' gradients."""
        for replica in self.replicas:
            for i in self.trained_indices:
                replica.tensors[i].grad = None

    def _follow(self, roots: tuple[Any, ...], device_ids: tuple[torch.device, ...]) -> list[Tensor]:
        """Update or rebuild the replicas to match the user's modules, except values of tensors.

        Returns the tensors of ``Broadcast.compare``.
        """
        are_others = (self.roots, self.device_ids) != (roots, device_ids)
        self.roots, self.device_ids = roots, device_ids
        if are_others or not self._update_in_place():
            self._build()
        return self._broadcast.compare()

    def _update_in_place(self) -> bool:
        """Copy changed plain values to the replicas, and set which tensors require grad.

        Returns ``False`` if anything else has changed, so that new replicas are needed. Plain
        values are numbers, strings and flags: schedules change these at every step.
        """
        if self._state is None or not self._broadcast.fits():
            return False
        if not self._state.unchanged():
            changed = self._state.value_changes()
            if changed is None:
                return False
            for state in (self._state, *(replica.state for replica in self.replicas)):
                state.apply_changes(changed)
            self.warmed_up_kinds.clear()
            self.changes += 1
        if self._known_grad_settings is None or self._grad_settings() != self._known_grad_settings:
            self._set_requires_grad()
        return True

    def _set_requires_grad(self) -> None:
        """Set which tensors require grad, and the dtypes in which their gradients are added."""
        dtypes = [
            sum_dtype(t, self._accumulate_dtype)
            if t.requires_grad and not t.is_inference()
            else None
            for t in self.tensors
        ]
        self.trained_indices = [i for i, dtype in enumerate(dtypes) if dtype is not None]
        self.leaf_indices = [i for i in self.trained_indices if _is_leaf(self.tensors[i])]
        self.trained_tensors = [self.tensors[i] for i in self.leaf_indices]
        self.warmed_up_kinds.clear()
        self.changes += 1
        for replica in self.replicas:
            replica.set_requires_grad(dtypes)
        self._known_grad_settings = self._grad_settings()

    def _build(self) -> None:
        self._state = None
        check_placement(self.roots, self.device_ids)
        module_contents = ModuleContents(self.roots, runtime.physical(self.device_ids[0]))
        modules = list(module_contents.modules.values())
        self.tensors = list(module_contents.tensors.values())
        self._module_contents = module_contents
        self.registered = [buffers_of(module) for module in modules]
        self.batch_norms = batch_norms(modules) if self.buffer_policy.pools_batch_norms else {}
        if not self._broadcast.is_of(self.tensors, self.device_ids):
            self._broadcast = Broadcast(self.tensors, self.device_ids)
        common = module_contents, self.compiler, self.batch_norms
        self.replicas = [
            Replica(device, self._broadcast.at(device), *common) for device in self.device_ids
        ]
        copies = [(replica.device, replica.tensors) for replica in self.replicas]
        self.guard = ParameterGuard(self.roots, self._broadcast, copies)
        self._set_requires_grad()
        sparse = [tensor for replica in self.replicas for tensor in replica.sparse]
        containers = [
            *module_contents.containers,
            *(attributes for _, attributes in module_contents.attributes),
        ]
        self._state = Snapshot(containers, partial(module_contents.facts, sparse))

    def buffers_after(self) -> list[tuple[int, Buffers, str, Tensor | None]]:
        """``values_after`` of replica 0, without running statistics that are updated per step."""
        first = self.replicas[0]
        after = values_after(self.registered, first.registered, first.copy_of)
        return [one for one in after if not (one[0] in self.batch_norms and one[2] in RUNNING)]

    def _grad_settings(self) -> list[Any] | None:
        """The settings that determine gradients and their dtypes; ``None`` if unknown."""
        try:
            return [
                *map(_REQUIRES_GRAD, self.tensors),
                *[self.tensors[i].grad_dtype for i in self.leaf_indices],
            ]
        except RuntimeError:  # a leaf is a leaf no more
            return None


@contextlib.contextmanager
def parameter_writes_refused(
    replica_sets: Sequence[ReplicaSet], *, second_pass: bool = False
) -> Iterator[None]:
    """Refuse forward passes in the body that write or create parameters.

    The second passes of ``whole_batch=True`` are checked as a separate mode.
    """
    with contextlib.ExitStack() as stack:
        for each in replica_sets:
            mode = each.flags, second_pass
            stack.enter_context(each.guard.read_only(mode, each._refuse_created))
        yield


def sum_dtype(tensor: Tensor, accumulate_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a leaf's gradients are added: at least ``accumulate_dtype``."""
    try:
        dtype = tensor.grad_dtype or tensor.dtype
    except RuntimeError:  # no leaf
        dtype = tensor.dtype
    return dtype if accumulate_dtype is None else torch.promote_types(dtype, accumulate_dtype)


def _is_leaf(tensor: Tensor) -> bool:
    """Whether the tensor is a leaf, which accumulates gradients in ``.grad``.

    torch raises an error for chunks of a weight that was written since; these are not leaves.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


class Replica(ModuleCopy):
    """A working copy of the modules, with its tensors in the order of the master's."""

    def __init__(
        self,
        device: torch.device,
        sources: Sequence[Tensor],
        module_contents: ModuleContents,
        compiler: Compiler,
        batch_norms: Mapping[int, nn.Module],
    ) -> None:
        self.device = device
        originals = list(module_contents.tensors.values())
        private = [i for i, tensor in enumerate(originals) if is_state(tensor)]
        private_tensors = empty_like_on([originals[i] for i in private], device, is_plain)
        # The storage of each tensor: that of the source, or private memory of this replica.
        self._canonical = list(sources)
        for i, allocated in zip(private, private_tensors, strict=True):
            self._canonical[i] = allocated
        # ``.data``: an alias with its own version counter, so that writes can be attributed.
        self.tensors = [
            storage.data if is_state(original) else parameter_like(original, storage.data)
            for original, storage in zip(originals, self._canonical, strict=True)
        ]
        self._states = [self.tensors[i] for i in private]
        self._copied = grouped(self._states, [sources[i] for i in private])
        super().__init__(
            module_contents, dict(zip(module_contents.tensors, self.tensors, strict=True)), compiler
        )
        self.roots = tuple(map(self.copy_of, module_contents.roots))
        self.registered = [
            buffers_of(self.copy_of(module)) for module in module_contents.modules.values()
        ]
        norms = {m: self.copy_of(module) for m, module in batch_norms.items()}
        self.recorded_moments = record_moments(norms)
        self.state = Snapshot(self.containers)
        self._sum_dtypes: Sequence[torch.dtype | None] = [None] * len(self.tensors)
        self._is_trained = [False] * len(self.tensors)

    def refresh(self) -> None:
        """Undo what a forward pass rebound, and copy the sources' buffers.

        Call it under ``torch.no_grad()``. A forward pass or the user may exchange the storage of a
        tensor (``p.data =``, ``p.set_``, ``flatten_parameters``). Each tensor gets its canonical
        storage back. Afterwards a leaf requires grad as the master's tensor does, whatever a
        forward pass has set.
        """
        if not self.state.unchanged():
            self.state.restore()
        self.rebind()
        if not self._is_canonical():
            for tensor, storage in zip(self.tensors, self._canonical, strict=True):
                if not tensor.is_set_to(storage):
                    tensor.data = storage
        if list(map(_REQUIRES_GRAD, self.tensors)) != self._is_trained:
            self.set_requires_grad(self._sum_dtypes)
        copy_lists(self._copied)
        self.recorded_moments.update({m: [] for m in self.recorded_moments})

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """The body begins with the state of the last refresh; then the present state is restored.

        The state is the registered buffers, the values of private tensors, and the statistics that
        batch normalisations have recorded.
        """
        registered = [(one, dict(one.buffers), set(one.non_persistent)) for one in self.registered]
        recorded = dict(self.recorded_moments)
        with torch.inference_mode(False), torch.no_grad():
            values = [state.clone() for state in self._states]
            self.refresh()
        try:
            yield
        finally:
            with torch.inference_mode(False), torch.no_grad():
                self.refresh()
                copy_each(self._states, values)
            for one, buffers, non_persistent in registered:
                one.buffers.clear()
                one.buffers.update(buffers)
                one.non_persistent.clear()
                one.non_persistent.update(non_persistent)
            self.recorded_moments.update(recorded)

    def is_as_refreshed(self) -> bool:
        """Whether forward passes have rebound nothing since the last refresh."""
        return self.state.unchanged() and self._is_canonical()

    def _is_canonical(self) -> bool:
        return all(map(Tensor.is_set_to, self.tensors, self._canonical))

    def set_requires_grad(self, dtypes: Sequence[torch.dtype | None]) -> None:
        """Set which tensors are trained, and the dtypes in which their gradients are added."""
        self._sum_dtypes = dtypes
        self._is_trained = [dtype is not None for dtype in dtypes]
        for tensor, dtype in zip(self.tensors, dtypes, strict=True):
            if tensor.is_leaf:
                tensor.requires_grad_(dtype is not None)
                if dtype is not None:
                    tensor.grad_dtype = dtype


def is_state(tensor: Tensor) -> bool:
    """Whether every replica needs a private copy: steps write all tensors except parameters."""
    return not isinstance(tensor, nn.Parameter)


def parameter_like(original: Tensor, values: Tensor) -> Tensor:
    """A parameter of the original's class that uses the memory of ``values``."""
    kind = type(original)
    if not issubclass(kind, nn.Parameter):
        kind = nn.Parameter
    # Not the constructor of a subclass, which may need more arguments.
    return nn.Parameter.__new__(kind, values, requires_grad=False)
