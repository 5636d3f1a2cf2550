"""Lend the owner of a step function, and its modules, the tensors of a replica, for one
call.

A step function of the user's runs on the user's own object, such as a Trainer, and
calls the user's own modules, one call at a time::

    with lending.lent(loan, device):        # in a turn of the engine
        loss = step(owner, micro_batch)     # writes stay where the user wrote them
    lending.end_step()

In the body the registries of the user's modules hold the replica's parameters and
buffers, and so does all else to which the owner and the modules lead. Their other
tensors on accelerators are lent as copies on the replica's device, which are written
back if the call has written them. Afterwards all references are as before. What the
call has left on another device is moved to the user's own.

Modules, containers and hooks stay the user's: a call finds and writes what it finds and
writes with gradient accumulation on one device. What calls write to buffers, and to
``requires_grad``, is handed on from call to call (``replicas/handed_on.py``).

A call of a library's function needs no turn, and gets a copy of the owner
(``CopiesOnReplica``).
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.nested import MAX_ENTRIES
from scatterpar.devices.copies import to_device, write
from scatterpar.devices.write_counters import version, versions
from scatterpar.loops.kept_places import KeptPlaces
from scatterpar.loops.pending_gradients import PendingGradients
from scatterpar.objects.references import parts_of
from scatterpar.objects.snapshot import Snapshot, refill
from scatterpar.objects.walk import Place, PlaceKind, Walk
from scatterpar.objects.whose import attributes_of
from scatterpar.replicas.batch_statistics import recorded_in
from scatterpar.replicas.refused_modules import parameters_of
from scatterpar.replicas.replicas import Replica, ReplicaSet
from scatterpar.torch_private.compiler import is_compiled_module, unwrapped
from scatterpar.verify.dropped_records import is_look


class ModulePairs:
    """Modules of the user's, and those of a replica, with all that they consist of.

    Args:
        pairs: a module of the user's and the replica's, for each module that a step
            function may call.

    Attributes:
        tensors: pairs of all parameters and buffers.
    """

    def __init__(self, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        self.tensors: list[tuple[Tensor, Tensor]] = []
        # Modules, and those of torch.compile around them.
        self._modules: list[tuple[nn.Module, nn.Module]] = []
        self._seen: set[int] = set()
        for module, replica in pairs:
            self._add(module, replica)

    def _add(self, module: nn.Module, replica: nn.Module) -> None:
        if module is replica or id(module) in self._seen:
            return
        # Tied modules are met more than once, and a pair has one replica.
        self._seen.add(id(module))
        self._modules.append((module, replica))
        if is_compiled_module(module):  # a replica of the original runs compiled
            self._add(unwrapped(module)[0], replica)
            return
        for child, copied in _pairs_in("_modules", module, replica):
            self._add(child, copied)
        for registry in ("_parameters", "_buffers"):
            self.tensors += _pairs_in(registry, module, replica)

    def of_replica(self) -> dict[int, Any]:
        """The replica's parts, by the ``id`` of the user's."""
        pairs = [*self._modules, *self.tensors]
        return {id(original): part for original, part in pairs}


def _pairs_in(
    registry: str, module: nn.Module, replica: nn.Module
) -> Iterator[tuple[Any, Any]]:
    """What both modules have in a registry of torch's, under the same name."""
    copies = vars(replica)[registry]
    for name, value in vars(module)[registry].items():
        copied = copies.get(name)
        if value is not None and copied is not None:
            yield value, copied


class Loan:
    """A replica's tensors in the place of the user's.

    Args:
        pairs: a tensor of the user's and the replica's.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self._pairs = [*pairs]

    def of_replica(self) -> dict[int, Any]:
        """The replica's tensors, by the ``id`` of the user's."""
        return {id(original): copied for original, copied in self._pairs}

    def leaves(self) -> dict[int, Tensor]:
        """The replica's trained parameters, by their numbers."""
        return {}

    def of_user(self) -> dict[int, Any]:
        """The user's tensors, by the ``id`` of the replica's."""
        return {id(copied): original for original, copied in self._pairs}


class TurnLoan(Loan):
    """The tensors of a replica in a turn of the engine.

    Attributes:
        replica_set: that of the replica.
        replica: whose turn it is.
    """

    def __init__(self, replica_set: ReplicaSet, replica: Replica) -> None:
        self.replica_set = replica_set
        self.replica = replica
        tensors = replica_set.tensors
        lent = replica_set.handed_on.lent
        pairs = [(tensors[number], replica.tensors[number]) for number in lent]
        # Parameters that hold other tensors, or consist of them.
        for holder, _ in replica_set.contents.holders.values():
            pairs.append((holder, replica.copy_of(holder)))
        super().__init__(pairs)

    def leaves(self) -> dict[int, Tensor]:
        """The replica's trained parameters, by their numbers."""
        tensors = self.replica.tensors
        numbers = [slot.number for slot in self.replica_set.trained]
        return {n: tensors[n] for n in numbers if tensors[n].is_leaf}


def loan_of(replica_set: ReplicaSet, root: Any) -> Loan:
    """The loan of the replica whose modules are ``root``; nothing for the user's own,
    which looks call.
    """
    for replica in replica_set.replicas:
        if replica.root is root:
            return TurnLoan(replica_set, replica)
    return Loan()


class Lending:
    """Lends what ``roots`` lead to, call by call.

    Args:
        roots: returns the owner, its functions, and what else calls may write. It is
            called once per step.
        excluded: names of attributes of roots that stay as they are.
        home: the device of the user's modules.
        optimizers: returns those whose state answers for a replica's parameters.
        copies: those of other tensors, if more than this object lends them.
    """

    def __init__(
        self,
        roots: Callable[[], Iterable[Any]],
        excluded: Collection[str],
        home: torch.device,
        optimizers: Callable[[], Iterable[Any]] = tuple,
        copies: LentCopies | None = None,
    ) -> None:
        self.roots = roots
        self._excluded = excluded
        self._home = home
        self._optimizers = optimizers
        self._copies = LentCopies() if copies is None else copies
        self._owners: KeptPlaces | None = None  # of this step
        # Searched once: modules change seldom, and are many.
        self._modules = KeptPlaces(())
        # The replicas of the present step, if calls take turns.
        self._replica_set: ReplicaSet | None = None
        # The containers of modules that calls of this step have written, in order, and
        # how many of them each replica has followed.
        self._changed: list[int] = []
        self._followed: dict[Replica, int] = {}
        self._pending: weakref.WeakKeyDictionary[Replica, PendingGradients]
        self._pending = weakref.WeakKeyDictionary()
        # On parameters that calls of this step have created.
        self._hooks: list[Any] = []
        # Context variables that calls of this step have set. Each replica's thread has
        # a context of its own, a copy of the caller's.
        self._variables: dict[ContextVar[Any], Any] = {}

    @contextlib.contextmanager
    def lent(self, loan: Loan, device: torch.device) -> Iterator[None]:
        """In the body, roots and modules refer to the tensors of ``loan``, and to
        ``device``.
        """
        substitution = _Substitution(loan.of_replica(), device, self._copies)
        places = self._present_places(loan)
        with contextlib.ExitStack() as stack:
            if isinstance(loan, TurnLoan):
                stack.enter_context(self._in_turn(loan))
            substitution.apply(places)
            self._set_variables()
            # A copy of a context is cheap, and says which variables a call has set.
            variables = contextvars.copy_context()
            try:
                yield
            finally:
                self._note_variables(variables)
                # First, so that what the call has left is found by its difference.
                substitution.undo(loan.of_user())
                created = self._take_home(loan, places)
                if isinstance(loan, TurnLoan) and not is_look():
                    self._refuse_gradients(loan, created)

    @contextlib.contextmanager
    def gradients_hidden(
        self, loan: Loan, function: str, remedy: str
    ) -> Iterator[None]:
        """In the body, a call of the step function finds no gradients of earlier calls.

        Inside of ``lent``. The first call of a step finds those of earlier steps, which
        replicas do not have either.
        """
        if not isinstance(loan, TurnLoan) or is_look():
            yield
            return
        replica_set = loan.replica_set
        if replica_set.handed_on.calls == 1 and not replica_set.has_gradients:
            yield
            return
        pending = self._pending.get(loan.replica)
        if pending is None:
            pending = PendingGradients(_names_in(loan), function, remedy)
            self._pending[loan.replica] = pending
        with pending.hiding(loan.leaves()):
            yield

    def _present_places(self, loan: Loan) -> list[KeptPlaces]:
        """The places that lead to tensors, as they are now."""
        if self._owners is None:
            optimizers = [*self._optimizers()]
            groups = [getattr(each, "param_groups", ()) for each in optimizers]
            keyed = [getattr(each, "state", None) for each in optimizers]
            self._owners = KeptPlaces(
                [*self.roots(), *groups], self._excluded, keyed=keyed
            )
        if not isinstance(loan, TurnLoan):
            self._owners.update()
            return [self._owners]
        modules = loan.replica_set.modules
        # Before the search: this is no change of a call.
        loan.replica_set.calls_in_backward.begin()
        self._replica_set = loan.replica_set
        if self._modules.roots is not modules:
            self._modules = KeptPlaces(modules)
        self._owners.update()
        self._modules.update()
        return [self._owners, self._modules]

    @contextlib.contextmanager
    def _in_turn(self, loan: TurnLoan) -> Iterator[None]:
        """In the body it is the turn of a replica, which gets what the last one has
        left.
        """
        replica = loan.replica
        handed_on = loan.replica_set.handed_on
        if not is_look():
            handed_on.begin(replica.tensors, replica.device)
        calls = loan.replica_set.calls_in_backward
        calls.present = replica
        try:
            with recorded_in(loan.replica_set.modules, replica.records):
                yield
        finally:
            calls.present = None

    def _take_home(
        self, loan: Loan, places: Sequence[KeptPlaces]
    ) -> list[nn.Parameter]:
        """Let what a call has left refer to the user's tensors, on their device.

        Returns the parameters that the call has created.
        """
        if isinstance(loan, TurnLoan):
            self._note_tensors(loan)
        created: list[nn.Parameter] = []
        changed = [kept.update() for kept in places]  # each of them
        if any(changed):
            home = _Substitution(loan.of_user(), self._home, trained=True)
            home.apply(places)
            for kept in places:
                kept.update()
                created += kept.created
                kept.created.clear()
        if isinstance(loan, TurnLoan):
            self._follow(loan)
        # A call may have tied weights.
        known = loan.of_replica().keys() | loan.of_user().keys()
        return [parameter for parameter in created if id(parameter) not in known]

    def _note_tensors(self, loan: TurnLoan) -> None:
        """Note what the call has written to buffers and ``requires_grad``."""
        replica = loan.replica
        handed_on = loan.replica_set.handed_on
        # First: replicas would be made again for new tensors in their places.
        rebound = handed_on.put_back(replica.tensors)
        if is_look():
            return
        begun = handed_on.end(replica.tensors, replica.device, rebound)
        loan.replica_set.add_trained(begun)

    def _refuse_gradients(
        self, loan: TurnLoan, created: Sequence[nn.Parameter]
    ) -> None:
        """Refuse gradients of parameters that calls create, in several memories.

        In one memory they get their gradients from all calls, as in plain torch.
        """
        if not created or len(loan.replica_set.broadcast.memories) == 1:
            return
        names = {id(p): repr(name) for name, p in parameters_of(loan.replica_set.root)}
        for parameter in created:
            name = names.get(id(parameter), f"of shape {tuple(parameter.shape)}")
            refuse = functools.partial(_refuse_gradient, name)
            self._hooks.append(parameter.register_hook(refuse))

    def end_step(self) -> None:
        """Set the context variables of calls in the caller's thread."""
        self._set_variables()
        self._copies.clear()
        self.forget()

    def calls_of_step(self) -> int:
        """The number of calls in turn of the present step, with the present one."""
        if self._replica_set is None:
            return 0
        return self._replica_set.handed_on.calls

    def forget_variables(self) -> None:
        """Drop the context variables of calls: these ran in the caller's thread."""
        self._variables.clear()

    def forget(self) -> None:
        """Drop what calls of a look have set."""
        self.forget_variables()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._replica_set is not None:
            self._replica_set.calls_in_backward.end()
            self._replica_set = None
        self._modules.changed.clear()
        self._followed.clear()
        # They hold modules and callbacks, which the user may drop before the next step.
        # The look's journal has restored what they refer to.
        self._owners = None

    def _follow(self, loan: TurnLoan) -> None:
        """Let the replica's modules have what calls have written in the user's.

        Its backward pass may call them.
        """
        replica = loan.replica
        changed = self._modules.changed
        start = self._followed.get(replica, 0)
        self._followed[replica] = len(changed)
        numbers = loan.replica_set.numbers_of(changed[start:])
        for number in numbers:
            replica.refill(number)

    def _set_variables(self) -> None:
        """Set the context variables of earlier calls in this thread."""
        for variable, value in self._variables.items():
            variable.set(value)

    def _note_variables(self, before: contextvars.Context) -> None:
        for variable, value in contextvars.copy_context().items():
            if variable not in before or before[variable] is not value:
                self._variables[variable] = value


class LentCopies:
    """Copies of tensors on other devices, each kept until one of both is written.

    To copy a tensor, its device and the other one wait for each other.
    """

    def __init__(self) -> None:
        # By ``id`` of a tensor and device: the tensor, its copy, and their versions.
        self._kept: dict[
            tuple[int, torch.device], tuple[Tensor, Tensor, list[int]]
        ] = {}

    def of(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The copy of ``tensor`` on ``device``, without its graph."""
        kept = self._kept.get((id(tensor), device))
        if kept is not None and versions(kept[:2]) == kept[2]:
            return kept[1]
        # An inference tensor has no version, which tells that it was written.
        with torch.inference_mode(False):
            copied = to_device(tensor.detach(), device)
        if not tensor.is_inference():
            self.keep(tensor, copied)
        return copied

    def keep(self, tensor: Tensor, copied: Tensor) -> None:
        """Keep a copy that has the same values."""
        both = tensor, copied
        self._kept[id(tensor), copied.device] = *both, versions(both)

    def drop_others(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Drop the copies on ``device`` of all tensors except these.

        Calls may leave a new tensor each, and refer to it no longer.
        """
        ids = set(map(id, tensors))
        for key in list(self._kept):
            if key[1] == device and key[0] not in ids:
                del self._kept[key]

    def clear(self) -> None:
        """Drop all copies."""
        self._kept.clear()


class _Substitution:
    """Values in the place of others, at all places that lead to them.

    Args:
        values: what stands for an original, by its ``id``.
        device: where tensors of other accelerators are copied, without their graphs.
        copies: those that are kept.
        trained: whether tensors that require grad are copied, too.
    """

    def __init__(
        self,
        values: Mapping[int, Any],
        device: torch.device,
        copies: LentCopies | None = None,
        *,
        trained: bool = False,
    ) -> None:
        self._lent = values
        self._values = dict(values)
        self._device = device
        self._copies = LentCopies() if copies is None else copies
        self._trained = trained
        self._written: list[tuple[Place, Any]] = []
        self._keyed: list[Any] = []
        # Originals with their copies, and the versions of these.
        self._tensors: list[tuple[Tensor, Tensor, int]] = []

    def apply(self, all_places: Iterable[KeptPlaces]) -> None:
        """Write the values at all places that can be written."""
        for places in all_places:
            for place in places.places:
                value = self._value_for(place.value, places.made_of_others)
                if value is not place.value:
                    place.write(value)
                    self._written.append((place, value))
            # Last: places are read and written by the keys that containers had.
            for container in places.keyed:
                if _rekey(container, self._lent):
                    self._keyed.append(container)
        self._copies.drop_others(
            [tensor for tensor, _, _ in self._tensors], self._device
        )

    def undo(self, originals: Mapping[int, Any]) -> None:
        """Write the originals again, except where there is something else now.

        ``originals`` are those of the values that are keys, by their ``id``.
        """
        for container in self._keyed:
            _rekey(container, originals)
        for place, value in self._written:
            # The call may have bound the place again, and that value stays.
            if place.read() is value:
                place.write(place.value)
        for tensor, copied, before in self._tensors:
            if version(copied) != before:
                write(tensor, copied.detach())
                self._copies.keep(tensor, copied)

    def _value_for(self, value: Any, made_of_others: Mapping[int, Any]) -> Any:
        """What stands for ``value``; ``value`` itself if nothing does."""
        if id(value) in self._values:
            return self._values[id(value)]
        if isinstance(value, Tensor):
            if not self._is_elsewhere(value):
                return value
            if isinstance(value, nn.Parameter) and self._trained:
                # As ``module.to`` does: a copy would be no parameter.
                value.data = to_device(value.detach(), self._device)
                return value
            # Each place that refers to the tensor gets the same copy.
            copied = self._copies.of(value, self._device)
            self._values[id(value)] = copied
            self._tensors.append((value, copied, version(copied)))
            return copied
        if id(value) not in made_of_others:
            return value
        # A tuple, method or partial is made again, with other parts.
        self._values[id(value)] = value  # it may lead to itself
        parts = parts_of(value)
        if parts.make is not None:
            originals = parts.made_of()
            values = [self._value_for(part, made_of_others) for part in originals]
            if any(new is not old for new, old in zip(values, originals, strict=True)):
                self._values[id(value)] = parts.make(*values)
        return self._values[id(value)]

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        """Whether a tensor is on another accelerator, and may be copied."""
        if tensor.requires_grad and not self._trained:
            return False
        return tensor.device.type != "cpu" and tensor.device != self._device


def _names_in(loan: TurnLoan) -> dict[int, str]:
    """The quoted names of parameters, by their numbers, in the body of ``lent``."""
    root = loan.replica_set.root
    names = {id(parameter): repr(name) for name, parameter in parameters_of(root)}
    return {
        number: names[id(tensor)]
        for number, tensor in enumerate(loan.replica.tensors)
        if id(tensor) in names
    }


def _refuse_gradient(name: str, _: Tensor) -> None:
    raise ValueError(
        f"a call has created the parameter {name}, which is trained, and which "
        "replicas on other devices do not have; no gradient was added. Create it "
        "before the training begins, where the optimizer finds it, too: call the step "
        "function once, or the module once, for one micro-batch"
    )


def _rekey(container: Any, values: Mapping[int, Any]) -> bool:
    """Put values in the place of keys: of tensors, and of numbers that are their
    ``id``. Returns whether there were any.
    """

    def key_for(key: Any) -> Any:
        if type(key) is int and key in values:
            return id(values[key])
        return values.get(id(key), key)

    keys = [key_for(key) for key in container]
    if all(new is old for new, old in zip(keys, container, strict=True)):
        return False
    # The order stays, which a loop over the container sees.
    if isinstance(container, set):
        refill(container, keys)
    else:
        refill(container, dict(zip(keys, container.values(), strict=True)))
    return True


def modules_of(owner: Any, excluded: Collection[str] = ()) -> list[nn.Module]:
    """The modules that ``owner`` refers to, each once, without those inside of these.

    Not modules to which only global variables refer: most of these are of other
    programs in the same file.
    """
    walk = Walk([owner], excluded=excluded, enters_modules=False)
    places = [place for place in walk.places if place.kind is not PlaceKind.GLOBAL]
    named = {id(place.value) for place in places}
    return [module for module in walk.modules if id(module) in named]


def roots_of(
    owners: Sequence[Any], replicated: Iterable[nn.Module], excluded: Collection[str]
) -> list[Any]:
    """What calls may write: ``owners``, and modules that replicas do not have, such as
    metrics, a teacher in a list, and networks that functions name as global variables,
    each with the modules inside of it.
    """
    # Calls in turn get the replica's modules in the place of these.
    ids = {id(inner) for module in replicated for inner in module.modules()}
    roots = {id(owner): owner for owner in owners}
    for module in Walk(owners, excluded=excluded, enters_modules=False).modules:
        if id(module) in ids:
            continue
        # A walk enters roots alone, so that the modules inside are roots, too.
        for part in module.modules():
            if id(part) not in ids:
                roots[id(part)] = part
    return [*roots.values()]


class CopiesOnReplica:
    """Shallow copies of an owner that refer to a replica's parts.

    The parts are in the place of the user's in its attributes, and in lists, tuples and
    dicts that are attributes. All else is shared with the owner, so this is for
    functions of libraries; the user's take turns. An owner that is a part itself is the
    replica's part.

    Which attributes these are is searched again after an attribute, or an entry of such
    a container, was replaced.

    Args:
        owner: of the user's.
        pairs: modules of the user's with those of the replica.
        excluded: names of attributes that stay the owner's.
    """

    def __init__(
        self,
        owner: Any,
        pairs: Iterable[tuple[nn.Module, nn.Module]],
        excluded: Collection[str] = (),
    ) -> None:
        self._owner = owner
        self._values = ModulePairs(pairs).of_replica()
        self._excluded = excluded
        self._attributes: dict[str, Any] = {}  # that lead to parts
        # What was searched for them: the owner's attributes, and containers there.
        self._searched: Snapshot | None = None

    def copy(self) -> Any:
        """A new copy of the owner as it is now."""
        if id(self._owner) in self._values:
            return self._values[id(self._owner)]
        if self._searched is None or not self._searched.unchanged():
            self._search()
        copied = copy.copy(self._owner)
        attributes_of(copied).update(self._attributes)
        return copied

    def _search(self) -> None:
        """Find the attributes that lead to parts, with their values on the replica."""
        attributes = attributes_of(self._owner)
        containers: list[Any] = [attributes]
        self._attributes = {}
        for name, value in attributes.items():
            if name in self._excluded:
                continue
            candidates = [value]
            # Longer containers are data, and not read in each call.
            if isinstance(value, (list, tuple, dict)) and len(value) <= MAX_ENTRIES:
                containers.append(value)
                candidates += parts_of(value).entries
            if self._values.keys() & map(id, candidates):
                self._attributes[name] = nested.map_atoms(self._exchanged, value)
        self._searched = Snapshot(containers)

    def _exchanged(self, value: Any) -> Any:
        return self._values.get(id(value), value)


def copy_on_replica(
    owner: Any,
    pairs: Iterable[tuple[nn.Module, nn.Module]],
    excluded: Collection[str] = (),
) -> Any:
    """A shallow copy of ``owner`` that refers to a replica's parts, for one call."""
    return CopiesOnReplica(owner, pairs, excluded).copy()
