"""Lend the owner of a step function the parts of a replica, for one call.

A step function of the user's runs on the user's own object, such as a Trainer, one
call at a time::

    with lending.lent(parts, device):       # in a turn of the engine
        loss = step(owner, micro_batch)     # writes stay where the user wrote them
    lending.end_step()

In the body, whatever the owner leads to refers to the replica's modules, parameters and
buffers in the place of the user's. Its other tensors on accelerators are lent as copies
on the replica's device, which are written back if the call has written them. Afterwards
all references are as before. What the call has left on another device is moved to the
user's own.

A call of a library's function needs no turn, and gets a copy of the owner
(``copy_on_replica``).
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.devices.transfers import to_device, write
from scatterpar.replicas.broadcast import version
from scatterpar.replicas.references import MAX_ENTRIES, parts_of
from scatterpar.replicas.snapshot import is_same
from scatterpar.state.walk import UNSET, Place, PlaceKind, Walk
from scatterpar.state.whose import attributes_of
from scatterpar.torch_private import is_compiled_module, unwrapped


class Parts:
    """Modules of the user's, and those of a replica, with all that they consist of.

    Args:
        pairs: a module of the user's and the replica's, for each module that a step
            function may call. A look pairs modules with themselves.
        tensors: pairs of parameters, whose modules stay the user's.

    Attributes:
        modules: the pairs that differ, also of the modules inside of these.
        tensors: pairs of all parameters and buffers.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[nn.Module, nn.Module]],
        tensors: Iterable[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self.modules: list[tuple[nn.Module, nn.Module]] = []
        self.tensors: list[tuple[Tensor, Tensor]] = [*tensors]
        # Other values, such as a module of torch.compile and what a hook binds.
        self._values: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        for module, replica in pairs:
            self._add(module, replica)

    def _add(self, module: nn.Module, replica: nn.Module) -> None:
        if module is replica or id(module) in self._seen:
            return
        # Tied modules are met more than once, and a pair has one replica.
        self._seen.add(id(module))
        self._values.append((module, replica))
        if is_compiled_module(module):  # a replica of the original runs compiled
            self._add(unwrapped(module)[0], replica)
            return
        self.modules.append((module, replica))
        for child, copied in _pairs_in("_modules", module, replica):
            self._add(child, copied)
        for registry in ("_forward_hooks", "_forward_pre_hooks"):
            for hook, copied in _pairs_in(registry, module, replica):
                self._add_bound(hook, copied)
        for registry in ("_parameters", "_buffers"):
            self.tensors += _pairs_in(registry, module, replica)

    def _add_bound(self, hook: Any, copied: Any) -> None:
        """Add what a hook binds, such as a dict: a replica's hook binds a copy."""
        if type(hook) is functools.partial and type(copied) is functools.partial:
            values = parts_of(hook).bound.values()
            copies = parts_of(copied).bound.values()
            for pair in zip(values, copies, strict=True):
                if pair[0] is not pair[1]:
                    self._values.append(pair)

    def of_replica(self) -> dict[int, Any]:
        """The replica's parts, by the ``id`` of the user's."""
        pairs = [*self._values, *self.tensors]
        return {id(original): part for original, part in pairs}

    def of_user(self) -> dict[int, Any]:
        """The user's parts, by the ``id`` of the replica's."""
        pairs = [*self._values, *self.tensors]
        return {id(part): original for original, part in pairs}


def _pairs_in(
    registry: str, module: nn.Module, replica: nn.Module
) -> Iterator[tuple[Any, Any]]:
    """What both modules have in a registry of torch's, under the same name."""
    copies = vars(replica)[registry]
    for name, value in vars(module)[registry].items():
        copied = copies.get(name)
        if value is not None and copied is not None:
            yield value, copied


class Lending:
    """Lends what ``roots`` lead to, call by call.

    Args:
        roots: returns the owner, its functions, and what else calls may write. It is
            called once per step.
        excluded: names of attributes of roots that stay as they are.
        home: the device of the user's modules.
    """

    def __init__(
        self,
        roots: Callable[[], Iterable[Any]],
        excluded: Collection[str],
        home: torch.device,
    ) -> None:
        self.roots = roots
        self._roots: list[Any] = []  # of this step
        self._excluded = excluded
        self._home = home
        # The last call's walk. The next call of the step needs no other.
        self._walk: Walk | None = None
        # Plain attributes of the user's modules that calls of this step have rebound.
        self._rebound: defaultdict[nn.Module, dict[str, Any]] = defaultdict(dict)
        # Context variables that calls of this step have set. Each replica's thread has
        # a context of its own, a copy of the caller's.
        self._variables: dict[ContextVar[Any], Any] = {}

    @contextlib.contextmanager
    def lent(self, parts: Parts, device: torch.device) -> Iterator[None]:
        """In the body, roots refer to the replica's ``parts``, and to ``device``."""
        # First: what earlier calls have rebound is none of this call's.
        for module, replica in parts.modules:
            vars(replica).update(self._rebound.get(module, {}))
        attributes = [dict(vars(replica)) for _, replica in parts.modules]
        exchange = _Exchange(parts.of_replica(), device)
        if self._walk is None:
            self._roots = list(self.roots())
            self._walk = self._searched()
        exchange.apply(self._walk)
        self._set_variables()
        # A copy of a context is cheap, and says which variables a call has set.
        variables = contextvars.copy_context()
        try:
            yield
        finally:
            self._note_variables(variables)
            # Before the search, so that it meets the user's own parts.
            exchange.undo()
            # A call may have stored parts of the replica, or tensors of its device.
            self._walk = self._searched()
            home = _Exchange(parts.of_user(), self._home, trained=True)
            home.apply(self._walk)
            self._note_rebound(parts, attributes)

    def end_step(self) -> None:
        """Set what calls have set elsewhere: plain attributes of modules on the user's,
        context variables in the caller's thread.
        """
        for module, values in self._rebound.items():
            vars(module).update(values)
        self._set_variables()
        self.forget()
        # They hold modules and callbacks, which the user may drop before the next step.
        self._roots = []

    def forget(self) -> None:
        """Drop what calls of a look have set."""
        self._rebound.clear()
        self._variables.clear()
        # The look's journal has restored what the walk's places refer to.
        self._walk = None

    def _set_variables(self) -> None:
        """Set the context variables of earlier calls in this thread."""
        for variable, value in self._variables.items():
            variable.set(value)

    def _note_variables(self, before: contextvars.Context) -> None:
        for variable, value in contextvars.copy_context().items():
            if variable not in before or before[variable] is not value:
                self._variables[variable] = value

    def _searched(self) -> Walk:
        return Walk(self._roots, excluded=self._excluded, enters_modules=False)

    def _note_rebound(
        self, parts: Parts, attributes: Sequence[Mapping[str, Any]]
    ) -> None:
        """Note the plain attributes that the call has rebound.

        Only plain ones: replicas are made again if another one changes.
        """
        for (module, replica), before in zip(parts.modules, attributes, strict=True):
            after = vars(replica)
            if is_same(after, before):
                continue
            for name, value in after.items():
                if type(value) in nested.PLAIN and value is not before.get(name, UNSET):
                    self._rebound[module][name] = value


class _Exchange:
    """Values in the place of others, at all places of a walk.

    Args:
        values: what stands for an original, by its ``id``.
        device: where tensors of other accelerators are copied, without their graphs.
        trained: whether tensors that require grad are copied, too.
    """

    def __init__(
        self, values: Mapping[int, Any], device: torch.device, *, trained: bool = False
    ) -> None:
        self._values = dict(values)
        self._device = device
        self._trained = trained
        self._written: list[tuple[Place, Any]] = []
        # Originals with their copies, and the versions of these.
        self._tensors: list[tuple[Tensor, Tensor, int]] = []

    def apply(self, walk: Walk) -> None:
        """Write the values at all places that can be written."""
        # From the innermost: a tuple is made again after what it consists of.
        for place in reversed(walk.places):
            if place.kind is PlaceKind.PART and self.has(place.value):
                self._remake(walk.values[place.parent])
        for place in walk.places:
            if place.is_writable and self.has(place.value):
                value = self._values[id(place.value)]
                place.write(value)
                self._written.append((place, value))

    def undo(self) -> None:
        """Write the originals again, except where there is something else now."""
        for place, value in self._written:
            # The call may have bound the place again, and that value stays.
            if place.read() is value:
                place.write(place.value)
        for tensor, copied, before in self._tensors:
            if version(copied) != before:
                write(tensor, copied.detach())

    def has(self, value: Any) -> bool:
        """Whether another value stands for ``value``."""
        if id(value) in self._values:
            return True
        if not isinstance(value, Tensor) or not self._is_elsewhere(value):
            return False
        # Kept: each place that refers to the tensor gets the same copy.
        # An inference tensor has no version, which tells that the call has written it.
        with torch.inference_mode(False):
            copied = to_device(value.detach(), self._device)
        self._values[id(value)] = copied
        self._tensors.append((value, copied, version(copied)))
        return True

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        """Whether a tensor is on another accelerator, and may be copied."""
        if tensor.requires_grad and not self._trained:
            return False
        return tensor.device.type != "cpu" and tensor.device != self._device

    def _remake(self, value: Any) -> None:
        """Make a tuple, method or partial again, with other parts."""
        parts = parts_of(value)
        if parts.make is not None:
            originals = parts.made_of()
            values = [self._values.get(id(part), part) for part in originals]
            self._values[id(value)] = parts.make(*values)


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
    owners: Sequence[Any], parts: Iterable[nn.Module], excluded: Collection[str]
) -> list[Any]:
    """What calls may write: ``owners``, and modules that replicas do not have, such as
    metrics, a teacher in a list, and networks that functions name as global variables,
    each with the modules inside of it.
    """
    # Calls in turn get the replica's parts in the place of the user's.
    ids = {id(inner) for part in parts for inner in part.modules()}
    roots = {id(owner): owner for owner in owners}
    for module in Walk(owners, excluded=excluded, enters_modules=False).modules:
        if id(module) in ids:
            continue
        # A walk enters roots alone, so that the modules inside are roots, too.
        for part in module.modules():
            if id(part) not in ids:
                roots[id(part)] = part
    return [*roots.values()]


def copy_on_replica(owner: Any, parts: Parts, excluded: Collection[str] = ()) -> Any:
    """A shallow copy of ``owner`` that refers to a replica's parts.

    They are in the place of the user's in its attributes, and in lists, tuples and
    dicts that are attributes. All else is shared with the owner, so this is for
    functions of libraries; the user's take turns. An owner that is a part itself is the
    replica's part.
    """
    values = parts.of_replica()
    if id(owner) in values:
        return values[id(owner)]

    def exchanged(value: Any) -> Any:
        return values.get(id(value), value)

    copied = copy.copy(owner)
    for name, value in attributes_of(owner).items():
        if name in excluded:
            continue
        candidates = [value]
        # Longer containers are data, and not read in each call.
        if isinstance(value, (list, tuple, dict)) and len(value) <= MAX_ENTRIES:
            candidates += parts_of(value).entries
        if values.keys() & map(id, candidates):
            vars(copied)[name] = nested.map_atoms(exchanged, value)
    return copied
