"""Save state that user code may change, to restore it after calls that leave none."""

from __future__ import annotations

import argparse
import collections
import contextlib
import pickle
import queue
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.device_ids import HOST, physical
from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.transfers import write
from scatterpar.replicas.broadcast import version
from scatterpar.replicas.module_contents import ModuleContents
from scatterpar.replicas.references import MAX_ENTRIES, contents, parts_of
from scatterpar.replicas.snapshot import PLAIN, Snapshot
from scatterpar.threads.generators import default_of
from scatterpar.wrapper import Wrapper

_MAX_BYTES = 2**26  # of tensors that are no buffers; larger ones are data
# Modules that are not the user's code.
_FOREIGN = {"torch", "numpy", "scatterpar", *sys.stdlib_module_names} - {"__main__"}
# Python's classes of objects that have only the attributes that a user gives them.
_NAMESPACES = {
    types.SimpleNamespace,
    argparse.Namespace,
    collections.ChainMap,
    collections.UserDict,
    collections.UserList,
}
_LOCKS = {"_thread", "threading", "queue"}
# Classes that are never followed, by the end of a base's name: they lead to data.
_DATA = (
    "Dataset",
    "DataLoader",
    "DataModule",
    "Sampler",
    "Trainer",
    "Optimizer",
    "IOBase",
)
# Classes that override this compute their items, such as a library's table of classes.
_GETTERS = dict.__getitem__, list.__getitem__, deque.__getitem__, None
_TENSORS = Tensor, nn.Parameter, nn.Buffer


@dataclass(frozen=True)
class _Variable:
    """Something that user code may change, and its saved value.

    Attributes:
        read: returns the present value.
        write: gets the value to restore.
        saved: the saved value.
        is_same: whether two values are the same. ``is_`` for variables that refer to
            objects.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    saved: Any
    is_same: Callable[[Any, Any], bool]

    def has_changed(self) -> bool:
        return not self.is_same(self.read(), self.saved)


class UserState(ModuleContents):
    """The state that ``roots`` lead to, and all random generators: saved now, to be
    restored.

    Roots lead to modules and functions, what these close over, globals that they name,
    objects, their classes' attributes, containers, arrays. A root may be a class. Left
    alone: containers of more than 1000 entries, objects that hold a lock, data sets,
    loaders, trainers, files, objects of libraries. Values of parameters are saved only
    with ``weights``, of buffers always, of other tensors up to 64 MiB.

    Attributes:
        drawn: whether a generator had moved at a ``restore``.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        devices: Sequence[torch.device] = (),
        *,
        weights: bool = False,
    ) -> None:
        self.drawn = False
        self._generators: list[_Variable] = []
        self._variables: list[_Variable] = []
        self._versions: list[
            tuple[Tensor, int]
        ] = []  # of tensors whose values are not saved
        # Roots, and the objects of methods, are followed whatever their class is.
        self._root_ids = {id(root) for root in roots}
        self._root_ids |= {id(getattr(root, "__self__", None)) for root in roots}
        for device in {HOST, *map(physical, devices)}:
            generator = default_of(device)
            self._save_generator(generator.get_state, generator.set_state)
        if numpy_random := sys.modules.get("numpy.random"):
            self._save_generator(numpy_random.get_state, numpy_random.set_state)
        # ``random.getstate`` is a method of Python's generator, and leads to it.
        super().__init__((*roots, random.getstate))
        snapshot = Snapshot(self.containers)
        self._save(snapshot.unchanged, lambda _: snapshot.restore())
        self._save_tensors(weights)

    def is_changed(self) -> bool:
        """Whether objects, containers or variables differ from their saved contents."""
        for variable in self._variables:
            if variable.is_same is is_ and variable.has_changed():
                return True
        return False

    def lost(self) -> list[tuple[int, ...]]:
        """The shapes of large tensors that were written, whose values are not saved."""
        return [
            tuple(tensor.shape)
            for tensor, saved in self._versions
            if version(tensor) != saved
        ]

    @torch.no_grad()
    def restore(self, generators_only: bool = False) -> None:
        """Restore everything that has changed, or only the generators."""
        self.drawn |= _restore(self._generators)
        if not generators_only:
            _restore(self._variables)

    def _save(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        """Save a variable, and what its value leads to."""
        value = read()
        self._variables.append(_Variable(read, write, value, is_))
        self._visit(value)

    def _save_generator(
        self, read: Callable[[], Any], write: Callable[[Any], object]
    ) -> None:
        self._generators.append(_Variable(read, write, read(), _is_same_state))

    def _save_tensors(self, weights: bool) -> None:
        """Save where tensors are stored, and the values of those that user code may
        write.
        """
        buffers: set[int] = set()
        for module in self.modules.values():
            buffers |= {id(buffer) for buffer in module._buffers.values()}
        bytes_left = _MAX_BYTES
        for key, tensor in self.tensors.items():
            is_weight = key in self.weights
            is_buffer = key in buffers
            with contextlib.suppress(
                RuntimeError
            ):  # of a chunk of a weight that was written since
                if not (is_weight or is_buffer):
                    bytes_left -= tensor.numel() * tensor.element_size()
                if tensor.is_meta:
                    continue
                self._save_storage(tensor)
                if weights if is_weight else is_buffer or bytes_left >= 0:
                    self._save_values(tensor)
                elif not is_weight:
                    self._versions.append((tensor, version(tensor)))

    def _save_storage(self, tensor: Tensor) -> None:
        """Save where a leaf is stored: a forward pass may exchange its memory."""
        is_dense = type(tensor) in _TENSORS and tensor.layout == torch.strided
        if is_dense and tensor.is_leaf:
            read = partial(getattr, tensor, "data")
            write_data = partial(setattr, tensor, "data")
            self._variables.append(
                _Variable(read, write_data, tensor.data, Tensor.is_set_to)
            )

    def _save_values(self, tensor: Tensor) -> None:
        values = tensor.detach()
        write_values = partial(write, values)
        self._variables.append(
            _Variable(values.detach, write_values, values.clone(), same_bits)
        )

    def _visit(self, value: Any) -> None:
        """Save what ``value`` holds and what it leads to, once."""
        if type(value) in PLAIN:
            return
        if id(value) not in self._root_ids and _is_data(value):
            return
        if isinstance(value, Wrapper):  # an engine restores its own state
            value = value.module
        if isinstance(value, (dict, list, deque, set)):
            is_plain = getattr(type(value), "__getitem__", None) in _GETTERS
            if is_plain and id(value) not in self._seen and len(value) <= MAX_ENTRIES:
                self._visit_container(value)
            return
        super()._visit(value)
        if isinstance(value, (Tensor, tuple)) or id(value) in self._seen:
            return
        if not isinstance(value, type):
            self._seen.add(id(value))
            self._visit_object(value)
        elif id(value) in self._root_ids:
            self._visit_classes(value)

    def _visit_closures(self) -> None:
        """Nothing: ``_visit_function`` has found them, except a library's."""

    def _visit_object(self, value: Any) -> None:
        """Save the state of an object that is no container, tensor or class."""
        # Classes are asked for attributes: a library that is loaded by name has those
        # of any name.
        kind = type(value)
        if isinstance(value, types.MethodType):
            self._visit(value.__func__)  # its object is visited by the base class
        elif isinstance(value, random.Random):
            self._save_generator(value.getstate, value.setstate)
        elif isinstance(value, torch.Generator):
            self._save_generator(value.get_state, value.set_state)
        elif hasattr(kind, "bit_generator"):  # NumPy's
            source = value.bit_generator
            self._save_generator(
                partial(getattr, source, "state"), partial(setattr, source, "state")
            )
        elif hasattr(kind, "__array_interface__") and value.flags.writeable:
            write_array = partial(value.__setitem__, ...)
            self._variables.append(
                _Variable(int, write_array, value.copy(), _is_never_same)
            )
        elif isinstance(value, queue.Queue):
            self._visit(value.queue)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, nn.Module):
            if not _is_of_a_library(kind):
                self._visit_slots(value)
                self._visit_classes(kind)
        elif kind in _NAMESPACES and not _holds_a_lock(value):
            self._visit(vars(value))
        elif not _is_foreign(kind.__module__) and not _holds_a_lock(value):
            self._visit(getattr(value, "__dict__", {}))
            self._visit_slots(value)
            self._visit_classes(kind)

    def _visit_slots(self, value: Any) -> None:
        """Save slots of ``value``."""
        for slot in _slots_of(type(value)):
            if hasattr(value, slot.__name__):
                self._save(partial(slot.__get__, value), partial(slot.__set__, value))

    def _visit_classes(self, kind: type) -> None:
        """Save the attributes of a class, and of the user's classes among its bases."""
        bases = [base for base in kind.__mro__[1:] if not _is_of_a_library(base)]
        for base in (kind, *bases):
            self._visit_class(base)

    def _visit_class(self, kind: type) -> None:
        """Save the attributes of a class, once, and what its methods lead to."""
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        names = {*vars(kind)}
        is_complete = partial(_has_no_other_names, kind)
        remove = partial(_remove_other_names, kind)
        self._variables.append(_Variable(int, remove, names, is_complete))
        for name, attribute in list(vars(kind).items()):
            if isinstance(attribute, types.FunctionType):
                self._visit(attribute)
            is_computed = callable(attribute) or hasattr(attribute, "__get__")
            if not is_computed and not name.startswith("__"):
                self._save(partial(getattr, kind, name), partial(setattr, kind, name))

    def _visit_function(self, function: types.FunctionType) -> None:
        """Save cells and globals of a user's function, and what they lead to."""
        if _is_foreign(function.__module__):
            return
        parts = parts_of(function)
        namespace = function.__globals__
        for cell in function.__closure__ or ():
            if contents(cell) is not cell:
                self._save(
                    partial(contents, cell), partial(setattr, cell, "cell_contents")
                )
        # functools.wraps gives a library's wrapper the user's __module__.
        if not _is_foreign(namespace.get("__name__")):
            for name in parts.file_globals:
                self._save(
                    partial(namespace.get, name), partial(namespace.__setitem__, name)
                )
        self._visit((*parts.closure.values(), parts.attributes))


def _restore(variables: Iterable[_Variable]) -> bool:
    """Restore what has changed. Returns whether anything had."""
    changed = [variable for variable in variables if variable.has_changed()]
    for variable in changed:
        variable.write(variable.saved)
    return bool(changed)


def _has_no_other_names(kind: type, _: Any, names: set[str]) -> bool:
    """Whether a class has no attributes but those with ``names``."""
    return names.issuperset(vars(kind))


def _remove_other_names(kind: type, names: set[str]) -> None:
    for name in vars(kind).keys() - names:
        delattr(kind, name)


def _is_data(value: Any) -> bool:
    """Whether ``value`` is of a class that leads to data: data sets, loaders, trainers,
    files.
    """
    if isinstance(value, (Tensor, nn.Module, type)):
        return False
    return any(base.__name__.endswith(_DATA) for base in type(value).__mro__)


def _is_foreign(module: Any) -> bool:
    """Whether a module, given by its name, is not the user's code."""
    name = module if isinstance(module, str) else "torch"
    # Closures of the integrations hold user modules.
    return name.split(".")[0] in _FOREIGN and not name.startswith(
        "scatterpar.integrations"
    )


def _is_of_a_library(kind: type) -> bool:
    """Whether a class is defined in an installed package."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return _is_foreign(kind.__module__) or "-packages" in str(file)


def _holds_a_lock(value: Any) -> bool:
    """Whether an attribute is a lock: other threads share the object."""
    attributes = getattr(value, "__dict__", {})
    return any(
        type(attribute).__module__ in _LOCKS for attribute in attributes.values()
    )


def _slots_of(kind: type) -> Iterator[types.MemberDescriptorType]:
    for base in kind.__mro__:
        for attribute in vars(base).values():
            if isinstance(attribute, types.MemberDescriptorType):
                yield attribute


def _is_same_state(state: Any, other: Any) -> bool:
    """Whether two states of random generators are the same."""
    if isinstance(state, Tensor):
        return same_bits(state, other)
    return pickle.dumps(state) == pickle.dumps(other)  # NumPy's have arrays in them


def _is_never_same(_: Any, __: Any) -> bool:
    """Restores an array without a comparison, which costs as much."""
    return False
