"""Save and restore state that user code may change: attributes, containers, generators."""

from __future__ import annotations

import pickle
import queue
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.transfers import write
from scatterpar.replicas.checks import slots
from scatterpar.replicas.module_copy import ModuleContents, Snapshot, contents
from scatterpar.replicas.wrapper import Wrapper
from scatterpar.step.criterion_closure import closure_and_globals

_MOST = 1000  # entries of a container; longer ones are data
# Modules that are not the user's code.
_FOREIGN = {"torch", "numpy", "scatterpar", *sys.stdlib_module_names} - {"__main__"}
_LOCKS = {"_thread", "threading", "queue"}

Variable = tuple[Callable[[], Any], Callable[[Any], object]]  # how to get and set it


class preserve_user_state:
    """Save state on construction; restore it after the body and whenever ``restore`` is called.

    The state is what ``roots`` refer to, and all random generators: modules and functions, what
    these close over, globals that they name, objects, their classes' attributes, containers,
    arrays. With ``modules_only``, functions and objects are not followed. Left alone: containers of
    more than 1000 entries, objects that hold a lock, objects of libraries.

    ``drawn`` says whether a generator had moved at a ``restore``. ``tensors`` are those that are
    restored; parameters are among them if ``parameters``.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        devices: Sequence[torch.device] = (),
        *,
        parameters: bool = False,
        modules_only: bool = False,
    ) -> None:
        self.drawn = False
        reach = _Reach(roots, modules_only)
        self._snapshot = Snapshot(reach.containers)
        found = reach.tensors.values()
        self.tensors = [t for t in found if parameters or not isinstance(t, nn.Parameter)]
        self._values = [tensor.detach().clone() for tensor in self.tensors]
        self._arrays = [(array, array.copy()) for array in reach.arrays]
        self._variables = [(put, get, get()) for get, put in reach.variables]
        generators = [*_generators(devices), *reach.generators]
        self._states = [(put, get, get()) for get, put in generators]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def is_changed(self) -> bool:
        """Whether objects, containers or variables differ from their saved contents."""
        moved = any(get() is not value for _, get, value in self._variables)
        return moved or not self._snapshot.unchanged()

    def restore(self) -> None:
        """Restore everything that has changed."""
        for tensor, value in zip(self.tensors, self._values, strict=True):
            if not same_bits(tensor, value):
                with torch.no_grad():
                    write(tensor.detach(), value)
        for array, values in self._arrays:
            array[...] = values
        if not self._snapshot.unchanged():
            self._snapshot.restore()
        for put, get, value in self._variables:
            if get() is not value:
                put(value)
        for put, get, state in self._states:
            if not _same(get(), state):
                put(state)
                self.drawn = True


class _Reach(ModuleContents):
    """What modules hold, and what functions and objects of the user's lead to."""

    def __init__(self, roots: Iterable[Any], modules_only: bool) -> None:
        self._modules_only = modules_only
        self.variables: list[Variable] = []
        self.generators: list[Variable] = []
        self.arrays: list[Any] = []  # NumPy's
        super().__init__(roots)

    def _visit(self, value: Any) -> None:
        if self._modules_only:
            super()._visit(value)
            return
        if isinstance(value, Wrapper):  # an engine restores its own state
            value = value.module
        if isinstance(value, (dict, list, deque, set)):
            if id(value) not in self._seen and len(value) <= _MOST:
                self._visit_container(value)
            return
        super()._visit(value)
        if isinstance(value, (Tensor, nn.Module, type, tuple)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        home = getattr(value, "__module__", None) or type(value).__module__
        if isinstance(value, types.MethodType):
            self._visit(value.__func__)  # its object is visited above
        elif isinstance(value, random.Random):
            self.generators.append((value.getstate, value.setstate))
        elif isinstance(value, torch.Generator):
            self.generators.append((value.get_state, value.set_state))
        elif hasattr(value, "bit_generator"):  # NumPy's
            source = value.bit_generator
            self.generators.append((lambda: source.state, partial(setattr, source, "state")))
        elif hasattr(value, "__array_interface__") and value.flags.writeable:
            self.arrays.append(value)
        elif isinstance(value, queue.Queue):
            self._visit(value.queue)
        elif not _is_foreign(home):
            own = getattr(value, "__dict__", {})
            if isinstance(value, types.FunctionType):
                self._visit_function(value)
            # An object that holds a lock is shared with other threads: left alone.
            elif _LOCKS.isdisjoint({type(each).__module__ for each in own.values()}):
                self._visit(own)
                self._visit_class(value)

    def _visit_class(self, value: Any) -> None:
        kind = type(value)
        for slot, inside in slots(value):
            self.variables.append((partial(slot.__get__, value), partial(slot.__set__, value)))
            self._visit(inside)
        for name, item in [*vars(kind).items()]:
            if isinstance(item, types.FunctionType):
                self._visit(item)
            if name[:2] != "__" and not (callable(item) or hasattr(item, "__get__")):
                self.variables.append((partial(getattr, kind, name), partial(setattr, kind, name)))
                self._visit(item)

    def _visit_function(self, function: types.FunctionType) -> None:
        own, of_file = closure_and_globals(function)
        space = function.__globals__
        # functools.wraps gives a library's wrapper the user's __module__.
        if _is_foreign(space.get("__name__")):
            of_file = {}
        for cell in function.__closure__ or ():
            if contents(cell) is not cell:
                put = partial(setattr, cell, "cell_contents")
                self.variables.append((partial(contents, cell), put))
        for name, value in of_file.items():
            if not isinstance(value, (types.ModuleType, type, types.FunctionType)):
                self.variables.append((partial(space.get, name), partial(space.__setitem__, name)))
        self._visit((*own.values(), *of_file.values(), vars(function)))


def _is_foreign(module: Any) -> bool:
    if not isinstance(module, str):
        return True
    is_integration = module.startswith("scatterpar.integrations")  # closures hold user modules
    return module.split(".")[0] in _FOREIGN and not is_integration


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return pickle.dumps(one) == pickle.dumps(other)  # NumPy's have arrays in them


def _generators(devices: Sequence[torch.device]) -> Iterator[Variable]:
    """The random generators of torch, whose states are tensors, of Python and of NumPy."""
    yield torch.default_generator.get_state, torch.default_generator.set_state
    for device in {device for device in devices if device.type != "cpu"}:
        module = torch.get_device_module(device)
        yield partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
    yield random.getstate, random.setstate
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield numpy.get_state, numpy.set_state
