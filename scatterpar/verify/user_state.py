"""Save and restore state that user code may change; find state that each micro-batch
moves.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.device_ids import HOST, physical
from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.transfers import write
from scatterpar.replicas.broadcast import version
from scatterpar.replicas.module_copy import ModuleContents, Snapshot, contents
from scatterpar.replicas.replicas import Replica
from scatterpar.step.criterion_closure import MAX_ENTRIES, closure_and_globals
from scatterpar.threads.generators import default_of
from scatterpar.wrapper import Wrapper

_MOST_BYTES = 2**26  # of tensors that are no buffers; larger ones are data
# Modules that are not the user's code.
_FOREIGN = {"torch", "numpy", "scatterpar", *sys.stdlib_module_names} - {"__main__"}
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
_PLAIN = {bool, int, float, str, types.NoneType}
_OF_TORCH = vars(nn.Module()).keys()
_TENSORS = Tensor, nn.Parameter, nn.Buffer

State = dict[str, Any]  # values by name
# How to get and set a variable, its saved value, and whether that is the same as
# another one.
Saved = tuple[
    Callable[[], Any], Callable[[Any], object], Any, Callable[[Any, Any], bool]
]


class UserState(ModuleContents):
    """The state that ``roots`` lead to, and all random generators: saved now, to be
    restored.

    Roots lead to modules and functions, what these close over, globals that they name,
    objects, their classes' attributes, containers, arrays. Left alone: containers of
    more than 1000 entries, objects that hold a lock, data sets, loaders, trainers,
    files, objects of libraries. Values of parameters are saved only with ``weights``,
    of buffers always, of other tensors up to 64 MiB.

    ``drawn`` says whether a generator had moved at a ``restore``.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        devices: Sequence[torch.device] = (),
        *,
        weights: bool = False,
    ) -> None:
        self.drawn, self._generators, self._saved = False, list[Saved](), list[Saved]()
        # of tensors whose values are not saved
        self._versions: list[tuple[Tensor, int]] = []
        self._own = {
            id(one) for root in roots for one in (root, getattr(root, "__self__", None))
        }
        for device in {HOST, *map(physical, devices)}:
            generator = default_of(device)
            self._save_generator(generator.get_state, generator.set_state)
        if numpy := sys.modules.get("numpy.random"):
            self._save_generator(numpy.get_state, numpy.set_state)
        # a bound method leads to Python's generator
        super().__init__((*roots, random.getstate))
        snapshot = Snapshot(self.containers)
        self._save(snapshot.unchanged, lambda _: snapshot.restore())
        buffers = {
            id(buffer) for m in self.modules.values() for buffer in m._buffers.values()
        }
        few = _MOST_BYTES
        for key, tensor in self.tensors.items():
            is_weight, is_buffer = key in self.weights, key in buffers
            # of a chunk of a weight that was written since
            with contextlib.suppress(RuntimeError):
                few -= (
                    0
                    if is_weight or is_buffer
                    else tensor.numel() * tensor.element_size()
                )
                if tensor.is_meta:
                    continue
                is_dense = type(tensor) in _TENSORS and tensor.layout == torch.strided
                # forward passes may exchange its memory
                if is_dense and tensor.is_leaf:
                    get, put = (
                        partial(each, tensor, "data") for each in (getattr, setattr)
                    )
                    self._saved.append((get, put, tensor.data, Tensor.is_set_to))
                if weights if is_weight else is_buffer or few >= 0:
                    now = tensor.detach()
                    self._saved.append(
                        (now.detach, partial(write, now), now.clone(), same_bits)
                    )
                elif not is_weight:
                    self._versions.append((tensor, version(tensor)))

    def is_changed(self) -> bool:
        """Whether objects, containers or variables differ from their saved contents."""
        return any(
            same is is_ and get() is not value for get, _, value, same in self._saved
        )

    def lost(self) -> list[tuple[int, ...]]:
        """The shapes of large tensors that were written, whose values are not saved."""
        return [tuple(t.shape) for t, before in self._versions if version(t) != before]

    @torch.no_grad()
    def restore(self, generators_only: bool = False) -> None:
        """Restore everything that has changed, or only the generators."""
        self.drawn |= _restore(self._generators)
        if not generators_only:
            _restore(self._saved)

    def _save(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._saved.append((get, put, get(), is_))
        self._visit(get())

    def _save_generator(
        self, get: Callable[[], Any], put: Callable[[Any], object]
    ) -> None:
        self._generators.append((get, put, get(), _same))

    def _visit(self, value: Any) -> None:
        if type(value) in _PLAIN or (id(value) not in self._own and _is_data(value)):
            return
        if isinstance(value, Wrapper):  # an engine restores its own state
            value = value.module
        if isinstance(value, (dict, list, deque, set)):
            is_plain = getattr(type(value), "__getitem__", None) in _GETTERS
            if is_plain and id(value) not in self._seen and len(value) <= MAX_ENTRIES:
                self._visit_container(value)
            return
        super()._visit(value)
        if isinstance(value, (Tensor, type, tuple)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        own, home = getattr(value, "__dict__", {}), type(value).__module__
        if isinstance(value, types.MethodType):
            self._visit(value.__func__)  # its object is visited above
        elif isinstance(value, random.Random):
            self._save_generator(value.getstate, value.setstate)
        elif isinstance(value, torch.Generator):
            self._save_generator(value.get_state, value.set_state)
        # Classes are asked: a library that is loaded by name has attributes of any
        # name.
        elif hasattr(type(value), "bit_generator"):  # NumPy's
            source = value.bit_generator
            self._save_generator(
                lambda: source.state, partial(setattr, source, "state")
            )
        elif hasattr(type(value), "__array_interface__") and value.flags.writeable:
            put, differs = partial(value.__setitem__, ...), lambda *_: False
            # without a comparison
            self._saved.append((int, put, value.copy(), differs))
        elif isinstance(value, queue.Queue):
            self._visit(value.queue)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, nn.Module):
            file = str(getattr(sys.modules.get(home), "__file__", None))
            if not (_is_foreign(home) or "-packages" in file):
                self._visit_class(value)
        # An object that holds a lock is shared with other threads: left alone.
        elif not _is_foreign(home) and _LOCKS.isdisjoint(
            type(v).__module__ for v in own.values()
        ):
            self._visit(own)
            self._visit_class(value)

    def _visit_class(self, value: Any) -> None:
        kind = type(value)
        for slot in chain(*(vars(base).values() for base in kind.__mro__)):
            if isinstance(slot, types.MemberDescriptorType) and hasattr(
                value, slot.__name__
            ):
                self._save(partial(slot.__get__, value), partial(slot.__set__, value))
        for name, item in [*vars(kind).items()]:
            if isinstance(item, types.FunctionType):
                self._visit(item)
            if name[:2] != "__" and not (callable(item) or hasattr(item, "__get__")):
                self._save(partial(getattr, kind, name), partial(setattr, kind, name))

    def _visit_function(self, function: types.FunctionType) -> None:
        if _is_foreign(function.__module__):
            return
        own, of_file = closure_and_globals(function)
        space = function.__globals__
        # functools.wraps gives a library's wrapper the user's __module__.
        if _is_foreign(space.get("__name__")):
            of_file = {}
        for cell in function.__closure__ or ():
            if contents(cell) is not cell:
                self._save(
                    partial(contents, cell), partial(setattr, cell, "cell_contents")
                )
        for name in of_file:
            self._save(partial(space.get, name), partial(space.__setitem__, name))
        self._visit((*own.values(), vars(function)))


def _restore(saved: Iterable[Saved]) -> bool:
    """Restore what has changed. Returns whether anything had."""
    changed = [
        (put, value) for get, put, value, same in saved if not same(get(), value)
    ]
    for put, value in changed:
        put(value)
    return bool(changed)


def _is_data(value: Any) -> bool:
    """Whether ``value`` is of a class that leads to data: data sets, loaders, trainers,
    files.
    """
    names = () if isinstance(value, (Tensor, nn.Module, type)) else type(value).__mro__
    return any(base.__name__.endswith(_DATA) for base in names)


def _is_foreign(module: Any) -> bool:
    # Closures of the integrations hold user modules.
    name = module if isinstance(module, str) else "torch"
    return name.split(".")[0] in _FOREIGN and not name.startswith(
        "scatterpar.integrations"
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return same_bits(one, other)
    return pickle.dumps(one) == pickle.dumps(other)  # NumPy's have arrays in them


def state_of(replicas: Sequence[Replica]) -> State:
    """The buffers of replicas, and the attributes that are numbers or tensors.

    Running statistics do not change in a look, whose batch normalisations are in
    evaluation mode.
    """
    found: State = {}
    roots = [
        replica.root for replica in replicas if isinstance(replica.root, nn.Module)
    ]
    for prefix, module in chain(*(root.named_modules() for root in roots)):
        attributes = {n: v for n, v in vars(module).items() if n not in _OF_TORCH}
        for kind, named in (("buffer", module._buffers), ("attribute", attributes)):
            for name, value in named.items():
                is_tensor = isinstance(value, Tensor) and value.grad_fn is None
                if is_tensor or type(value) in (int, float):
                    place = f"the {kind} {f'{prefix}.' * bool(prefix) + name!r}"
                    found[place] = value.detach().clone() if is_tensor else value
    return found


def moved_between(states: Sequence[State]) -> list[str]:
    """The names of state that the second part of a look has changed, after the first.

    What only the first part changes, such as a table that it fills, is not found. If
    both parts began in the same state: what they have left different.
    """
    first, second = (*states, {}, {})[:2]
    pairs = {name: (one, second.get(name)) for name, one in first.items()}
    return [
        n
        for n, pair in pairs.items()
        if len({*map(type, pair)}) == 1 and not _same(*pair)
    ]
