"""Random numbers of a step: reproducible, and another stream for every replica.

The CPU has one generator for the whole process. Replicas that draw from it in parallel
would get other numbers on every run, and activation checkpointing, which rewinds it, would
recompute with masks that another replica drew. So during a step every replica draws from a
generator of its own: random operators reach a kernel of ours, at a dispatch key that is
switched on in the workers' threads alone, which fills in the replica's generator. Operators
that draw nothing never see it.

Replica 0 continues the process's own stream, as a plain loop would; the others are seeded
from it. A step commits by moving the process's generator on, if anything was drawn.

Accelerators have a generator each, all seeded alike by ``torch.manual_seed``: those of
replicas 1, 2, … are seeded anew for the step, from their own state and the replica's number.
Replicas that share an accelerator draw from its generator in turn, since they run in turn.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

__all__ = ["RandomStreams", "followed"]

_KEY_NAME = "TESTING_ONLY_GenericMode"  # a mode key that torch itself leaves unused
_SEEDS = 2**32  # what the CPU's generator keeps of a seed


class RandomStreams:
    """The generators of one step, one per replica, made when first drawn from.

    Args:
        devices: the device of each replica that takes part.
        earlier: how many replicas of other processes are numbered before these.
    """

    def __init__(self, devices: Sequence[torch.device], earlier: int = 0) -> None:
        self._alone = len(devices) == 1 and not earlier
        self._earlier = earlier
        self._before = torch.default_generator.get_state()
        self._made: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._accelerators = [
            _AcceleratorStream(device, earlier + replica)
            for replica, device in enumerate(devices)
            if device.type != "cpu" and device not in devices[:replica]
        ]

    @contextlib.contextmanager
    def of(self, replica: int) -> Iterator[None]:
        """Let the current thread draw from the stream of ``replica``."""
        if self._alone:
            yield
            return
        key = _install_kernels()
        with _thread_aware_default_generator(), torch._C._IncludeDispatchKeyGuard(key):
            _thread.generator = partial(self._generator, replica)
            _thread.has_helpers = bool(self._accelerators)
            try:
                yield
            finally:
                del _thread.generator

    def commit(self) -> None:
        """Move the process's generator on if anything was drawn, so that the next step differs."""
        moved = [k for k, (g, start) in self._made.items() if not torch.equal(g.get_state(), start)]
        if moved:
            continued = 0 in moved and not self._earlier
            following = self._made[0][0] if continued else self._draw_seed()[1]
            torch.default_generator.set_state(following.get_state())
        for stream in self._accelerators:
            stream.commit()

    def rollback(self) -> None:
        """Leave all generators as they were before the step."""
        if not torch.equal(torch.default_generator.get_state(), self._before):
            torch.default_generator.set_state(self._before)
        for stream in self._accelerators:
            stream.rollback()

    def _generator(self, replica: int) -> torch.Generator:
        if replica not in self._made:
            seed, _ = self._draw_seed()
            number = self._earlier + replica
            generator = torch.Generator().manual_seed((seed + number) % _SEEDS)
            if number == 0:
                generator.set_state(self._before)
            self._made[replica] = (generator, generator.get_state())
        return self._made[replica][0]

    def _draw_seed(self) -> tuple[int, torch.Generator]:
        parent = torch.Generator()
        parent.set_state(self._before)
        return int(torch.randint(_SEEDS, (), generator=parent)), parent


class _AcceleratorStream:
    """The default generator of one accelerator, for one step of the replica that lives there."""

    def __init__(self, device: torch.device, replica: int) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._before: Tensor = self._module.get_rng_state(device)
        if replica > 0:
            generator = torch.Generator(device)
            generator.set_state(self._before)
            seed = hash((generator.initial_seed(), generator.get_offset(), replica))
            generator.manual_seed(seed % _SEEDS)
            self._module.set_rng_state(generator.get_state(), device)
        self._start: Tensor = self._module.get_rng_state(device)

    def commit(self) -> None:
        if torch.equal(self._module.get_rng_state(self._device), self._start):
            self.rollback()

    def rollback(self) -> None:
        self._module.set_rng_state(self._before, self._device)


_thread = threading.local()
_graph_tasks: dict[int, Callable[[], torch.Generator]] = {}


class followed:
    """Let the backward pass from ``root``, in the body, draw from this thread's stream.

    Accelerators' backward passes run in threads of autograd's own; activation checkpointing
    draws there again what the forward pass drew.
    """

    def __init__(self, root: Tensor) -> None:
        self._root = root
        self._tasks: set[int] = set()
        self._handle: Any = None

    def __enter__(self) -> None:
        make = getattr(_thread, "generator", None)
        if make is None or not _thread.has_helpers or not self._root.requires_grad:
            return

        def adopt(_: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            self._tasks.add(task)
            _graph_tasks[task] = make

        self._handle = self._root.register_hook(adopt)

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()
        for task in self._tasks:
            del _graph_tasks[task]


def _current() -> torch.Generator | None:
    """The generator of the replica that this thread works for."""
    make: Callable[[], torch.Generator] | None = getattr(_thread, "generator", None)
    if make is None:
        make = _graph_tasks.get(torch._C._current_graph_task_id())
    return None if make is None else make()


class _ThreadAwareGenerator:
    """Stands in for ``default_generator`` in ``torch.random`` during a step."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_current() or torch._C.default_generator, name)


_lock = threading.Lock()
_streams_open = 0


@contextlib.contextmanager
def _thread_aware_default_generator() -> Iterator[None]:
    """``torch.get_rng_state``, ``set_rng_state``, ``fork_rng`` and ``manual_seed``, per replica.

    Activation checkpointing saves and rewinds the generator through them.
    """
    global _streams_open
    with _lock:
        _streams_open += 1
        vars(torch.random)["default_generator"] = _ThreadAwareGenerator()
    try:
        yield
    finally:
        with _lock:
            _streams_open -= 1
            if not _streams_open:
                vars(torch.random)["default_generator"] = torch._C.default_generator


_libraries: list[Library] = []
_key: Any = None


def _install_kernels() -> Any:
    """Route the random operators at our key, once per process; the key."""
    global _key
    with _lock:
        if not _libraries:
            _key = torch._C._dispatch_key_parse(_KEY_NAME)
            fallback = Library("_", "IMPL")
            fallback.fallback(fallthrough_kernel, _KEY_NAME)
            operators = Library("aten", "IMPL")
            for schema in torch._C._jit_get_all_schemas():
                if schema.name.startswith("aten::") and _takes_generator(schema):
                    _route(operators, schema, torch._C.DispatchKeySet(_key))
            _libraries.extend((fallback, operators))
    return _key


def _takes_generator(schema: Any) -> bool:
    return any(str(a.type) == "Optional[Generator]" for a in schema.arguments)


def _route(operators: Library, schema: Any, keys: Any) -> None:
    name = schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name, None)
    operator = getattr(packet, schema.overload_name or "default", None)
    if operator is None:  # known to TorchScript alone
        return
    position = [argument.name for argument in schema.arguments].index("generator")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if position < len(args) else kwargs.get("generator")
        if (given is None or given is torch._C.default_generator) and _is_on_cpu(args, kwargs):
            mine = _current()
            if mine is not None and position < len(args):
                args = (*args[:position], mine, *args[position + 1 :])
            elif mine is not None:
                kwargs["generator"] = mine
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*args, **kwargs)

    overload = f".{schema.overload_name}" if schema.overload_name else ""
    operators.impl(name + overload, kernel, _KEY_NAME)


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws on the CPU: other devices refuse the CPU's generators."""
    device = kwargs.get("device")
    if device is None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
    return bool(device.type == "cpu")
