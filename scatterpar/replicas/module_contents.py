"""Everything that a module holds: modules, containers and tensors, each once.

A module holds more than parameters: attributes, lists of submodules, hooks, a
``forward`` that is a bound method of itself.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch.nested import MAX_ENTRIES, PLAIN
from scatterpar.objects.quantised import is_composite, is_state, tensors_in
from scatterpar.objects.reach import closed_over, leads_to
from scatterpar.objects.references import (
    MUTABLE_CONTAINERS,
    contents,
    module_of,
    parts_of,
)
from scatterpar.objects.whose import is_loss_of_torch
from scatterpar.torch_private.compiler import (
    CompileFn,
    compile_fn_of,
    is_compiled_module,
    unwrapped,
)

_CLASSES_OF_REGISTRIES = {
    dict,
    OrderedDict,
    set,
}  # of a module's parameters, hooks and the like
_GRAD_DTYPE = attrgetter("grad_dtype")
_CLASSES_IN_SHARED_DATA = PLAIN | {
    tuple,
    list,
}  # the classes of a long container's entries


class ModuleContents:
    """Everything that ``roots`` hold: modules, containers and tensors, each once.

    Attributes and plain containers are searched, too, so that an unregistered list of
    blocks is replicated as well. With ``device``, only tensors on this device are
    found.

    Attributes, each by ``id`` if it is a dictionary:
        modules: all modules.
        containers: plain containers, and the ``__dict__`` of modules and tensors.
        tensors: all tensors, in the order in which they were found.
        weights: parameters, and the tensors of frozen quantised ones: replicas in one
            memory share them.
        holders: parameters that hold other tensors, or consist of them; with these.
        states: objects with tensors of frozen parameters.
        compiled: modules that are compiled, with what compiles them.
        objects: what replicas share, with everything that it holds.
        cells: of copied functions, with their contents, so that no id is used again.
        module_list, tensor_list: the modules and tensors by number.

    Functions stay shared, unless they lead to something of the module. Then a container
    in their closures that leads there is found, too.
    """

    def __init__(
        self, roots: Iterable[Any], device: torch.device | None = None
    ) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.containers: list[Any] = []
        self.tensors: dict[int, Tensor] = {}
        self.weights: set[int] = set()
        self.holders: dict[int, tuple[Tensor, list[Any]]] = {}
        self.states: dict[int, Any] = {}
        self.compiled: dict[int, tuple[nn.Module, CompileFn]] = {}
        self.objects: dict[int, Any] = {}
        self.cells: dict[int, tuple[types.CellType, Any]] = {}
        self._replicated: set[int] = set()  # ids of what replicas have copies of
        self._functions: list[types.FunctionType] = []
        self._device = device
        self.roots = tuple(roots)
        for root in self.roots:
            self._visit(root)
        self._visit_closures()
        self.module_list = list(self.modules.values())
        self.tensor_list = list(self.tensors.values())
        # Gradients have dtypes of those that may be trained.
        self._leaves = [
            tensor
            for key, tensor in self.tensors.items()
            if is_leaf(tensor) and (key in self.weights or tensor.requires_grad)
        ]

    def _visit(self, value: Any) -> None:
        """Find ``value``, and what it holds."""
        if type(value) in weakref.ProxyTypes:
            return  # it does not hold its object, and claims to be of the same class
        if isinstance(value, Tensor):
            self._visit_tensor(value, isinstance(value, nn.Parameter))
        elif self.is_replicated(value):
            return
        elif is_compiled_module(value):
            original, compile_fn = unwrapped(value)
            assert compile_fn is not None
            # A copy of the wrapper is a copy of the original that runs compiled.
            self.compiled[id(original)] = original, compile_fn
            self._replicated.add(id(value))
            self._visit(original)
        elif isinstance(value, nn.Module):
            self._visit_module(value)
        elif type(value) in MUTABLE_CONTAINERS:
            if not is_shared_data(value):
                self._visit_container(value)
        elif is_state(value):
            self._visit_parts([value])
        elif isinstance(value, types.FunctionType):
            self._functions.append(value)
        elif not isinstance(value, weakref.ref):  # it does not hold its object
            for part in parts_of(value).made_of():
                self._visit(part)
            # The object of a method, and what a class has, is nobody's attribute.
            if hasattr(value, "__dict__") and not isinstance(
                value, (type, types.MethodType)
            ):
                self.objects[id(value)] = value

    def _visit_module(self, module: nn.Module) -> None:
        self.modules[id(module)] = module
        self._replicated.add(id(module))
        call = module._compiled_call_impl
        # An integration's is no function, and runs the calls of this module alone.
        if isinstance(call, types.FunctionType):
            compile_fn = compile_fn_of(call)
            self.compiled[id(module)] = module, compile_fn
        self._visit_container(vars(module))

    def _visit_tensor(self, tensor: Tensor, is_weight: bool) -> None:
        is_new = is_weight and id(tensor) not in self.holders
        parts = tensors_in(tensor) if is_new else []
        if parts:
            # Those of a trained one are refused where the copy is made, by name.
            if not tensor.requires_grad:
                self._visit_parts(parts)
            # After its parts: ``ModuleCopy`` makes copies in this order.
            self.holders[id(tensor)] = tensor, parts
            self._replicated.add(id(tensor))
        is_made_of_others = is_composite(tensor)
        # A weight that consists of others has no values of its own to be sent.
        if not is_weight or not is_made_of_others:
            if self._device not in (None, tensor.device):
                return
            self.tensors[id(tensor)] = tensor
            self._replicated.add(id(tensor))
            if is_weight:
                self.weights.add(id(tensor))
        # What a subclass consists of is no attribute, except a parameter's, such as
        # ``scale = 5``.
        is_plain = isinstance(tensor, nn.Parameter) or not is_made_of_others
        attributes = vars(tensor)
        if is_plain and not self.is_replicated(attributes):
            self._replicated.add(id(attributes))
            self.containers.append(attributes)

    def _visit_parts(self, parts: Iterable[Any]) -> None:
        """Find the tensors in parts of a frozen parameter, such as
        ``weight.quant_state``.
        """
        for part in parts:
            if isinstance(part, Tensor):
                self._visit_tensor(part, is_weight=True)
            elif not self.is_replicated(part):
                self._replicated.add(id(part))
                self.states[id(part)] = part
                self.containers.append(vars(part))
                self._visit_parts(tensors_in(part))

    def _visit_closures(self) -> None:
        """Find containers in closures of functions that lead to what was found.

        A hook that looks up its module, or calls another one, finds the replica's.
        """
        while self._functions:
            functions = self._functions
            self._functions = []
            for value in closed_over(functions):
                if type(value) not in MUTABLE_CONTAINERS or self.is_replicated(value):
                    continue
                if self.leads_here(value):
                    self._visit_container(value)  # which may find further functions

    def leads_here(self, value: Any) -> bool:
        """Whether ``value`` is replicated, or leads to something that is."""
        return leads_to(value, self._is_replicated_or_its_id)

    def _is_replicated_or_its_id(self, value: Any) -> bool:
        if type(value) is int:
            return value in self.modules or value in self.tensors
        return self.is_replicated(value)

    def is_replicated(self, value: Any) -> bool:
        """Whether replicas have a copy of ``value``."""
        return id(value) in self._replicated

    def facts(self) -> list[Any]:
        """State that replicas depend on and that no container shows."""
        # Each step asks: maps of attribute getters run without Python calls.
        facts: list[Any] = []
        try:
            facts += map(_GRAD_DTYPE, self._leaves)
        except RuntimeError:  # a leaf is a leaf no more
            return []
        facts += map(type, self.modules.values())
        facts += map(type, self.tensors.values())
        for tensor, _ in self.holders.values():
            facts.append(tensor.requires_grad)
        for cell, _ in self.cells.values():
            facts.append(id(contents(cell)))
        return facts

    def _visit_container(self, container: Any) -> None:
        self._replicated.add(id(container))
        self.containers.append(container)
        # A list, because an item, such as a module that is imported lazily, may add
        # others.
        items = [*container]
        if isinstance(container, dict):  # these are its keys
            items += container.values()
        for item in items:
            if type(item) not in PLAIN:
                self._visit(item)


# Containers that were found to be data, by ``id``: their length, and the ``id`` of the
# first and last entry.
_known_data: dict[int, tuple[int, int, int]] = {}
_MAX_KNOWN = 1000


def is_shared_data(container: Any) -> bool:
    """Whether a long container holds plain values, or tuples and the like of these.

    A vocabulary, or the files of a data set: replicas share it, so that no step copies
    it, or searches it for what was rebound. The pair asks in each call, and so answers
    are remembered.
    """
    if len(container) <= MAX_ENTRIES:
        return False
    first = last = next(iter(container))
    if not isinstance(container, set):
        last = next(reversed(container))
    if not {type(first), type(last)} <= _CLASSES_IN_SHARED_DATA:
        return False
    outline = len(container), id(first), id(last)
    if _known_data.get(id(container)) == outline:
        return True
    entries: Iterable[Any] = container
    if isinstance(container, dict):
        entries = chain(container, container.values())
    # In C: such a container may have millions of entries.
    kinds = set(map(type, entries))
    if not kinds <= PLAIN:
        if not kinds <= _CLASSES_IN_SHARED_DATA or isinstance(container, dict):
            return False
        inner = chain.from_iterable(filter(_is_nested, container))
        if not set(map(type, inner)) <= PLAIN:
            return False
    if len(_known_data) >= _MAX_KNOWN:
        _known_data.clear()
    _known_data[id(container)] = outline
    return True


def _is_nested(entry: Any) -> bool:
    return type(entry) in (tuple, list)


def is_leaf(tensor: Tensor) -> bool:
    """Whether the tensor is a leaf, which accumulates gradients in ``.grad``."""
    try:
        return tensor.is_leaf
    except RuntimeError:  # of a chunk of a weight that was written since
        return False


def root_to_replicate(function: Any) -> Any:
    """The part of a criterion that every replica has a copy of; ``None`` without one.

    It is the criterion's module, or a partial that binds modules or tensors.
    """
    if type(function) is functools.partial:
        bound = ModuleContents((function,))
        return function if bound.tensors or bound.modules else None
    module = module_of(function)
    return None if module is None or _is_stateless(module) else module


def _is_stateless(module: nn.Module) -> bool:
    """Whether ``module`` is a loss of torch with plain values only.

    Its calls change nothing.
    """
    if not is_loss_of_torch(module):
        return False
    for value in vars(module).values():
        if type(value) in PLAIN:
            continue
        if type(value) not in _CLASSES_OF_REGISTRIES:
            return False
        entries = value.values() if isinstance(value, dict) else value
        if not {None}.issuperset(entries):
            return False
    return True
