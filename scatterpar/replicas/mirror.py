"""What a module holds, snapshots of it, and copies that share nothing they could fight over.

A module is more than parameters: attributes, lists of its own submodules, hooks, a
``forward`` that is a bound method of itself. ``Survey`` finds all of it, ``Snapshot`` tells
whether any of it was rebound since, and ``Mirror`` makes a replica of it on the protocol of
``torch.nn.parallel`` (``Module._replicate_for_data_parallel``).

``module.forward = lambda x: old(x)`` runs the user's module, whoever calls it. So functions that
close over what is replicated get twins: the same code, and cells that lead to the replica. Cells
that lead elsewhere stay shared, so that a list that hooks fill is the user's.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.replicas.compiled import Compiler, How, unwrapped
from scatterpar.replicas.kinds import (
    assembled,
    is_script,
    is_sparse,
    new_like,
    pieces_of,
    rebind_script,
    script_tensors,
    slots,
)
from scatterpar.report import warn
from scatterpar.torch_private import is_compiled_module

_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)

_SWITCHES = {bool, str, bytes, type(None)}

_PLAIN = _SWITCHES | {int, float, complex}

Turned = tuple[int, Any, Any]  # the number of a container, a key, the value there


class Survey:
    """Everything that ``roots`` hold: modules, containers and tensors, each once.

    Modules are followed through attributes and plain containers too, so that a list of
    blocks that was never registered is replicated like the rest. Tensors are those on ``device``,
    where it is given.
    """

    def __init__(self, roots: Iterable[Any], device: torch.device | None = None) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.containers: list[Any] = []
        self.tensors: dict[int, Tensor] = {}
        self.compiled: dict[int, tuple[nn.Module, How]] = {}  # what torch.compile wrapped
        self.sparse: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}
        self.told: set[str] = set()  # what the user was warned of
        self._seen: set[int] = set()
        self._device = device
        self.roots = tuple(roots)
        for root in self.roots:
            self._visit(root)

    def _visit(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._visit_tensor(value)
        elif is_script(value):
            if id(value) not in self.modules:
                self.modules[id(value)] = value
                for tensor in script_tensors(value).values():
                    self._visit_tensor(tensor)
        elif is_compiled_module(value):
            original, how = unwrapped(value)
            assert how is not None
            self.compiled[id(value)] = self.compiled[id(original)] = (original, how)
            self._visit(original)
        elif isinstance(value, nn.Module):
            if id(value) not in self.modules:
                self.modules[id(value)] = value
                self._visit_container(vars(value))
                self._visit(tuple(inside for _, inside in slots(value)))
        elif type(value) in _CONTAINERS:
            if id(value) not in self._seen:
                self._visit_container(value)
        elif isinstance(value, tuple):
            for item in value:
                self._visit(item)
        elif type(value) is functools.partial:
            self._visit((value.func, value.args, *value.keywords.values()))
        elif isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            self._visit(value.__self__)

    def _visit_tensor(self, tensor: Tensor) -> None:
        if is_sparse(tensor):
            if id(tensor) not in self.sparse:
                pieces = pieces_of(tensor)
                self.sparse[id(tensor)] = (tensor, pieces)
                for piece in pieces:
                    self._visit_tensor(piece)
        elif self._device in (None, tensor.device):
            self.tensors[id(tensor)] = tensor

    @property
    def attributes(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """What Python keeps on each tensor, such as ``bias.scale = 5.0``, where copies have it too.

        Not what wrappers keep there: those are the tensors that they are made of.
        """
        tensors = [*self.tensors.values(), *(tensor for tensor, _ in self.sparse.values())]
        return [
            (tensor, vars(tensor))
            for tensor in tensors
            if isinstance(tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__")
        ]

    def _visit_container(self, container: Any) -> None:
        self._seen.add(id(container))
        self.containers.append(container)
        # A list of them: looking at one, such as a module that imports itself late, may add some.
        for item in [*(container.values() if isinstance(container, dict) else container)]:
            self._visit(item)


class Snapshot:
    """What was in some containers, by identity, and whether it still is.

    The comparison runs in C loops: a tree of 287 modules has eight thousand entries.
    """

    def __init__(self, containers: Iterable[Any]) -> None:
        containers = list(enumerate(containers))
        self._empty = {i: c for i, c in containers if not c}
        self._dicts = {i: c for i, c in containers if c and isinstance(c, dict)}
        self._sequences = [c for _, c in containers if c and not isinstance(c, dict)]
        self._saved_dicts = {i: dict(c) for i, c in self._dicts.items()}
        self._saved_sequences = [list(c) for c in self._sequences]
        self._remember()

    def _remember(self) -> None:
        saved = self._saved_dicts.values()
        self._sizes = list(map(len, saved))
        self._keys = list(chain.from_iterable(saved))
        self._are_names = {str}.issuperset(map(type, self._keys))
        self._values = list(chain.from_iterable(map(dict.values, saved)))
        self._flags: tuple[Any, ...] | None = None

    def unchanged(self) -> bool:
        """Whether every container holds the same objects under the same keys."""
        now = self._dicts.values()
        return (
            not any(self._empty.values())
            and list(map(len, now)) == self._sizes
            and all(map(is_, chain.from_iterable(map(dict.values, now)), self._values))
            and self._keys_unchanged()
            and self._sequences_unchanged()
        )

    def _keys_unchanged(self) -> bool:
        keys = chain.from_iterable(self._dicts.values())
        if self._are_names:  # whose comparison is quick, and calls nobody else's
            return list(keys) == self._keys
        return all(map(is_, keys, self._keys))

    @property
    def flags(self) -> tuple[Any, ...]:
        """The values that may be switches, in order: plain ones that are no numbers."""
        if self._flags is None:
            self._flags = tuple(v for v in self._values if type(v) in _SWITCHES)
        return self._flags

    def restore(self) -> None:
        """Put back whatever the containers held, but for what torch's compiler notes there."""
        for i in [i for i, container in self._empty.items() if container]:
            if marks := _marks_in(self._empty[i]):
                self._dicts[i], self._saved_dicts[i] = self._empty.pop(i), marks
            else:
                self._empty[i].clear()
        for i, container in self._dicts.items():
            saved = self._saved_dicts[i]
            if len(container) != len(saved) or not all(
                map(is_, container.values(), saved.values())
            ):
                saved |= _marks_in(container)
                container.clear()
                container.update(saved)
        self._remember()
        for container, items in zip(self._sequences, self._saved_sequences, strict=True):
            if len(container) != len(items) or not all(map(is_, container, items)):
                container.clear()
                _refill(container, items)

    def turned(self) -> list[Turned] | None:
        """Plain values that were exchanged for others; ``None`` if anything else changed."""
        if any(self._empty.values()) or not self._sequences_unchanged():
            return None
        found = []
        for i, now in self._dicts.items():
            saved = self._saved_dicts[i]
            if list(now) != list(saved):
                return None
            found += [(i, key, value) for key, value in now.items() if value is not saved[key]]
        values = [value for i, key, now in found for value in (now, self._saved_dicts[i][key])]
        return found if _PLAIN.issuperset(map(type, values)) else None

    def turn(self, found: Iterable[Turned]) -> None:
        """Exchange plain values in the containers, and in what is remembered of them."""
        for i, key, value in found:
            self._dicts[i][key] = self._saved_dicts[i][key] = value
        self._remember()

    def _sequences_unchanged(self) -> bool:
        return all(
            len(container) == len(saved) and all(map(is_, container, saved))
            for container, saved in zip(self._sequences, self._saved_sequences, strict=True)
        )


def _marks_in(container: Any) -> dict[str, Any]:
    """What torch's compiler notes down on tensors."""
    items = container.items() if isinstance(container, dict) else ()
    return {k: v for k, v in items if isinstance(k, str) and k.startswith("_dynamo")}


class Mirror:
    """A copy of what a survey found, with tensors of its own.

    Modules, containers, bound methods, partials, weak references and functions that close over any
    of these are made anew and point to each other inside the copy; everything else is shared with
    the original. ``tensors`` has the copy's tensor for the ``id`` of each original one.
    """

    def __init__(
        self, survey: Survey, tensors: dict[int, Tensor], compiler: Compiler | None = None
    ) -> None:
        self._survey = survey
        self._compiler = compiler or Compiler()
        self._made: dict[int, Any] = dict(tensors)
        self._inside = {*tensors, *survey.sparse, *survey.compiled, *map(id, survey.containers)}
        self._inside.update(survey.modules)
        # Of the originals, and what is in them: the copies' functions do not see that change.
        self.cells: list[tuple[types.CellType, Any]] = []
        self._kept: list[Any] = []  # so that no id in _made is used again
        self.sparse: list[Tensor] = []
        self._scripts: list[tuple[nn.Module, dict[str, Tensor]]] = []
        self._slots: list[tuple[nn.Module, types.MemberDescriptorType, Any]] = []
        for original, pieces in survey.sparse.values():
            own = assembled(original, [self._made.get(id(piece), piece) for piece in pieces])
            self._made[id(original)] = own
            self.sparse.append(own)
        for module in survey.modules.values():
            self.of(module)
        self.rebind()
        self.containers = [self.of(container) for container in survey.containers]
        for original, attributes in survey.attributes:
            own = vars(self.of(original))
            for name, value in attributes.items():
                own[name] = self.of(value) if isinstance(value, (Tensor, nn.Module)) else value
            self.containers.append(own)

    def of(self, value: Any) -> Any:
        """The copy's counterpart of ``value``, or ``value`` itself where it is shared."""
        if type(value) in _PLAIN:
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        if is_compiled_module(value) and id(value) in self._survey.compiled:
            return self.of(self._survey.compiled[id(value)][0])
        if isinstance(value, nn.Module):
            return self._module(value) if id(value) in self._survey.modules else value
        if type(value) in _CONTAINERS:
            return self._container(value)
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            if all(map(is_, items, value)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if type(value) is functools.partial:
            return functools.partial(
                self.of(value.func),
                *(self.of(item) for item in value.args),
                **{key: self.of(item) for key, item in value.keywords.items()},
            )
        if type(value) is weakref.ref:
            target = value()
            own = self.of(target)
            return value if own is target else weakref.ref(own)
        return value

    def rebind(self) -> None:
        """Undo what a forward pass rebound where no snapshot sees it."""
        for script, tensors in self._scripts:
            rebind_script(script, tensors)
        for replica, slot, value in self._slots:
            slot.__set__(replica, value)

    def _module(self, module: nn.Module) -> nn.Module:
        replica = new_like(module)
        self._made[id(module)] = replica
        if is_script(module):
            tensors = script_tensors(module)
            self._scripts.append((replica, {path: self.of(t) for path, t in tensors.items()}))
            return replica
        original, state = vars(module), vars(replica)
        self._made[id(original)] = state
        for name, item in state.items():
            # The protocol copies some containers; the mirror copies all of them, from the source.
            source = original[name] if type(item) in _CONTAINERS and name in original else item
            state[name] = self.of(source)
        for slot, value in slots(module):
            self._kept.append(value)
            self._slots.append((replica, slot, self.of(value)))
        _, how = self._survey.compiled.get(id(module), (None, None))
        is_root = any(module is root for root in self._survey.roots)
        state["_compiled_call_impl"] = self._compiler.call_of(module, replica, is_root, how)
        return replica

    def _function(self, function: types.FunctionType) -> Any:
        """A twin of a function that leads to what is replicated: there it leads to the copy."""
        of_file = function.__globals__
        for name in function.__code__.co_names:
            if name in of_file and self._leads(of_file[name]):
                self._tell(function, name)
        if not self._leads(function):
            return function
        self._kept.append(function)
        cells = function.__closure__ or ()
        new = tuple(types.CellType() if self._leads(contents(cell)) else cell for cell in cells)
        twin: Any = types.FunctionType(function.__code__, of_file, closure=new)
        self._made[id(function)] = twin  # before its cells are filled: it may call itself
        defaults, named = function.__defaults__, function.__kwdefaults__
        twin.__defaults__ = defaults and tuple(map(self._led, defaults))
        twin.__kwdefaults__ = named and {name: self._led(value) for name, value in named.items()}
        for name in functools.WRAPPER_ASSIGNMENTS:
            setattr(twin, name, getattr(function, name))
        vars(twin).update(vars(function))
        for cell, own in zip(cells, new, strict=True):
            if own is not cell:
                own.cell_contents = self.of(cell.cell_contents)
                self.cells.append((cell, cell.cell_contents))
        return twin

    def _leads(self, value: Any, seen: set[int] | None = None) -> bool:
        """Whether ``value`` is inside of what is replicated, or something that leads there."""
        if id(value) in self._inside:
            return True
        seen = set() if seen is None else seen
        if id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._leads(one, seen) for one in _next(value))

    def _led(self, value: Any) -> Any:
        return self.of(value) if self._leads(value) else value

    def _tell(self, function: types.FunctionType, name: str) -> None:
        text = (
            f"the function {function.__qualname__}, which the module holds, names {name!r} of "
            f"its file: replicas that call it use the user's own module there, and what it "
            f"writes or reads there is not the replica's; define it inside a function, so that "
            f"it closes over {name!r}, or bind {name!r} with functools.partial"
        )
        if text not in self._survey.told:
            self._survey.told.add(text)
            warn(text)

    def _container(self, value: Any) -> Any:
        self._kept.append(value)
        made = self._made[id(value)] = value.copy()
        if value:
            made.clear()
            if isinstance(value, dict):
                made.update({key: self.of(item) for key, item in value.items()})
            else:
                _refill(made, [self.of(item) for item in value])
        return made


def _refill(container: Any, items: list[Any]) -> None:
    (container.update if isinstance(container, set) else container.extend)(items)


def contents(cell: types.CellType) -> Any:
    """What is in a cell; the cell itself for a variable that is not bound."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _next(value: Any) -> Iterable[Any]:
    """What a function, or something like one, leads to."""
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if type(value) is weakref.ref:
        return (value(),)
    if type(value) is functools.partial:
        return (value.func, *value.args, *value.keywords.values())
    if type(value) is tuple:
        return value
    if isinstance(value, types.FunctionType):
        cells = map(contents, value.__closure__ or ())
        return (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return ()


def owner_of(function: Any) -> nn.Module | None:
    """The module that ``function`` is, or is a method of."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def holder_of(function: Any) -> Any:
    """What is replicated for the sake of ``function``; ``None`` where nothing is.

    The module that it is, or is a method of; or a partial itself, with what it binds.
    """
    if type(function) is not functools.partial:
        return owner_of(function)
    survey = Survey((function,))
    return function if survey.tensors or survey.modules else None
