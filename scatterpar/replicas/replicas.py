"""Replicas: built once, kept, and made equal to the master's module before every step."""

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
from scatterpar.devices.coalescing import copy_lists, empty_like_on, grouped, has_flat_view
from scatterpar.devices.fingerprints import to_host
from scatterpar.devices.transfers import Transfers
from scatterpar.replicas.broadcast import Broadcast, is_plain
from scatterpar.replicas.buffers import (
    RUNNING,
    BufferPolicy,
    Buffers,
    BufferValue,
    BufferWriter,
    batch_norms,
    buffers_of,
    listening,
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

    Parameters on the master's own device share its storage; every other device has one
    copy of them, which its replicas share. Buffers are each replica's own. ``refresh`` makes all
    of it equal to the master's, whatever the user did to the module meanwhile.

    Args:
        device_ids: one entry per replica; the module lives on the first, the master.
        wide: gradients add up in this dtype, where their own is narrower.
        how: all of the module is to be compiled so.
        buffer_policy: which buffers a step leaves.
    """

    def __init__(
        self,
        device_ids: Sequence[torch.device],
        wide: torch.dtype | None = None,
        how: CompileFn | None = None,
        buffer_policy: BufferPolicy | None = None,
    ) -> None:
        self._wide = wide
        self.buffer_policy = buffer_policy or BufferPolicy.named("master")
        self.criteria: list[Any] = []  # of each replica
        self.compiler = Compiler(how)
        self.changes = 0  # how often the modules changed in more than the values of tensors
        self.warmed_up_kinds: set[Hashable] = (
            set()
        )  # what compiled replicas have met as they are now
        self.roots: tuple[Any, ...] = ()
        self.device_ids = tuple(device_ids)
        self.discard()

    def discard(self) -> None:
        """Make all of them anew: threads of an interrupted step may still use these."""
        self.replicas: list[Replica] = []
        self.tensors: list[Tensor] = []  # the master's
        self._state: Snapshot | None = None
        self._broadcast = Broadcast((), self.device_ids)
        self._has_beside = False
        vars(self).pop("_of_criterion", None)

    @cached_property
    def _of_criterion(self) -> ReplicaSet:
        return ReplicaSet(self.device_ids, self._wide, None, self.buffer_policy)

    @property
    def replica_sets(self) -> list[ReplicaSet]:
        """These and, where the criterion has any of its own, those of the criterion."""
        return [self, self._of_criterion] if self._has_beside else [self]

    def refresh(
        self,
        module: nn.Module,
        criterion: Callable[..., Any] | None,
        transfers: Transfers,
        criterion_once: bool = False,
    ) -> None:
        """Make all replicas equal to the master's.

        A criterion that is a module, or a method of one, is replicated like the model, or with
        ``criterion_once`` on the master alone; so are the modules and tensors that are bound
        in a ``functools.partial``. Any other callable is called as it is.
        """
        owner = root_to_replicate(criterion)
        with torch.inference_mode(False), torch.no_grad():
            asked = [self._follow((module,), self.device_ids)]
            self._has_beside = owner is not None and not self._has_all_of(owner)
            if self._has_beside:
                devices = self.device_ids[:1] if criterion_once else self.device_ids
                asked.append(self._of_criterion._follow((owner,), devices))
            replicas = self.replica_sets[-1].replicas
            self.criteria = [criterion if owner is None else r.copy_of(criterion) for r in replicas]
            values = iter(to_host([*chain(*asked)]))  # the host waits once
            for part, its in zip(self.replica_sets, asked, strict=True):
                part._broadcast.send(transfers, list(islice(values, len(its))))
                for replica in part.replicas:
                    replica.refresh(part._broadcast.places)

    def clear_step_state(self) -> None:
        """Let go of what the replicas computed, and of the user's criterion."""
        self.criteria = []
        for part in self.replica_sets:
            part.clear_gradients()

    def _has_all_of(self, owner: Any) -> bool:
        """Whether what a criterion brings along is the model's: modules, tensors."""
        if isinstance(owner, nn.Module):
            return self.contains(owner)
        survey = ModuleContents((owner,))
        tensors = set(map(id, self.tensors))
        return (
            tensors >= survey.tensors.keys()
            and self._survey.modules.keys() >= survey.modules.keys()
        )

    def parameter_copies(self) -> ParameterCopies:
        """Parameters that may be written in any memory; then they are taken in, or distrusted."""
        starts = Counter(map(Tensor.data_ptr, self.tensors))  # not two parameters in one place
        return {
            tensor: {device: copies[i] for device, copies in self.shared.memories.items()}
            for i, tensor in enumerate(self.shared.originals)
            if has_flat_view(tensor) and starts[tensor.data_ptr()] == 1
        }

    def broadcast_updates(
        self, owners: Mapping[Tensor, torch.device], transfers: Transfers
    ) -> None:
        """Bring the new values of parameters from these memories to all others."""
        positions = {i: owners[t] for i, t in enumerate(self.tensors) if t in owners}
        self._broadcast.receive_updates(positions, transfers)

    def contains(self, module: nn.Module) -> bool:
        """Whether ``module`` is one of those that are replicated."""
        return id(module) in self._survey.modules

    @property
    def flags(self) -> tuple[Any, ...]:
        """Every switch of the modules, such as ``training``: plain values that are no numbers."""
        return () if self._state is None else self._state.flags

    def refuse_made(self) -> None:
        """Refuse trained parameters that forward passes made: the user's module never has them."""
        for replica in self.replicas:
            own = set(map(id, [*replica.tensors, *replica.sparse]))
            modules = (root for root in replica.roots if isinstance(root, nn.Module))
            named = (item for module in modules for item in module.named_parameters())
            name = next((n for n, p in named if p.requires_grad and id(p) not in own), None)
            if name is not None:
                raise ValueError(
                    f"the forward pass makes the parameter {name!r}, each replica for itself, and "
                    f"no optimizer finds it: nothing was changed; make it before the first step, "
                    f"such as by calling the module once on one micro-batch; to give it other "
                    f"values, write it after the optimizer's step"
                )

    def clear_gradients(self) -> None:
        """Let go of what the replicas computed."""
        for replica in self.replicas:
            for i in self.trained_indices:
                replica.tensors[i].grad = None

    def _follow(self, roots: tuple[Any, ...], device_ids: tuple[torch.device, ...]) -> list[Tensor]:
        """Obey what was done to the master's modules, and ask which tensors have changed."""
        are_others = (self.roots, self.device_ids) != (roots, device_ids)
        self.roots, self.device_ids = roots, device_ids
        if are_others or not self._is_followed():
            self._build()
        return self._broadcast.compare()

    def _is_followed(self) -> bool:
        """Whether the replicas are still those of the modules, if plain values are taken over.

        Schedules turn these at every step. All else that changes is a reason to build them anew.
        """
        if self._state is None or not self._broadcast.fits():
            return False
        if not self._state.unchanged():
            turned = self._state.value_changes()
            if turned is None:
                return False
            for state in (self._state, *(replica.state for replica in self.replicas)):
                state.apply_changes(turned)
            self.warmed_up_kinds.clear()
            self.changes += 1
        if self._trained_as is None or self._training() != self._trained_as:
            self._train()
        return True

    def _train(self) -> None:
        """From now on there are gradients for what requires some, in the dtypes they add up in."""
        dtypes = [
            sum_dtype(t, self._wide) if t.requires_grad and not t.is_inference() else None
            for t in self.tensors
        ]
        self.trained_indices = [i for i, dtype in enumerate(dtypes) if dtype is not None]
        self.leaf_indices = [i for i in self.trained_indices if _is_leaf(self.tensors[i])]
        self.non_leaf_indices = [i for i in self.trained_indices if not _is_leaf(self.tensors[i])]
        self.trained_tensors = [self.tensors[i] for i in self.leaf_indices]
        self.warmed_up_kinds.clear()
        self.changes += 1
        for replica in self.replicas:
            replica.train_like(dtypes)
        self._trained_as = self._training()

    def _build(self) -> None:
        self._state = None
        check_placement(self.roots, self.device_ids)
        survey = ModuleContents(self.roots, runtime.physical(self.device_ids[0]))
        modules = list(survey.modules.values())
        self.tensors = list(survey.tensors.values())
        self._survey = survey
        self.registered = [buffers_of(module) for module in modules]
        self.batch_norms = batch_norms(modules) if self.buffer_policy.pools_batch_norms else {}
        if not self._broadcast.is_of(self.tensors, self.device_ids):
            self._broadcast = Broadcast(self.tensors, self.device_ids)
        common = survey, self.compiler, self.batch_norms
        self.replicas = [
            Replica(device, self._broadcast.at(device), *common) for device in self.device_ids
        ]
        copies = [(replica.device, replica.tensors) for replica in self.replicas]
        self.shared = ParameterGuard(self.roots, self._broadcast, copies)
        self._train()
        sparse = [tensor for replica in self.replicas for tensor in replica.sparse]
        containers = [*survey.containers, *(own for _, own in survey.attributes)]
        self._state = Snapshot(containers, partial(survey.facts, sparse))
        self._plan_buffer_writer()

    def _plan_buffer_writer(self) -> None:
        """Of buffers that are the same tensors before and after a step."""
        first = self.replicas[0]
        registered = [*self.registered, *first.registered]
        self._registered = Snapshot(container for one in registered for container in one)
        values = ((place, name, value) for _, place, name, value in self.buffers_after())
        writer = BufferWriter(values)
        self._buffer_writer = None if writer.anew else writer

    def buffers_after(self) -> list[tuple[int, Buffers, str, Tensor | None]]:
        """What the master's buffers are after a step of replica 0's; see ``values_after``.

        But for statistics that move once a step.
        """
        first = self.replicas[0]
        after = values_after(self.registered, first.registered, first.copy_of)
        return [one for one in after if not (one[0] in self.batch_norms and one[2] in RUNNING)]

    def note_places(self) -> None:
        """Note which replicas have all tensors in place, so that the next refresh trusts that."""
        for replica in self.replicas:
            is_checked = self.shared.storages_unchanged and replica.state_is_canonical()
            replica.checked_places = self._broadcast.places if is_checked else None

    @property
    def buffer_writer(self) -> BufferWriter | None:
        """The prepared writer of replica 0's buffers; ``None`` if a forward pass rebound one."""
        is_valid = self.replicas[0].state_is_canonical() and self._registered.unchanged()
        return self._buffer_writer if is_valid else None

    def _training(self) -> list[Any] | None:
        """What decides which gradients there are, and in which dtypes; ``None``: nobody knows."""
        try:
            return [
                *map(_REQUIRES_GRAD, self.tensors),
                *[self.tensors[i].grad_dtype for i in self.leaf_indices],
            ]
        except RuntimeError:  # a leaf is none any more
            return None


@contextlib.contextmanager
def parameter_writes_refused(parts: Sequence[ReplicaSet], *, again: bool = False) -> Iterator[None]:
    """Refuse forward passes in the body that write parameters or make some.

    Those that come ``again``, after the criterion, prove themselves.
    """
    with contextlib.ExitStack() as stack:
        unproven = [part for part in parts if (part.flags, again) not in part.shared.checked_modes]
        for part in parts:
            if part.shared.originals:
                stack.enter_context(part.shared.read_only((part.flags, again)))
        yield
        for part in unproven:
            part.refuse_made()


def sum_dtype(tensor: Tensor, wide: torch.dtype | None) -> torch.dtype:
    """The dtype that a gradient adds up in: a leaf's ``grad_dtype``, or ``wide`` if wider."""
    try:
        own = tensor.grad_dtype or tensor.dtype
    except RuntimeError:  # no leaf
        own = tensor.dtype
    return own if wide is None else torch.promote_types(own, wide)


def _is_leaf(tensor: Tensor) -> bool:
    """Whether a gradient ends here, in ``.grad``.

    torch answers with an error for chunks of a weight that was written since: they are none.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


class Replica(ModuleCopy):
    """One working copy: its modules, and its tensors in the order of the master's."""

    def __init__(
        self,
        device: torch.device,
        sources: Sequence[Tensor],
        survey: ModuleContents,
        compiler: Compiler,
        batch_norms: Mapping[int, nn.Module],
    ) -> None:
        self.device = device
        originals = list(survey.tensors.values())
        private = [i for i, tensor in enumerate(originals) if is_state(tensor)]
        own = empty_like_on([originals[i] for i in private], device, is_plain)
        # Where each tensor lies: with the sources, or in memory of this replica's own.
        self._canonical = list(sources)
        for i, room in zip(private, own, strict=True):
            self._canonical[i] = room
        # ``.data``: an alias that counts its own versions, so that writes can be told apart.
        self.tensors = [
            home.data if is_state(original) else parameter_like(original, home.data)
            for original, home in zip(originals, self._canonical, strict=True)
        ]
        states = [self.tensors[i] for i in private]
        self._states = states, own
        self._copied = grouped(states, [sources[i] for i in private])
        super().__init__(survey, dict(zip(survey.tensors, self.tensors, strict=True)), compiler)
        self.roots = tuple(map(self.copy_of, survey.roots))
        self.registered = [buffers_of(self.copy_of(module)) for module in survey.modules.values()]
        self.seen = listening({m: self.copy_of(module) for m, module in batch_norms.items()})
        self.state = Snapshot(self.containers)
        self._sum_dtypes: Sequence[torch.dtype | None] = [None] * len(self.tensors)
        self._is_trained = [False] * len(self.tensors)
        self.checked_places: object = (
            None  # where the master's tensors lay when each of these was there
        )

    def refresh(self, places: object = None) -> None:
        """Undo what a forward pass rebound, and copy in the sources' buffers: without grad mode.

        A forward pass may also leave a tensor in place and exchange its storage (``p.data =``,
        ``p.set_``, ``flatten_parameters``), and so may the user: each goes home, unless that was
        seen since the last pass, and the master's still lie in these ``places``. A leaf requires
        grad as the master's does, whatever a forward pass did to it.
        """
        if not self.state.unchanged():
            self.state.restore()
        self.rebind()
        at_home, self.checked_places = self.checked_places, None
        if (at_home is None or at_home is not places) and not self._is_canonical():
            for tensor, home in zip(self.tensors, self._canonical, strict=True):
                if not tensor.is_set_to(home):
                    tensor.data = home
        if list(map(_REQUIRES_GRAD, self.tensors)) != self._is_trained:
            self.train_like(self._sum_dtypes)
        copy_lists(self._copied)
        self.seen.update({m: [] for m in self.seen})

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """The body begins with the state of the last refresh, and leaves the one that it found.

        That is the values of buffers and which are registered, and what batch normalisations noted.
        """
        own: Buffers = {str(i): tensor for i, tensor in enumerate(self._states[0])}
        named: list[BufferValue] = [(own, *item) for item in own.items()]
        registered = [(set(one.buffers), set(one.left_out)) for one in self.registered]
        for one in self.registered:
            named += [(one.buffers, *item) for item in one.buffers.items()]
        seen = dict(self.seen)
        with torch.inference_mode(False), torch.no_grad():
            copies = {id(t): t.detach().clone() for _, _, t in named if t is not None}
            before = [(place, name, copies.get(id(t))) for place, name, t in named]
            self.refresh()
        try:
            yield
        finally:
            with torch.inference_mode(False), torch.no_grad():
                self.refresh()
                BufferWriter(before)()
            for one, (names, left_out) in zip(self.registered, registered, strict=True):
                for name in one.buffers.keys() - names:
                    del one.buffers[name]
                one.buffers.update(dict.fromkeys(names - one.buffers.keys()))
                one.left_out.clear()
                one.left_out.update(left_out)
            self.seen.update(seen)

    def is_as_refreshed(self) -> bool:
        """Whether forward passes have rebound nothing since the last refresh."""
        return self.state.unchanged() and self._is_canonical()

    def _is_canonical(self) -> bool:
        return all(map(Tensor.is_set_to, self.tensors, self._canonical))

    def state_is_canonical(self) -> bool:
        """Whether what is this replica's own lies where it did at the refresh."""
        return all(map(Tensor.is_set_to, *self._states))

    def train_like(self, dtypes: Sequence[torch.dtype | None]) -> None:
        """Take over which tensors are trained, and in which dtype their gradients add up."""
        self._sum_dtypes = dtypes
        self._is_trained = [dtype is not None for dtype in dtypes]
        for tensor, dtype in zip(self.tensors, dtypes, strict=True):
            if tensor.is_leaf:
                tensor.requires_grad_(dtype is not None)
                if dtype is not None:
                    tensor.grad_dtype = dtype


def is_state(tensor: Tensor) -> bool:
    """Whether every replica needs its own copy: all but parameters, which a step only reads."""
    return not isinstance(tensor, nn.Parameter)


def parameter_like(original: Tensor, values: Tensor) -> Tensor:
    """A parameter on the memory of ``values``, of the original's own class of parameters."""
    kind = type(original)
    is_own = issubclass(kind, nn.Parameter)
    # Not its constructor, which may ask for more than values.
    return nn.Parameter.__new__(kind if is_own else nn.Parameter, values, requires_grad=False)
