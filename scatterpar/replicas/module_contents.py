"""Everything that a module holds: modules, containers and tensors, each once.

A module holds more than parameters: attributes, lists of submodules, hooks, a
``forward`` that is a bound method of itself.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.replicas.quantised import held_by, is_composite, is_state
from scatterpar.replicas.references import contents, module_of, parts_of
from scatterpar.replicas.snapshot import PLAIN
from scatterpar.torch_private import (
    CompileFn,
    compile_fn_of,
    is_compiled_module,
    unwrapped,
)

DICTIONARIES = (dict, OrderedDict, defaultdict)
CONTAINERS = (*DICTIONARIES, list, deque, set)
_REGISTRIES = {dict, OrderedDict, set}  # of a module's parameters, hooks and the like
_DTYPE, _GRAD_DTYPE = attrgetter("dtype"), attrgetter("grad_dtype")


class ModuleContents:
    """Everything that ``roots`` hold: modules, containers and tensors, each once.

    Attributes and plain containers are searched, too, so that an unregistered list of
    blocks is replicated as well. With ``device``, only tensors on this device are
    found.
    """

    def __init__(
        self, roots: Iterable[Any], device: torch.device | None = None
    ) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.containers: list[Any] = []
        self.tensors: dict[int, Tensor] = {}
        # Parameters, and the tensors of frozen quantised ones: replicas in one memory
        # share them.
        self.weights: set[int] = set()
        # parameters with other tensors
        self.holders: dict[int, tuple[Tensor, list[Any]]] = {}
        self.states: dict[int, Any] = {}  # objects with tensors of frozen parameters
        # and wrappers of these
        self.compiled: dict[int, tuple[nn.Module, CompileFn]] = {}
        # shared by replicas, with everything that they hold
        self.objects: dict[int, Any] = {}
        # Of copied functions, with their contents, so that no id is reused.
        self.cells: dict[int, tuple[types.CellType, Any]] = {}
        self._seen: set[int] = set()
        self._device = device
        self.roots = tuple(roots)
        for root in self.roots:
            self._visit(root)
        self._leaves = [tensor for tensor in self.tensors.values() if is_leaf(tensor)]

    def _visit(self, value: Any) -> None:
        if type(value) in weakref.ProxyTypes:
            return  # it does not hold its object, and claims to be of the same class
        if isinstance(value, Tensor):
            self._visit_tensor(value, isinstance(value, nn.Parameter))
        elif is_compiled_module(value):
            original, compile_fn = unwrapped(value)
            assert compile_fn is not None
            self.compiled[id(value)] = self.compiled[id(original)] = (
                original,
                compile_fn,
            )
            self._visit(original)
        elif isinstance(value, nn.Module):
            if id(value) not in self.modules:
                self.modules[id(value)] = value
                if value._compiled_call_impl is not None:
                    self.compiled[id(value)] = (
                        value,
                        compile_fn_of(value._compiled_call_impl),
                    )
                self._visit_container(vars(value))
        elif type(value) in CONTAINERS:
            if id(value) not in self._seen:
                self._visit_container(value)
        elif is_state(value):
            self._visit_held([value])
        elif not isinstance(value, (types.FunctionType, weakref.ref)):
            for part in parts_of(value).made_of():
                self._visit(part)
            if hasattr(value, "__dict__") and not isinstance(
                value, (type, types.MethodType)
            ):
                self.objects[id(value)] = value

    def _visit_tensor(self, tensor: Tensor, is_weight: bool) -> None:
        if is_weight and id(tensor) not in self.holders and (held := held_by(tensor)):
            if not tensor.requires_grad:
                self._visit_held(held)
            self.holders[id(tensor)] = tensor, held  # after those that it holds
        is_made_of_others = is_composite(tensor)
        if not is_weight or not is_made_of_others:
            if self._device not in (None, tensor.device):
                return
            self.tensors[id(tensor)] = tensor
            if is_weight:
                self.weights.add(id(tensor))
        # What a subclass consists of is no attribute, except a parameter's, such as
        # ``scale = 5``.
        is_plain = isinstance(tensor, nn.Parameter) or not is_made_of_others
        if is_plain and id(vars(tensor)) not in self._seen:
            self._seen.add(id(vars(tensor)))
            self.containers.append(vars(tensor))

    def _visit_held(self, held: Iterable[Any]) -> None:
        """Find the tensors in what a frozen parameter holds, such as
        ``weight.quant_state``.
        """
        for value in held:
            if isinstance(value, Tensor):
                self._visit_tensor(value, is_weight=True)
            elif id(value) not in self.states:
                self.states[id(value)] = value
                self.containers.append(vars(value))
                self._visit_held(held_by(value))

    def facts(self) -> list[Any]:
        """State that replicas depend on and that no container shows."""
        tensors = self.tensors.values()
        try:
            gradient_dtypes = list(map(_GRAD_DTYPE, self._leaves))
        except RuntimeError:  # a leaf is a leaf no more
            return []
        return [
            *gradient_dtypes,
            *map(type, self.modules.values()),
            *map(type, tensors),
            *map(_DTYPE, tensors),
            *[tensor.requires_grad for tensor, _ in self.holders.values()],
            *[id(contents(cell)) for cell, _ in self.cells.values()],
        ]

    def _visit_container(self, container: Any) -> None:
        self._seen.add(id(container))
        self.containers.append(container)
        # A list, because an item, such as a module that is imported lazily, may add
        # others.
        if isinstance(container, dict):
            for key, item in [*container.items()]:
                if type(key) not in PLAIN:
                    self._visit(key)
                self._visit(item)
            return
        for item in [*container]:
            self._visit(item)


def is_leaf(tensor: Tensor) -> bool:
    """Whether the tensor is a leaf, which accumulates gradients in ``.grad``."""
    try:
        return tensor.is_leaf
    except RuntimeError:  # of a chunk of a weight that was written since
        return False


def root_to_replicate(function: Any) -> Any:
    """``module_of(function)`` unless replicas share it; a partial that binds modules or
    tensors.
    """
    if type(function) is not functools.partial:
        module = module_of(function)
        return None if module is None or _is_stateless(module) else module
    held = ModuleContents((function,))
    return function if held.tensors or held.modules else None


def _is_stateless(module: nn.Module) -> bool:
    """Whether ``module`` is a loss of torch with plain values only.

    Its calls change nothing.
    """
    if type(module).__module__ != "torch.nn.modules.loss":
        return False
    for value in vars(module).values():
        if type(value) in PLAIN:
            continue
        if type(value) not in _REGISTRIES:
            return False
        entries = value.values() if isinstance(value, dict) else value
        if not {None}.issuperset(entries):
            return False
    return True
