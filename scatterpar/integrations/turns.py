"""Whether replicas run in turn, because hooks write into what all of them share.

A forward hook may keep what a step function reads::

    teacher.layer.register_forward_hook(lambda *args: features.update(teacher=args[-1]))
    ...
    loss = mse_loss(student(rows), features["teacher"])    # in compute_loss

Replicas have copies of the hook, but share ``features``, so one would read what another
one has written. Then they run one after the other, which is exact, and one warning says
so. Objects that only one replica has, such as a dict that is an attribute of the hooked
module, need no turns.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import nn

from scatterpar.errors import warn
from scatterpar.integrations.kept import (
    CallCopies,
    is_container,
    is_object,
    is_of_a_library,
    modules_kept,
    values_kept,
)
from scatterpar.replicas.module_contents import ModuleContents
from scatterpar.replicas.references import named_values, reachable
from scatterpar.replicas.snapshot import Snapshot

# Libraries whose hooks keep nothing that a step function reads.
_WITHOUT_STATE = {
    "accelerate",
    "bitsandbytes",
    "peft",
    "scatterpar",
    "torch",
    "transformers",
    "trl",
}


@dataclass
class Turns:
    """Finds out, step by step, whether the replicas of an engine run in turn.

    Attributes:
        pinned: the ``id`` of objects that the owner and its hooks share, in this step.
        is_hooked: whether the user's hooks lead to containers or objects, in this step.
    """

    pinned: frozenset[int] = frozenset()
    is_hooked: bool = False
    # Sets of objects that hooks lead to, and did not write in a step.
    _unwritten: list[list[Any]] = field(default_factory=list)
    _named: list[nn.Module] | None = None  # modules that the owner's functions name
    _is_told: bool = False

    @contextlib.contextmanager
    def in_step(
        self,
        engine: Any,
        owner: Any,
        attributes: Mapping[str, Any],
        function: Any,
        *replicated: nn.Module,
        is_look: bool = False,
    ) -> Iterator[None]:
        """In the body, replicas of ``engine`` run in turn if hooks make it necessary.

        Args:
            engine: the engine, whose module is what has the hooks.
            owner: the object whose step function runs.
            attributes: its attributes that calls may write, by name.
            function: the step function.
            replicated: modules that are replicated beside the engine's.
            is_look: whether what hooks write is restored in the body.
        """
        if self._named is None:  # once: a search of a file's globals takes long
            functions = [function, *_user_functions([owner])]
            values = chain(*map(reachable, functions))
            self._named = [v for v in values if isinstance(v, nn.Module)]
        modules = [engine.module, *modules_kept(attributes.values()), *self._named]
        hooked = _reached_by_hooks(modules)
        self.is_hooked = bool(hooked)
        if not hooked:
            self.pinned = frozenset()
            engine.loop.takes_turns = False
            yield
            return
        shared = _without_replicated(hooked, [engine.module, *replicated])
        self.pinned = _kept_among(shared, owner, attributes)
        is_unwritten = not self.pinned and self._is_known(shared)
        engine.loop.takes_turns = bool(shared) and not is_unwritten
        unkept = [value for i, value in shared.items() if i not in self.pinned]
        before = Snapshot(list(map(_live, unkept)))
        if self.pinned:
            self._tell(engine)
        try:
            yield
        finally:
            engine.loop.takes_turns = False
            if not before.unchanged():
                self._tell(engine)
            elif not self.pinned and not is_unwritten and not is_look:
                self._unwritten.append(list(shared.values()))

    def pinned_in(self, replica: nn.Module) -> frozenset[int]:
        """The ``id`` of objects that a replica shares with its hooks."""
        if not self.is_hooked:
            return frozenset()
        return frozenset(_reached_by_hooks([replica])) | self.pinned

    def copies_in(self, replica: nn.Module, original: nn.Module) -> dict[int, Any]:
        """The objects that hooks of a replica lead to, by the ``id`` of the originals.

        Such is a dict that a ``partial`` in the hooks binds: a replica has a copy, and
        the original module has the original. Without pinned objects.
        """
        if not self.is_hooked:
            return {}
        copies = _reached_by_hooks([replica]).values()
        originals = _reached_by_hooks([original]).values()
        if [*map(type, copies)] != [*map(type, originals)]:
            return {}
        pairs = zip(map(id, originals), copies, strict=True)
        return {number: copied for number, copied in pairs if number not in self.pinned}

    def _is_known(self, shared: Mapping[int, Any]) -> bool:
        """Whether hooks have not written these objects in an earlier step."""
        return any({*map(id, known)} == {*shared} for known in self._unwritten)

    def _tell(self, engine: Any) -> None:
        if self._is_told or len(engine.device_ids) < 2:
            return
        self._is_told = True
        warn(
            "forward hooks keep values in an object that replicas share, so they run "
            "one after the other, which is slower; let the hook close over the hooked "
            "module, and keep the values in an attribute of the module "
            "(module.features = {}), or return them from forward"
        )


def _user_functions(owners: Sequence[Any]) -> list[types.FunctionType]:
    """The user's functions: of the classes of ``owners``, and what these lead to."""
    values = [*owners]
    for owner in owners:
        values += values_kept(vars(owner).values())
    functions: dict[int, types.FunctionType] = {}
    classes: set[type] = set()
    while values:
        value = values.pop()
        if isinstance(value, types.MethodType):
            value = value.__func__
        if isinstance(value, types.FunctionType):
            if id(value) not in functions and not is_of_a_library(value.__module__):
                functions[id(value)] = value
                values += named_values(value).values()
            continue
        kind = value if isinstance(value, type) else type(value)
        values += _methods_of(kind, classes)
    return list(functions.values())


def _methods_of(kind: type, classes: set[type]) -> Iterator[types.FunctionType]:
    """The functions that the classes of the user's among ``kind`` and its bases define.

    Those of each class once: ``classes`` are known.
    """
    for base in kind.__mro__:
        if base in classes or is_of_a_library(base.__module__):
            continue
        classes.add(base)
        for value in vars(base).values():
            function = inspect.unwrap(getattr(value, "__func__", value))
            if isinstance(function, types.FunctionType):
                yield function


def _reached_by_hooks(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """The containers and objects that the user's hooks in ``modules`` lead to, by
    id.
    """
    reached: dict[int, Any] = {}
    parts = chain.from_iterable(module.modules() for module in modules)
    for part in dict.fromkeys(parts):
        functions = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
        if "forward" in vars(part):  # a replaced one may write, too
            functions.append(vars(part)["forward"])
        for function in functions:
            for value in _reached_by(function):
                reached[id(value)] = value
    return reached


def _reached_by(function: Any) -> list[Any]:
    """The containers and objects that a hook leads to."""
    if _is_of_a_library(function):
        # Of a library's hooks only their own objects, such as fastai's ``Hook``.
        holder = getattr(function, "__self__", None)
        library = type(holder).__module__.partition(".")[0]
        has_attributes = hasattr(holder, "__dict__")
        is_module = isinstance(holder, nn.Module)
        if not has_attributes or is_module or library in _WITHOUT_STATE:
            return []
        return [holder]
    reached = []
    for value in reachable(function):
        if isinstance(value, types.MethodType):
            value = value.__self__
        if is_container(value) or _is_written_object(value):
            reached.append(value)
    return reached


def _is_of_a_library(function: Any) -> bool:
    if isinstance(function, functools.partial):
        return _is_of_a_library(function.func)
    if isinstance(function, types.MethodType):
        function = function.__func__
    if not isinstance(function, types.FunctionType):  # an object that can be called
        function = type(function)
    return is_of_a_library(function.__module__)


def _is_written_object(value: Any) -> bool:
    """Whether ``value`` is an object or class of the user's, or a loop's owner."""
    if isinstance(value, type):
        return not is_of_a_library(value.__module__)
    is_function = isinstance(value, (types.FunctionType, types.MethodType))
    names = [base.__name__ for base in type(value).__mro__]
    is_trainer = any(name.endswith("Trainer") for name in names)
    return not is_function and (is_object(value) or is_trainer)


def _without_replicated(
    objects: Mapping[int, Any], modules: Iterable[nn.Module]
) -> dict[int, Any]:
    """The objects of which replicas of ``modules`` have no copies of their own."""
    replicated = {*map(id, ModuleContents(modules).containers)}
    return {i: value for i, value in objects.items() if i not in replicated}


def _kept_among(
    objects: Mapping[int, Any], owner: Any, attributes: Mapping[str, Any]
) -> frozenset[int]:
    """The ``id`` of each object that ``owner`` is, or keeps."""
    owned: Container[int] = CallCopies.ids_in(attributes.values())
    return frozenset(i for i in objects if i == id(owner) or i in owned)


def _live(value: Any) -> Any:
    """What holds an object's contents: itself, or its attributes."""
    if is_container(value):
        return value
    return dict(vars(value)) if isinstance(value, type) else vars(value)
