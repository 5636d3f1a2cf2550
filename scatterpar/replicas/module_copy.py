"""Copy a module, with all that it holds, for a replica.

With the protocol of ``torch.nn.parallel`` (``Module._replicate_for_data_parallel``).

A function that closes over the module, such as ``module.forward = lambda x: old(x)``,
would run the user's module in every replica. So it is copied: the same code, with
closure cells that refer to the replica. Cells with other contents stay shared: a hook
that appends to a list fills the user's list.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

from scatterpar.errors import warn
from scatterpar.replicas.compiled import Compiler
from scatterpar.replicas.module_contents import (
    CONTAINERS,
    DICTIONARIES,
    ModuleContents,
)
from scatterpar.replicas.quantised import composite_like, is_composite
from scatterpar.replicas.references import contents, parts_of
from scatterpar.replicas.shallow_copy import new_like
from scatterpar.replicas.snapshot import PLAIN, refill
from scatterpar.torch_private import is_compiled_module, unwrapped


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
        if type(value) in PLAIN:
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if id(value) not in self._replicated and not self._is_keyed(value):
            return self._remade(value)
        if is_compiled_module(value):
            return self.copy_of(unwrapped(value)[0])
        if isinstance(value, nn.Module):
            replica: nn.Module = self._fill(value, new_like(value))
            if self._compiler is not None and id(value) in self._found.compiled:
                _, compile_fn = self._found.compiled[id(value)]
                call = self._compiler.compiled_call(value, replica, compile_fn)
                vars(replica)["_compiled_call_impl"] = call
            return replica
        if type(value) in CONTAINERS:
            made = self._copies[id(value)] = value.copy()
            made.clear()
            if isinstance(value, dict):
                refill(
                    made, [(self._key(k), self.copy_of(v)) for k, v in value.items()]
                )
            elif isinstance(value, set):
                refill(made, [self._key(item) for item in value])
            else:
                refill(made, [self.copy_of(item) for item in value])
            return made
        return self._fill(value, copy.copy(value))  # a state

    def _remade(self, value: Any) -> Any:
        """A value like ``value`` made of copies, if any of its parts has a copy."""
        parts = parts_of(value)
        originals = parts.made_of()
        copies = [self.copy_of(original) for original in originals]
        if parts.make is None or all(map(is_, copies, originals)):
            return value
        return parts.make(*copies)

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
        if type(value) not in DICTIONARIES:
            return False
        key = next(iter(value), None)  # all are of one kind
        if type(key) in PLAIN:
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
                if type(item) in CONTAINERS and name in attributes
                else item
            )
            state[name] = self.copy_of(source)
        return made

    def _function(self, function: types.FunctionType) -> Any:
        """The function, or a copy that refers to copies if it refers to replicated
        objects.
        """
        for name, value in parts_of(function).file_globals.items():
            if self._refers(value):
                warn(
                    f"the function {function.__qualname__}, which the module holds, "
                    f"names {name!r} of its file: replicas that call it use the user's "
                    "own module there; define it inside a function, so that it closes "
                    f"over {name!r}, or bind {name!r} with functools.partial"
                )
        if not self._refers(function):
            return function
        cells = function.__closure__ or ()
        new = tuple(
            types.CellType() if self._refers(contents(cell)) else cell for cell in cells
        )
        copied: Any = types.FunctionType(
            function.__code__, function.__globals__, closure=new
        )
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
        parts = parts_of(value)
        referents = [*parts.made_of(), *parts.closure.values()]
        return any(self._refers(referent, seen) for referent in referents)
