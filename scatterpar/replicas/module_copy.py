"""Find what a module holds, notice when it is rebound, and copy it for a replica.

A module holds more than parameters: attributes, lists of submodules, hooks, a
``forward`` that is a bound method of itself. ``ModuleCopy`` copies all of it, with the
protocol of ``torch.nn.parallel`` (``Module._replicate_for_data_parallel``).

A function that closes over the module, such as ``module.forward = lambda x: old(x)``,
would run the user's module in every replica. So it is copied: the same code, with
closure cells that refer to the replica. Cells with other contents stay shared: a hook
that appends to a list fills the user's list.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, starmap
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.errors import warn
from scatterpar.replicas.checks import (
    composite_like,
    held_by,
    is_composite,
    is_state,
    new_like,
)
from scatterpar.replicas.compiled import Compiler
from scatterpar.torch_private import (
    CompileFn,
    compile_fn_of,
    is_compiled_module,
    unwrapped,
)

_DICTIONARIES = (dict, OrderedDict, defaultdict)
_CONTAINERS = (*_DICTIONARIES, list, deque, set)
_SWITCHES = {bool, str, bytes, type(None)}
_PLAIN = _SWITCHES | {int, float, complex}
_REGISTRIES = {dict, OrderedDict, set}  # of a module's parameters, hooks and the like
_CACHED_FUNCTION = type(functools.lru_cache(len))
_DTYPE, _GRAD_DTYPE = attrgetter("dtype"), attrgetter("grad_dtype")

ValueChange = tuple[int, Any, Any]  # the number of a container, a key, the value there


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
        elif type(value) in _CONTAINERS:
            if id(value) not in self._seen:
                self._visit_container(value)
        elif is_state(value):
            self._visit_held([value])
        elif not isinstance(value, (types.FunctionType, weakref.ref)):
            for one in _parts(value)[0]:
                self._visit(one)
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
                if type(key) not in _PLAIN:
                    self._visit(key)
                self._visit(item)
            return
        for item in [*container]:
            self._visit(item)


class Snapshot:
    """The contents of some containers, by identity, and ``facts``; detects any change
    of them.

    The comparison runs in C loops: a tree of 287 modules has eight thousand entries. It
    reads all of them, because no Python API reports reliably which dictionaries were
    written.
    """

    def __init__(
        self, containers: Iterable[Any], facts: Callable[[], list[Any]] = list
    ) -> None:
        self._facts, self._known, self._containers = facts, facts(), list(containers)
        self._saved: list[Any]
        self._saved = [
            dict(c) if isinstance(c, dict) else list(c) for c in self._containers
        ]
        self._remember()

    def _remember(self) -> None:
        """Sort the saved contents for ``unchanged``."""
        self._sizes = list(map(len, self._saved))
        full = [
            pair for pair in zip(self._containers, self._saved, strict=True) if pair[1]
        ]
        named = [
            type(c) is dict and {str}.issuperset(map(type, saved)) for c, saved in full
        ]
        self._others = [
            pair for pair, is_named in zip(full, named, strict=True) if not is_named
        ]
        dicts = [*compress(full, named)]
        self._dicts = [container for container, _ in dicts]
        self._names = [name for _, saved in dicts for name in saved]
        self._values = [value for _, saved in dicts for value in saved.values()]

    def unchanged(self) -> bool:
        """Whether every container holds the same objects under the same keys."""
        return (
            list(map(len, self._containers)) == self._sizes
            and self._facts() == self._known
            and list(chain.from_iterable(self._dicts)) == self._names
            and all(
                map(
                    is_,
                    chain.from_iterable(map(dict.values, self._dicts)),
                    self._values,
                )
            )
            and all(starmap(_is_same, self._others))
        )

    def flags(self) -> int:
        """A hash of the values that may be switches: strings, booleans, bytes and
        ``None``.
        """
        return hash(tuple(value for value in self._values if type(value) in _SWITCHES))

    def _changed(self) -> Iterator[tuple[int, Any, Any]]:
        """Yield (number, container, saved contents) for each container that has
        changed.
        """
        for i, (container, saved) in enumerate(
            zip(self._containers, self._saved, strict=True)
        ):
            if (container or saved) and not _is_same(container, saved):
                yield i, container, saved

    def restore(self) -> None:
        """Restore the contents of the containers, except attributes that torch's
        compiler sets.
        """
        for _, container, saved in self._changed():
            if isinstance(saved, dict):
                names = [key for key in container if isinstance(key, str)]
                saved |= {n: container[n] for n in names if n.startswith("_dynamo")}
            container.clear()
            _refill(container, saved)
        self._known = self._facts()
        self._remember()

    def value_changes(self) -> list[ValueChange] | None:
        """The plain values that were replaced by others; ``None`` if anything else has
        changed.
        """
        changes = []
        for i, now, saved in self._changed():
            is_dict = isinstance(saved, dict)  # keys may be tensors: not compared by ==
            if not is_dict or len(now) != len(saved) or not all(map(is_, now, saved)):
                return None
            for key, value in now.items():
                if value is not saved[key]:
                    if not _PLAIN.issuperset((type(value), type(saved[key]))):
                        return None
                    changes.append((i, key, value))
        return changes if self._facts() == self._known else None

    def apply_changes(self, changes: Iterable[ValueChange]) -> None:
        """Replace plain values in the containers and in their remembered contents."""
        for i, key, value in changes:
            self._containers[i][key] = self._saved[i][key] = value
        self._remember()


def _is_same(container: Any, saved: Any) -> bool:
    if len(container) != len(saved) or not all(map(is_, container, saved)):
        return False
    return not isinstance(saved, dict) or all(
        map(is_, container.values(), saved.values())
    )


class ModuleCopy:
    """A copy of ``ModuleContents``, with other tensors.

    Modules and containers are copied. So are tuples, bound methods, partials, weak
    references and functions that refer to any of these. The copies refer to each other.
    Everything else is shared with the original. ``tensors`` are the copy's, in the
    order of the contents' tensors.
    """

    def __init__(
        self,
        found: ModuleContents,
        tensors: Sequence[Tensor],
        compiler: Compiler | None = None,
    ) -> None:
        self._found, self._compiler = found, compiler
        self._copies: dict[int, Any] = dict(zip(found.tensors, tensors, strict=True))
        containers = set(map(id, found.containers))
        replicated = (
            found.tensors,
            found.holders,
            found.states,
            found.compiled,
            found.modules,
        )
        self._replicated = containers.union(*replicated)
        for original, parts in found.holders.values():  # inner ones come first
            if is_composite(original):
                copies = [self._copies.get(id(part), part) for part in parts]
                self._copies[id(original)] = composite_like(original, copies)
        for value in (*found.modules.values(), *found.states.values()):
            self.copy_of(value)
        holders = (holder for holder, _ in found.holders.values())
        for tensor in chain(found.tensors.values(), holders):
            if id(attributes := vars(tensor)) in containers:
                copied = self._copies[id(attributes)] = vars(self._copies[id(tensor)])
                copied |= {
                    name: self._copies.get(id(one), one)
                    for name, one in attributes.items()
                }
        self.containers = [self.copy_of(container) for container in found.containers]

    def copy_of(self, value: Any) -> Any:
        """The copy of ``value``, or ``value`` itself if it is shared."""
        if type(value) in _PLAIN:
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if id(value) not in self._replicated and not self._is_keyed(value):
            parts, make = _parts(value)
            copies = [self.copy_of(part) for part in parts]
            return value if all(map(is_, copies, parts)) else make(*copies)
        if is_compiled_module(value):
            return self.copy_of(unwrapped(value)[0])
        if isinstance(value, nn.Module):
            replica: nn.Module = self._fill(value, new_like(value))
            if self._compiler is not None and id(value) in self._found.compiled:
                _, compile_fn = self._found.compiled[id(value)]
                call = self._compiler.compiled_call(value, replica, compile_fn)
                vars(replica)["_compiled_call_impl"] = call
            return replica
        if type(value) in _CONTAINERS:
            made = self._copies[id(value)] = value.copy()
            made.clear()
            if isinstance(value, dict):
                _refill(
                    made, [(self._key(k), self.copy_of(v)) for k, v in value.items()]
                )
            elif isinstance(value, set):
                _refill(made, [self._key(item) for item in value])
            else:
                _refill(made, [self.copy_of(item) for item in value])
            return made
        return self._fill(value, copy.copy(value))  # a state

    def _key(self, key: Any) -> Any:
        """The copy of a dictionary's key, which may be the ``id`` of an object."""
        if type(key) is int and key in self._replicated:
            original = self._found.modules.get(key, self._found.tensors.get(key))
            return key if original is None else id(self.copy_of(original))
        return self.copy_of(key)

    def _is_keyed(self, value: Any) -> bool:
        """Whether a dictionary, in a closure for example, maps replicated objects.

        A replica finds itself under its own copies of the keys only.
        """
        if type(value) not in _DICTIONARIES:
            return False
        key = next(iter(value), None)  # all are of one kind
        if type(key) in _PLAIN:
            return type(key) is int and key in self._replicated
        return self._refers(key)

    def _fill(self, original: Any, made: Any) -> Any:
        """``made``, a shallow copy of ``original``, with copies of its attributes."""
        attributes, state = vars(original), vars(made)
        self._copies |= {id(original): made, id(attributes): state}
        for name, item in state.items():
            # The protocol copies some containers; this copies all of them, from the
            # source.
            source = (
                attributes[name]
                if type(item) in _CONTAINERS and name in attributes
                else item
            )
            state[name] = self.copy_of(source)
        return made

    def _function(self, function: types.FunctionType) -> Any:
        """The function, or a copy that refers to copies if it refers to replicated
        objects.
        """
        of_file = function.__globals__
        for name in function.__code__.co_names:
            if name in of_file and self._refers(of_file[name]):
                warn(
                    f"the function {function.__qualname__}, which the module holds, "
                    "names "
                    f"{name!r} of its file: replicas that call it use the user's own "
                    "module there; "
                    f"define it inside a function, so that it closes over {name!r}, "
                    "or bind "
                    f"{name!r} with functools.partial"
                )
        if not self._refers(function):
            return function
        cells = function.__closure__ or ()
        new = tuple(
            types.CellType() if self._refers(contents(cell)) else cell for cell in cells
        )
        copied: Any = types.FunctionType(function.__code__, of_file, closure=new)
        # before cells are filled: a function may call itself
        self._copies[id(function)] = copied
        copied.__defaults__ = self.copy_of(function.__defaults__)
        keywords = function.__kwdefaults__ or {}
        copied.__kwdefaults__ = {
            name: self.copy_of(value) for name, value in keywords.items()
        }
        # keeps it alive: its id is not used again
        functools.update_wrapper(copied, function)
        for cell, new_cell in zip(cells, new, strict=True):
            if new_cell is not cell:
                new_cell.cell_contents = self.copy_of(cell.cell_contents)
                self._found.cells[id(cell)] = cell, cell.cell_contents
        return copied

    def _refers(self, value: Any, seen: set[int] | None = None) -> bool:
        """Whether ``value`` is replicated, or refers to a replicated object."""
        if id(value) in self._replicated or self._is_keyed(value):
            return True
        seen = set() if seen is None else seen
        if id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._refers(one, seen) for one in _parts(value)[0])


def _refill(container: Any, items: Any) -> None:
    (container.update if isinstance(container, (dict, set)) else container.extend)(
        items
    )


def is_leaf(tensor: Tensor) -> bool:
    """Whether the tensor is a leaf, which accumulates gradients in ``.grad``."""
    try:
        return tensor.is_leaf
    except RuntimeError:  # of a chunk of a weight that was written since
        return False


def contents(cell: types.CellType) -> Any:
    """The contents of a cell; the cell itself if its variable is not bound."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _parts(value: Any) -> tuple[Sequence[Any], Callable[..., Any]]:
    """What a function, method, partial, weak reference or tuple refers to; how to make
    another.
    """
    if (
        type(value) in weakref.ProxyTypes
    ):  # first: it claims to be of its object's class
        return _of_proxy(value), weakref.proxy
    if isinstance(value, types.MethodType):  # its function may be a closure
        return (value.__func__, value.__self__), types.MethodType
    if type(value) in (weakref.ref, weakref.WeakMethod):
        return (value(),), type(value)
    if type(value) is weakref.WeakKeyDictionary:

        def with_data(data: Any) -> Any:
            made: Any = weakref.WeakKeyDictionary()
            made.data = data  # refers to its keys weakly, as the original
            return made

        return (vars(value)["data"],), with_data
    if isinstance(value, _CACHED_FUNCTION):  # each copy has a cache of its own
        return (value.__wrapped__,), functools.lru_cache(**value.cache_parameters())
    if type(value) is functools.partial:

        def bind(function: Any, *parts: Any) -> Any:
            args, rest = parts[: len(value.args)], parts[len(value.args) :]
            return functools.partial(
                function, *args, **dict(zip(value.keywords, rest, strict=True))
            )

        return (value.func, *value.args, *value.keywords.values()), bind
    if isinstance(value, tuple):
        kind: Any = type(value)
        return value, kind if hasattr(value, "_fields") else lambda *parts: kind(parts)
    if isinstance(value, types.FunctionType):  # copied by ``ModuleCopy``
        cells = map(contents, value.__closure__ or ())
        return (
            *cells,
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ), type
    return (), type


def _of_proxy(proxy: Any) -> Sequence[Any]:
    """The object of a weak proxy; nothing if the object is gone."""
    try:
        return (proxy.__repr__.__self__,)  # a method that the proxy looks up there
    except ReferenceError:
        return ()


def module_of(function: Any) -> nn.Module | None:
    """The module that ``function`` is, or is a method of; ``None`` if there is none."""
    owner = (
        function
        if isinstance(function, nn.Module)
        else getattr(function, "__self__", None)
    )
    return owner if isinstance(owner, nn.Module) else None


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
        if type(value) in _PLAIN:
            continue
        if type(value) not in _REGISTRIES:
            return False
        entries = value.values() if isinstance(value, dict) else value
        if not {None}.issuperset(entries):
            return False
    return True
