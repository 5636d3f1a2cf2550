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

from scatterpar.devices import verbs
from scatterpar.devices.chunks import copy_lists, grouped, is_in_memory_order, room_like
from scatterpar.devices.fingerprints import on_the_host
from scatterpar.devices.ledger import Ledger
from scatterpar.replicas.broadcast import Broadcast, is_plain
from scatterpar.replicas.buffers import (
    RUNNING,
    Buffers,
    BufferValue,
    Place,
    Registry,
    Writing,
    batch_norms,
    listening,
    registered_by,
    values_after,
)
from scatterpar.replicas.compiled import Compiler, How
from scatterpar.replicas.guard import Shared
from scatterpar.replicas.kinds import check_placement
from scatterpar.replicas.mirror import Mirror, Snapshot, Survey, holder_of

Lent = dict[Tensor, dict[torch.device, Tensor]]  # a parameter as each memory has it

_REQUIRES_GRAD = attrgetter("requires_grad")


class Replicas:
    """The replicas of a module on some devices, and of the criterion that it is trained with.

    Parameters on the master's own device share its storage; every other device has one
    copy of them, which its replicas share. Buffers are each replica's own. ``refresh`` makes all
    of it equal to the master's, whatever the user did to the module meanwhile.

    Args:
        device_ids: one entry per replica; the module lives on the first, the master.
        wide: gradients add up in this dtype, where their own is narrower.
        how: all of the module is to be compiled so.
        pools: running statistics of batch normalisation move once a step.
    """

    def __init__(
        self,
        device_ids: Sequence[torch.device],
        wide: torch.dtype | None = None,
        how: How | None = None,
        pools: bool = False,
    ) -> None:
        self._wide = wide
        self._pools = pools
        self.criteria: list[Any] = []  # of each replica
        self.compiler = Compiler(how)
        self.changes = 0  # how often the modules changed in more than the values of tensors
        self.rehearsed: set[Hashable] = set()  # what compiled replicas have met as they are now
        self.roots: tuple[Any, ...] = ()
        self.device_ids = tuple(device_ids)
        self.leave_behind()

    def leave_behind(self) -> None:
        """Make all of them anew: threads of an interrupted step may still use these."""
        self.replicas: list[Replica] = []
        self.tensors: list[Tensor] = []  # the master's
        self._state: Snapshot | None = None
        self._broadcast = Broadcast((), self.device_ids)
        self._has_beside = False
        vars(self).pop("_of_criterion", None)

    @cached_property
    def _of_criterion(self) -> Replicas:
        return Replicas(self.device_ids, self._wide, None, self._pools)

    @property
    def parts(self) -> list[Replicas]:
        """These and, where the criterion has any of its own, those of the criterion."""
        return [self, self._of_criterion] if self._has_beside else [self]

    def refresh(
        self,
        module: nn.Module,
        criterion: Callable[..., Any] | None,
        ledger: Ledger,
        criterion_once: bool = False,
    ) -> None:
        """Make all replicas equal to the master's.

        A criterion that is a module, or a method of one, is replicated like the model, or with
        ``criterion_once`` on the master alone; so are the modules and tensors that are bound
        in a ``functools.partial``. Any other callable is called as it is.
        """
        owner = holder_of(criterion)
        with torch.inference_mode(False), torch.no_grad():
            asked = [self._follow((module,), self.device_ids)]
            self._has_beside = owner is not None and not self._has_all_of(owner)
            if self._has_beside:
                devices = self.device_ids[:1] if criterion_once else self.device_ids
                asked.append(self._of_criterion._follow((owner,), devices))
            replicas = self.parts[-1].replicas
            self.criteria = [criterion if owner is None else r.of(criterion) for r in replicas]
            values = iter(on_the_host([*chain(*asked)]))  # the host waits once
            for part, its in zip(self.parts, asked, strict=True):
                part._broadcast.send(ledger, list(islice(values, len(its))))
                for replica in part.replicas:
                    replica.refresh(part._broadcast.places)

    def let_go(self) -> None:
        """Let go of what the replicas computed, and of the user's criterion."""
        self.criteria = []
        for part in self.parts:
            part.clear_gradients()

    def _has_all_of(self, owner: Any) -> bool:
        """Whether what a criterion brings along is the model's: modules, tensors."""
        if isinstance(owner, nn.Module):
            return self.contains(owner)
        survey = Survey((owner,))
        tensors = set(map(id, self.tensors))
        return (
            tensors >= survey.tensors.keys()
            and self._survey.modules.keys() >= survey.modules.keys()
        )

    def lend(self) -> Lent:
        """Parameters that may be written in any memory; then they are taken in, or distrusted."""
        starts = Counter(map(Tensor.data_ptr, self.tensors))  # not two parameters in one place
        return {
            tensor: {device: copies[i] for device, copies in self.shared.memories.items()}
            for i, tensor in enumerate(self.shared.originals)
            if is_in_memory_order(tensor) and starts[tensor.data_ptr()] == 1
        }

    def take_in(self, owners: Mapping[Tensor, torch.device], ledger: Ledger) -> None:
        """Bring the new values of parameters from these memories to all others."""
        positions = {i: owners[t] for i, t in enumerate(self.tensors) if t in owners}
        self._broadcast.take_in(positions, ledger)

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
            for i in self.trained:
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
            turned = self._state.turned()
            if turned is None:
                return False
            for state in (self._state, *(replica.state for replica in self.replicas)):
                state.turn(turned)
            self.rehearsed.clear()
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
        self.trained = [i for i, dtype in enumerate(dtypes) if dtype is not None]
        self.leaves = [i for i in self.trained if _is_leaf(self.tensors[i])]
        self.kept = [i for i in self.trained if not _is_leaf(self.tensors[i])]
        self.trained_tensors = [self.tensors[i] for i in self.leaves]
        self.rehearsed.clear()
        self.changes += 1
        for replica in self.replicas:
            replica.train_like(dtypes)
        self._trained_as = self._training()

    def _build(self) -> None:
        self._state = None
        check_placement(self.roots, self.device_ids)
        survey = Survey(self.roots, verbs.physical(self.device_ids[0]))
        modules = list(survey.modules.values())
        self.tensors = list(survey.tensors.values())
        self._survey = survey
        self.registered = [registered_by(module) for module in modules]
        self.batch_norms = batch_norms(modules) if self._pools else {}
        if not self._broadcast.is_of(self.tensors, self.device_ids):
            self._broadcast = Broadcast(self.tensors, self.device_ids)
        common = survey, self.compiler, self.batch_norms
        self.replicas = [
            Replica(device, self._broadcast.at(device), *common) for device in self.device_ids
        ]
        copies = [(replica.device, replica.tensors) for replica in self.replicas]
        self.shared = Shared(self.roots, self._broadcast, copies)
        self._train()
        sparse = [tensor for replica in self.replicas for tensor in replica.sparse]
        containers = [*survey.containers, *(own for _, own in survey.attributes)]
        self._state = Snapshot(containers, partial(survey.facts, sparse))
        self._plan_writing()

    def _plan_writing(self) -> None:
        """Of buffers that are the same tensors before and after a step."""
        first = self.replicas[0]
        registered = [*self.registered, *first.registered]
        self._registered = Snapshot(container for one in registered for container in one)
        writing = Writing((place, name, value) for _, place, name, value in self.buffers_after())
        self._writing = None if writing.anew else writing

    def buffers_after(self) -> list[tuple[int, Place, str, Tensor | None]]:
        """What the master's buffers are after a step of replica 0's; see ``values_after``.

        But for statistics that move once a step.
        """
        first = self.replicas[0]
        after = values_after(self.registered, first.registered, first.of)
        return [one for one in after if not (one[0] in self.batch_norms and one[2] in RUNNING)]

    def writing(self) -> Writing | None:
        """What brings all buffers of replica 0 to the master, unless any is another tensor now."""
        home = [replica.states_are_home() for replica in self.replicas]
        for replica, is_home in zip(self.replicas, home, strict=True):
            replica.at_home = self._broadcast.places if is_home and self.shared.stay else None
        return self._writing if home[0] and self._registered.unchanged() else None

    def _training(self) -> list[Any] | None:
        """What decides which gradients there are, and in which dtypes; ``None``: nobody knows."""
        try:
            return [
                *map(_REQUIRES_GRAD, self.tensors),
                *[self.tensors[i].grad_dtype for i in self.leaves],
            ]
        except RuntimeError:  # a leaf is none any more
            return None


@contextlib.contextmanager
def guarded(parts: Sequence[Replicas], *, again: bool = False) -> Iterator[None]:
    """Refuse forward passes in the body that write parameters or make some.

    Those that come ``again``, after the criterion, prove themselves.
    """
    with contextlib.ExitStack() as stack:
        unproven = [part for part in parts if (part.flags, again) not in part.shared.proven]
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


class Replica(Mirror):
    """One working copy: its modules, and its tensors in the order of the master's."""

    def __init__(
        self,
        device: torch.device,
        sources: Sequence[Tensor],
        survey: Survey,
        compiler: Compiler,
        batch_norms: Mapping[int, nn.Module],
    ) -> None:
        self.device = device
        originals = list(survey.tensors.values())
        private = [i for i, tensor in enumerate(originals) if is_state(tensor)]
        own = room_like([originals[i] for i in private], device, is_plain)
        # Where each tensor lies: with the sources, or in memory of this replica's own.
        self._homes = list(sources)
        for i, room in zip(private, own, strict=True):
            self._homes[i] = room
        # ``.data``: an alias that counts its own versions, so that writes can be told apart.
        self.tensors = [
            home.data if is_state(original) else parameter_like(original, home.data)
            for original, home in zip(originals, self._homes, strict=True)
        ]
        states = [self.tensors[i] for i in private]
        self._states = states, own
        self._copied = grouped(states, [sources[i] for i in private])
        super().__init__(survey, dict(zip(survey.tensors, self.tensors, strict=True)), compiler)
        self.roots = tuple(map(self.of, survey.roots))
        self.registered = [registered_by(self.of(module)) for module in survey.modules.values()]
        self.seen = listening({m: self.of(module) for m, module in batch_norms.items()})
        self.state = Snapshot(self.containers)
        self._sum_dtypes: Sequence[torch.dtype | None] = [None] * len(self.tensors)
        self._is_trained = [False] * len(self.tensors)
        self.at_home: object = None  # where the master's tensors lay when each of these was there

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
        at_home, self.at_home = self.at_home, None
        if (at_home is None or at_home is not places) and not self._is_home():
            for tensor, home in zip(self.tensors, self._homes, strict=True):
                if not tensor.is_set_to(home):
                    tensor.data = home
        if list(map(_REQUIRES_GRAD, self.tensors)) != self._is_trained:
            self.train_like(self._sum_dtypes)
        copy_lists(self._copied)
        self.seen.update({m: [] for m in self.seen})

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """The body begins with the state of the last refresh, and leaves the one that it found.

        That is the values of buffers and which are registered, and what batch normalisations noted.
        """
        own: Buffers = {str(i): tensor for i, tensor in enumerate(self._states[0])}
        named: list[BufferValue] = [(own, *item) for item in own.items()]
        for one in self.registered:
            place = Registry(one, one)
            named += [(place, *item) for item in one.buffers.items()]
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
                Writing(before)()
            self.seen.update(seen)

    def is_as_refreshed(self) -> bool:
        """Whether forward passes have rebound nothing since the last refresh."""
        return self.state.unchanged() and self._is_home()

    def _is_home(self) -> bool:
        return all(map(Tensor.is_set_to, self.tensors, self._homes))

    def states_are_home(self) -> bool:
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
