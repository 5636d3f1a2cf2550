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
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from scatterpar.batch.nested import PLAIN
from scatterpar.errors import warn
from scatterpar.objects import references
from scatterpar.objects.quantised import composite_like, is_composite
from scatterpar.objects.references import MUTABLE_CONTAINERS, parts_of
from scatterpar.objects.snapshot import entries_of, refill
from scatterpar.replicas.compiled import Compiler
from scatterpar.replicas.module_contents import ModuleContents
from scatterpar.replicas.shallow_copy import new_like
from scatterpar.torch_private.compiler import is_compiled_module, unwrapped


class ModuleCopy:
    """A copy of ``ModuleContents``, with other tensors.

    Modules and containers are copied. So are tuples, bound methods, partials, weak
    references and functions that refer to any of these. The copies refer to each other.
    Everything else is shared with the original.

    Args:
        contents: of the user's module.
        tensors: the copy's, in the order of the contents' tensors.
        compiler: makes the calls of compiled modules; ``None`` if none is compiled.

    Attributes:
        containers: the copies of the containers, in the order of the contents'.
        root: the copy of the contents' first root.
    """

    def __init__(
        self,
        contents: ModuleContents,
        tensors: Sequence[Tensor],
        compiler: Compiler | None = None,
    ) -> None:
        self._contents = contents
        self._compiler = compiler
        # By the id of the original.
        self._copies: dict[int, Any] = dict(zip(contents.tensors, tensors, strict=True))
        # Weights that consist of other tensors; inner ones come first.
        for original, parts in contents.holders.values():
            if is_composite(original):
                copies = [self._copies.get(id(part), part) for part in parts]
                self._copies[id(original)] = composite_like(original, copies)
        for value in (*contents.modules.values(), *contents.states.values()):
            self.copy_of(value)
        # After the modules, whose copies these attributes may be.
        for tensor in contents.tensors.values():
            self._copy_attributes(tensor)
        for holder, _ in contents.holders.values():
            self._copy_attributes(holder)
        self.containers = [self.copy_of(container) for container in contents.containers]
        self.root: Any = self.copy_of(contents.roots[0])

    def _copy_attributes(self, tensor: Tensor) -> None:
        """Give a tensor's copy the attributes that are replicated with the tensor."""
        attributes = vars(tensor)
        if not self._contents.is_replicated(attributes):
            return
        copied = vars(self._copies[id(tensor)])
        self._copies[id(attributes)] = copied
        for name, attribute in attributes.items():
            # Not ``copy_of``: what only a tensor refers to is shared.
            copied[name] = self._copies.get(id(attribute), attribute)

    def copy_of(self, value: Any) -> Any:
        """The copy of ``value``, or ``value`` itself if it is shared."""
        if type(value) in PLAIN:
            return self._plain(value)
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if not self._contents.is_replicated(value):
            return self._remade(value)
        if is_compiled_module(value):
            return self.copy_of(unwrapped(value)[0])
        if isinstance(value, nn.Module):
            return self._module(value)
        if type(value) in MUTABLE_CONTAINERS:
            return self._container(value)
        return self._fill(value, copy.copy(value))  # a state of a quantised weight

    def refill(self, number: int, saved: Any, new: Mapping[Any, Any]) -> None:
        """Write what a container refers to now into the container's copy.

        Args:
            number: the container's.
            saved: what the container had when its copy was filled.
            new: the copy's values for some of the container's keys or positions.

        A value that the container had already stays the copy's. Others are shared.
        """
        container = self._contents.containers[number]
        copied = self.containers[number]
        if isinstance(container, set):  # its entries have no places
            refill(copied, map(self.copy_of, list(container)))
            return
        present = dict(entries_of(copied))
        kept: dict[int, Any] = {}
        for key, value in entries_of(saved):
            kept[id(value)] = present.get(self.copy_of(key), value)
        entries: dict[Any, Any] = {}
        for key, value in list(entries_of(container)):
            copied_key = self.copy_of(key)
            if key in new:
                entries[copied_key] = new[key]
            elif id(value) in kept and type(value) not in PLAIN:
                entries[copied_key] = kept[id(value)]
            else:
                entries[copied_key] = self.copy_of(value)
        if not isinstance(container, dict):
            refill(copied, entries.values())
            return
        for key in copied.keys() - entries.keys():
            del copied[key]
        for key, value in entries.items():
            # A copy runs by itself whatever runs the calls of the original.
            if key != "_compiled_call_impl" and copied.get(key, container) is not value:
                copied[key] = value

    def _module(self, module: nn.Module) -> nn.Module:
        replica: nn.Module = self._fill(module, new_like(module))
        # Of an integration: it runs the calls of the user's module.
        vars(replica).pop("_compiled_call_impl", None)
        if self._compiler is not None and id(module) in self._contents.compiled:
            _, compile_fn = self._contents.compiled[id(module)]
            call = self._compiler.compiled_call(module, replica, compile_fn)
            vars(replica)["_compiled_call_impl"] = call
        return replica

    def _container(self, container: Any) -> Any:
        copied = container.copy()  # keeps a ``default_factory`` or ``maxlen``
        copied.clear()
        # Before its entries are copied: one of them may refer to the container.
        self._copies[id(container)] = copied
        if isinstance(container, dict):
            for key, value in container.items():
                copied[self.copy_of(key)] = self.copy_of(value)
        else:
            refill(copied, map(self.copy_of, container))
        return copied

    def _remade(self, value: Any) -> Any:
        """A value like ``value`` made of copies, if any of its parts has a copy."""
        parts = parts_of(value)
        originals = parts.made_of()
        copies = [self.copy_of(original) for original in originals]
        if parts.make is None or all(map(is_, copies, originals)):
            return value
        return parts.make(*copies)

    def _plain(self, value: Any) -> Any:
        """A plain value; of the ``id`` of a module or tensor that of its copy."""
        if type(value) is not int:
            return value
        contents = self._contents
        original = contents.modules.get(value, contents.tensors.get(value))
        return value if original is None else id(self.copy_of(original))

    def _fill(self, original: Any, shallow: Any) -> Any:
        """Fill ``shallow``, a copy of ``original``, with copies of its attributes."""
        attributes = vars(original)
        state = vars(shallow)
        # Before attributes are copied: one of them may refer to the object.
        self._copies[id(original)] = shallow
        self._copies[id(attributes)] = state
        for name, value in state.items():
            source = value
            # The protocol has copied some containers. All are copied here, from the
            # original's, so that everything that refers to one gets the same copy.
            if type(value) in MUTABLE_CONTAINERS and name in attributes:
                source = attributes[name]
            state[name] = self.copy_of(source)
        return shallow

    def _function(self, function: types.FunctionType) -> Any:
        """The function, or a copy that refers to copies if it refers to replicated
        objects.
        """
        for name, value in parts_of(function).file_globals.items():
            if self._contents.leads_here(value):
                _warn_of_global(function, name)
        if not self._contents.leads_here(function):
            return function
        cells = function.__closure__ or ()
        new_cells: list[types.CellType] = []
        for cell in cells:
            is_copied = self._contents.leads_here(references.contents(cell))
            new_cells.append(types.CellType() if is_copied else cell)
        copied: Any = types.FunctionType(
            function.__code__, function.__globals__, closure=tuple(new_cells)
        )
        # Before cells are filled: a function may call itself.
        self._copies[id(function)] = copied
        copied.__defaults__ = self.copy_of(function.__defaults__)
        keywords = function.__kwdefaults__ or {}
        copied.__kwdefaults__ = {
            name: self.copy_of(value) for name, value in keywords.items()
        }
        # ``__wrapped__`` keeps the original alive, so that its id is not used again.
        functools.update_wrapper(copied, function)
        for cell, new_cell in zip(cells, new_cells, strict=True):
            if new_cell is not cell:
                new_cell.cell_contents = self.copy_of(cell.cell_contents)
                self._contents.cells[id(cell)] = cell, cell.cell_contents
        return copied


def _warn_of_global(function: types.FunctionType, name: str) -> None:
    """Warn of a function that names a replicated object of its file.

    A copy of the function has the same globals as the original.
    """
    warn(
        f"the function {function.__qualname__}, which the module holds, uses the "
        f"global variable {name!r}. On every replica this is your own module, and not "
        f"the replica's copy; make {name!r} an argument of the function, and bind it "
        f"with functools.partial(function, {name}={name})"
    )
