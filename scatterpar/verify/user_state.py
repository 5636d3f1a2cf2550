"""Save and restore state that user code may change; find state that each micro-batch moves.

Saved is what the criterion, ``count=``, hooks, ``collate`` and the module can write: attributes,
containers, closures, globals, arrays, generators, buffers, and other tensors up to 64 MiB.
"""

from __future__ import annotations

import pickle
import queue
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.transfers import to_host, write
from scatterpar.replicas.broadcast import version
from scatterpar.replicas.buffers import RUNNING
from scatterpar.replicas.module_copy import ModuleContents, Snapshot, contents
from scatterpar.replicas.replicas import Replica
from scatterpar.step.criterion_closure import closure_and_globals
from scatterpar.wrapper import Wrapper

_MOST = 1000  # entries of a container; longer ones are data
_MOST_BYTES = 2**26  # of tensors that are no buffers; larger ones are data
# Modules that are not the user's code.
_FOREIGN = {"torch", "numpy", "scatterpar", *sys.stdlib_module_names} - {"__main__"}
_LOCKS = {"_thread", "threading", "queue"}
# Classes that are never followed, by the end of a base's name: they lead to data.
_DATA = ("Dataset", "DataLoader", "DataModule", "Sampler", "Trainer", "Optimizer", "IOBase")
# Classes that override this compute their items, such as a library's table of classes.
_GETTERS = dict.__getitem__, list.__getitem__, deque.__getitem__, None
_PLAIN = {bool, int, float, str, types.NoneType}
_OF_TORCH = vars(nn.Module()).keys()

State = dict[str, tuple[Any, int]]  # values by name, with the versions of tensors
Variable = tuple[Callable[[], Any], Callable[[Any], object]]  # how to get and set it


class UserState:
    """The state that ``roots`` lead to, and all random generators: saved now, to be restored.

    Roots lead to modules and functions, what these close over, globals that they name, objects,
    their classes' attributes, containers, arrays. Left alone: containers of more than 1000 entries,
    objects that hold a lock, data sets, loaders, trainers, files, objects of libraries. Values of
    parameters are saved only with ``parameters``, of tensors above 64 MiB never.

    ``drawn`` says whether a generator had moved at a ``restore``.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        devices: Sequence[torch.device] = (),
        *,
        parameters: bool = False,
    ) -> None:
        self.drawn = False
        reach = _Reach(roots)
        self._snapshot = Snapshot([*reach.containers, *(own for _, own in reach.attributes)])
        found = {key: tensor for key, tensor in reach.tensors.items() if _has_values(tensor)}
        few = _MOST_BYTES
        buffers = {id(t) for m in reach.modules.values() for t in m._buffers.values()}
        # Each with its memory, which forward passes may exchange, and its values.
        self._memories = [(t, t.data) for t in found.values() if _is_dense(t)]
        self._values: list[tuple[Tensor, Tensor]] = []
        self._versions: list[tuple[Tensor, int]] = []
        for key, tensor in found.items():
            if key not in reach.weights and key not in buffers:
                few -= tensor.numel() * tensor.element_size()
            if parameters if key in reach.weights else key in buffers or few >= 0:
                self._values.append((tensor, tensor.detach().clone()))
            elif key not in reach.weights:
                self._versions.append((tensor, version(tensor)))
        self._arrays = [(array, array.copy()) for array in reach.arrays]
        self._variables = [(put, get, get()) for get, put in reach.variables]
        generators = [*_generators(devices), *reach.generators]
        self._states = [(put, get, get()) for get, put in generators]

    def is_changed(self) -> bool:
        """Whether objects, containers or variables differ from their saved contents."""
        moved = any(get() is not value for _, get, value in self._variables)
        return moved or not self._snapshot.unchanged()

    def lost(self) -> list[str]:
        """Names of the large tensors that were written, whose values are not saved."""
        written = [t for t, before in self._versions if version(t) != before]
        return [f"a tensor of shape {tuple(tensor.shape)}" for tensor in written]

    def restore(self, generators_only: bool = False) -> None:
        """Restore everything that has changed, or only the generators."""
        for put, get, state in self._states:
            if not _same(get(), state):
                put(state)
                self.drawn = True
        if generators_only:
            return
        for tensor, memory in self._memories:
            if not tensor.is_set_to(memory):
                tensor.data = memory
        for tensor, value in self._values:
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


def _has_values(tensor: Tensor) -> bool:
    """Whether the tensor's values can be read."""
    try:
        return tensor.is_leaf is not None and not tensor.is_meta
    except RuntimeError:  # a chunk of a weight that was written since: torch refuses each question
        return False


def _is_dense(tensor: Tensor) -> bool:
    of_torch = Tensor, nn.Parameter, nn.Buffer
    return type(tensor) in of_torch and tensor.layout == torch.strided and tensor.is_leaf


class _Reach(ModuleContents):
    """What modules hold, and what functions and objects of the user's lead to."""

    def __init__(self, roots: Iterable[Any]) -> None:
        roots = [*roots]
        self._own = {id(one) for root in roots for one in (root, getattr(root, "__self__", None))}
        self.variables: list[Variable] = []
        self.generators: list[Variable] = []
        self.arrays: list[Any] = []  # NumPy's
        super().__init__(roots)
        for module in [*self.modules.values()]:
            file = getattr(sys.modules.get(type(module).__module__), "__file__", "")
            if not _is_foreign(type(module).__module__) and "-packages" not in str(file):
                self._visit_class(module)

    def _visit(self, value: Any) -> None:
        if type(value) in _PLAIN or (id(value) not in self._own and _is_data(value)):
            return
        if isinstance(value, Wrapper):  # an engine restores its own state
            value = value.module
        if isinstance(value, (dict, list, deque, set)):
            is_plain = getattr(type(value), "__getitem__", None) in _GETTERS
            if is_plain and id(value) not in self._seen and len(value) <= _MOST:
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
        # Classes are asked: a library that is loaded by name has attributes of any name.
        elif hasattr(type(value), "bit_generator"):  # NumPy's
            source = value.bit_generator
            self.generators.append((lambda: source.state, partial(setattr, source, "state")))
        elif hasattr(type(value), "__array_interface__") and value.flags.writeable:
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
        members = [each for base in kind.__mro__ for each in vars(base).values()]
        for slot in members:
            if isinstance(slot, types.MemberDescriptorType) and hasattr(value, slot.__name__):
                self.variables.append((partial(slot.__get__, value), partial(slot.__set__, value)))
                self._visit(slot.__get__(value))
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


def _is_data(value: Any) -> bool:
    """Whether ``value`` is of a class that leads to data: data sets, loaders, trainers, files."""
    if isinstance(value, (Tensor, nn.Module, type)):
        return False
    return any(base.__name__.endswith(_DATA) for base in type(value).__mro__)


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


def state_of(replicas: Sequence[Replica], copy: bool) -> State:
    """Each buffer, and each attribute with a number or tensor, except running statistics."""
    found = {}
    for root in (replica.root for replica in replicas):
        if not isinstance(root, nn.Module):
            continue
        for prefix, module in root.named_modules():
            own = vars(module)
            left_out = RUNNING if isinstance(module, nn.modules.batchnorm._BatchNorm) else ()
            named = [("buffer", n, v) for n, v in own["_buffers"].items() if n not in left_out]
            named += [("attribute", n, v) for n, v in own.items() if n not in _OF_TORCH]
            for kind, name, value in named:
                place = f"the {kind} {f'{prefix}.' * bool(prefix) + name!r}"
                if isinstance(value, Tensor) and value.grad_fn is None:
                    found[place] = value.clone() if copy else value, version(value)
                elif type(value) in (int, float):
                    found[place] = value, 0
    return found


def moved_between(states: Sequence[State]) -> list[str]:
    """The names of state that the second part of a look has changed, after the first.

    What only the first part changes, such as a table that it fills, is not found. If both parts
    began in the same state: what they have left different.
    """
    first, second = (*states, {}, {})[:2]
    found = []
    for name, (one, version_of_one) in first.items():
        other, version_of_other = second.get(name, (None, 0))
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            same = version_of_one == version_of_other  # each pass may compute an equal tensor anew
            same = same if one is other else torch.equal(*to_host([one, other]))
            found += [] if same else [name]
        elif type(one) is type(other) and one != other:
            found.append(name)
    return found
