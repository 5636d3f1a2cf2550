"""Random numbers of a step: reproducible, different for every replica, equal on any layout.

The numbers that a replica draws depend on its number and on the master's generators, not on its
device. So eight replicas draw the same numbers on one, two or eight devices. Replica 0 continues
the process's own generator, as a plain loop would; the others are seeded from it.

The process has one generator for the CPU. During a step, random operators of the workers are sent
to a kernel of ours by a dispatch key that only the workers switch on; the kernel passes the
replica's generator. docs/clever.md has the reasons. An accelerator has one generator, and its
replicas run one after the other: each installs its own state.

If anything was drawn, the commit advances the CPU's and the master's generators; all others keep
their state. To resume a run it is enough to save and restore these two.

``SCATTERPAR_RANDOM_STREAMS=0`` in the environment turns the replicas' CPU generators off, for a
version of torch that lacks what they need (``torch_private``): masks then differ from run to run.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from scatterpar import torch_private
from scatterpar.devices.runtime import HOST, is_async, physical

_thread = threading.local()
_graph_tasks: dict[int, Callable[[], torch.Generator]] = {}


class generator_for_backward:
    """In the body, a backward pass from ``roots`` draws from this thread's generator.

    Backward passes of accelerators run in autograd's own threads, where activation checkpointing
    draws the numbers of the forward pass again. (A class, not a ``@contextmanager``: a tensor may
    raise ``StopIteration``.)
    """

    def __init__(self, roots: Sequence[Tensor]) -> None:
        self._roots = roots
        self._tasks: set[int] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        make = getattr(_thread, "generator", None)
        if make is None or not _thread.has_helpers:
            return

        def adopt(_: Tensor) -> None:
            task = torch_private.current_graph_task()
            self._tasks.add(task)
            _graph_tasks[task] = make

        # On each root: a root's hook runs before every node below it.
        self._handles = [root.register_hook(adopt) for root in self._roots if root.requires_grad]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for task in self._tasks:
            del _graph_tasks[task]


def _current() -> torch.Generator | None:
    """The generator of the replica for which this thread works; ``None`` outside of a step."""
    make: Callable[[], torch.Generator] | None = getattr(_thread, "generator", None)
    if make is None:
        make = _graph_tasks.get(torch_private.current_graph_task())
    return None if make is None else make()


class _ThreadAwareGenerator:
    """Replaces ``default_generator`` in ``torch.random`` during a step."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_current() or torch.default_generator, name)


_lock = threading.Lock()
_num_bodies = 0  # of ``_thread_aware_default_generator``, in all threads


@contextlib.contextmanager
def _thread_aware_default_generator() -> Iterator[None]:
    """In the body, torch's functions for random state and seeds act on the replica's generator.

    ``torch.get_rng_state``, ``set_rng_state``, ``fork_rng`` and ``manual_seed`` are these
    functions. Activation checkpointing saves and rewinds the generator through them.
    """
    global _num_bodies
    with _lock:
        _num_bodies += 1
        vars(torch.random)["default_generator"] = _ThreadAwareGenerator()
    try:
        yield
    finally:
        with _lock:
            _num_bodies -= 1
            if not _num_bodies:
                vars(torch.random)["default_generator"] = torch.default_generator


@functools.cache
def _install_kernels() -> tuple[Library, ...]:
    """Register our kernels of random operators, once per process; call it under the lock."""
    return torch_private.register_random_kernels(_kernel_of)


def _kernel_of(operator: Callable[..., Any], position: int) -> Callable[..., Any]:
    """A kernel that passes the replica's generator if the operator would draw from the CPU's."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        generator = args[position] if position < len(args) else kwargs.get("generator")
        if (generator is None or generator is torch.default_generator) and _is_on_cpu(args, kwargs):
            replica_generator = _current()
            if replica_generator is not None and position < len(args):
                args = (*args[:position], replica_generator, *args[position + 1 :])
            elif replica_generator is not None:
                kwargs["generator"] = replica_generator
        with torch_private.random_key_off():
            return operator(*args, **kwargs)

    return kernel


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws on the CPU: other devices refuse the CPU's generators."""
    device = kwargs.get("device")
    if device is None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = tensors[0].device if tensors else HOST
    return not is_async(device)


_SEEDS = 2**32  # the CPU's generator ignores higher bits of a seed
_CRITERION = -2  # the number of the criterion's generators
_NEXT = -1  # the number that seeds the next step if replica 0 draws nothing

State = dict[torch.device, Tensor]  # the state of each generator that a replica has drawn from


class Generators:
    """The generators of one step: each replica's on the CPU, and on its accelerator if it has one.

    ``replica_offset`` is the number of replicas of processes with lower rank; ``None`` without
    other processes.
    """

    def __init__(self, devices: Sequence[torch.device], replica_offset: int | None = None) -> None:
        self._devices = [physical(device) for device in devices]
        self._replica_offset = replica_offset or 0
        self._before = {device: _state(device) for device in (HOST, *self._devices)}
        self._after: State = {}  # the process's generators after the commit, if anything was drawn
        self._marks: dict[int, tuple[int, State]] = {}
        self._generators: dict[tuple[int, torch.device], _Generator] = {}
        # A single replica of a single process draws from the process's own generators.
        self._is_single = len(devices) == 1 and replica_offset is None
        if self._is_single:
            for device in self._before:
                self._generator(0, device).is_installed = True

    def of(self, replica: int) -> contextlib.AbstractContextManager[None]:
        """In the body, this thread draws from the generators of ``replica``."""
        if self._is_single:
            return contextlib.nullcontext()
        return self._drawing(replica, self._devices[replica])

    def of_criterion(self, seed: int | None) -> contextlib.AbstractContextManager[None]:
        """In the body, this thread draws the random numbers of a criterion that sees all outputs.

        It continues the generators of replica 0, or starts from a ``seed`` that all processes have.
        """
        if seed is None:
            return self.of(0)
        master = self._devices[0]
        for device in {HOST, master}:
            self._generators[_CRITERION, device] = _Generator(device, seed)
        return self._drawing(_CRITERION, master)

    @contextlib.contextmanager
    def _drawing(self, number: int, device: torch.device) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if device != HOST:
                stack.enter_context(self._generator(number, device).installed())
            if os.environ.get("SCATTERPAR_RANDOM_STREAMS") != "0":
                with _lock:
                    _install_kernels()
                stack.enter_context(_thread_aware_default_generator())
                stack.enter_context(torch_private.random_key_on())
                stack.callback(vars(_thread).clear)
                _thread.generator = lambda: self._generator(number, HOST).generator
                _thread.has_helpers = device != HOST  # autograd's own threads draw for this one
            yield

    def seed_of_criterion(self) -> int:
        """The seed that the first process sends to the others, for the same random numbers."""
        return self._seed(HOST, _CRITERION)

    def get_state(self, replica: int) -> State:
        """The present state of the generators of ``replica``, for ``set_state``."""
        return {generator.device: generator.state for generator in self._made_for(replica)}

    def _made_for(self, replica: int) -> list[_Generator]:
        """The generators of ``replica`` that exist: they are made when they are first needed."""
        generators = (self._generators.get((replica, device)) for device in self._before)
        return [generator for generator in generators if generator is not None]

    def mark(self, replica: int, sub_step: int) -> State:
        """Record the state of the generators of ``replica`` as ``sub_step`` begins. Returns it."""
        state = self.get_state(replica)
        self._marks[replica] = sub_step, state
        return state

    def has_drawn(self, replica: int) -> bool:
        """Whether ``replica`` drew a random number."""
        return any(generator.drawn for generator in self._made_for(replica))

    def to_draw_again(self, replica: int, sub_step: int) -> tuple[int, State]:
        """Where a replay has to begin, so that ``sub_step`` draws the same random numbers again.

        Returns a pair: the number of the first sub-step to run, and the generators' state to run it
        in, for the CPU and the master's device. The number is ``sub_step`` if that was the last to
        begin, or if nothing was drawn before it; otherwise 0.
        """
        replica_device, master = self._devices[replica], self._devices[0]
        start = {
            device: self._generator(replica, device).start for device in {HOST, replica_device}
        }
        marked, state = self._marks.get(replica, (0, {}))
        state = start | state
        if sub_step != marked:
            undrawn = all(torch.equal(state[device], start[device]) for device in start)
            marked, state = sub_step if undrawn and sub_step < marked else 0, start
        return marked, {
            master if device == replica_device else device: s for device, s in state.items()
        }

    @property
    def are_latest(self) -> bool:
        """Whether the process's generators have the state from before or after this step."""
        now = {device: _state(device) for device in {HOST, self._devices[0]}}
        return any(
            all(torch.equal(state, there.get(device, state)) for device, state in now.items())
            for there in (self._before, self._before | self._after)
        )

    def set_state(self, replica: int, state: State) -> None:
        """Set the generators of ``replica`` to ``state``, to draw the same numbers again."""
        for generator in self._made_for(replica):
            generator.set_state(state.get(generator.device))

    @property
    def drawn(self) -> bool:
        """Whether any replica drew a random number."""
        return any(generator.drawn for generator in self._generators.values())

    def commit(self) -> None:
        """Advance the master's generators if anything was drawn, so that the next step differs.

        If nothing drew on the CPU, its generator is not written, so draws of other threads stay.
        """
        if self._is_single:
            self._after = self.get_state(0)
            return
        after = {device: state for device, state in self._before.items() if device != HOST}
        for source in {HOST, self._devices[0]}:
            first = self._generators.get((0, source))
            if first is not None and first.drawn and not self._replica_offset:
                after[source] = first.state
            elif any(
                generator.drawn and self._seeding_device(generator.device) == source
                for generator in self._generators.values()
            ):
                after[source] = _Generator(source, self._seed(source, _NEXT)).state
        self._after = after
        put_all(after)

    def rollback(self) -> None:
        """Restore all generators to their state before the step; replicas start again."""
        if not self._is_single:
            self._generators.clear()
        put_all(self._before)

    def _generator(self, number: int, device: torch.device) -> _Generator:
        key = number, device
        if key not in self._generators:
            number += self._replica_offset
            source = self._seeding_device(device)
            start = self._seed(source, number) if number else self._before[device]
            self._generators[key] = _Generator(device, start)
        return self._generators[key]

    def _seeding_device(self, device: torch.device) -> torch.device:
        """The device whose generator seeds those of ``device``: the CPU or the master's."""
        return HOST if device == HOST else self._devices[0]

    def _seed(self, source: torch.device, number: int) -> int:
        """A seed from the state of ``source``. Runs no operator, because ``vmap`` may be active."""
        state = self._before[source]
        content = ctypes.string_at(state.data_ptr(), state.numel())  # reading a storage is slow
        digest = hashlib.blake2b(content, digest_size=4)
        return (int.from_bytes(digest.digest(), "big") + number) % _SEEDS


class _Generator:
    """The generator of one replica on one device.

    While ``is_installed``, the device's own generator has the state and draws the numbers.
    """

    def __init__(self, device: torch.device, start: int | Tensor) -> None:
        self.device = device
        self.is_installed = False
        self.generator = torch.Generator(device)
        if isinstance(start, int):
            start = self.generator.manual_seed(start).get_state()
        else:
            self.generator.set_state(start)
        self.start = start

    @property
    def state(self) -> Tensor:
        return _state(self.device) if self.is_installed else self.generator.get_state()

    @property
    def drawn(self) -> bool:
        return not torch.equal(self.state, self.start)

    def set_state(self, state: Tensor | None) -> None:
        """Set the state; ``None`` for the one at the start."""
        state = self.start if state is None else state
        if self.is_installed:
            _set_state(self.device, state)
        else:
            self.generator.set_state(state)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In the body, the device's own generator continues this one."""
        _set_state(self.device, self.generator.get_state())
        self.is_installed = True
        try:
            yield
        finally:  # the step restores the device's state, so abandoned threads never write it
            self.generator.set_state(_state(self.device))
            self.is_installed = False


def _state(device: torch.device) -> Tensor:
    if device == HOST:
        return torch.default_generator.get_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_state(device: torch.device, state: Tensor) -> None:
    if device == HOST:
        torch.default_generator.set_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def put_all(states: Mapping[torch.device, Tensor]) -> None:
    """Set the states of the process's own generators."""
    for device, state in states.items():
        if not torch.equal(_state(device), state):
            _set_state(device, state)
