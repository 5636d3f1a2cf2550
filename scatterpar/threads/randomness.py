"""What a thread draws on the CPU comes from a generator of its own.

The CPU has one generator for the whole process. Replicas that draw from it in parallel
would get other numbers on every run, and activation checkpointing, which rewinds it, would
recompute with masks that another replica drew. So during a step every replica draws from a
generator of its own: random operators reach a kernel of ours, at a dispatch key that is
switched on in the workers' threads alone, which fills in the replica's generator. Operators
that draw nothing never see it. Which generators these are is told in ``streams.py``.

``SCATTERPAR_RANDOM_STREAMS=0`` in the environment turns the CPU's streams off, for a version of
torch that has not what they need (``torch_private``): masks then differ from run to run.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from scatterpar import torch_private

__all__ = ["drawing", "followed"]

_SWITCH = "SCATTERPAR_RANDOM_STREAMS"

_thread = threading.local()
_graph_tasks: dict[int, Callable[[], torch.Generator]] = {}


@contextlib.contextmanager
def drawing(make: Callable[[], torch.Generator], *, helpers: bool) -> Iterator[None]:
    """Let what this thread draws on the CPU come from the generator that ``make`` gives.

    Args:
        make: makes it where it is needed.
        helpers: autograd has threads of its own that draw for this one.
    """
    if os.environ.get(_SWITCH) == "0":
        yield
        return
    _install_kernels()
    with _thread_aware_default_generator(), torch_private.switched_on():
        _thread.generator = make
        _thread.has_helpers = helpers
        try:
            yield
        finally:
            del _thread.generator


class followed:
    """Let the backward pass from ``roots``, in the body, draw from this thread's stream.

    Accelerators' backward passes run in threads of autograd's own; activation checkpointing
    draws there again what the forward pass drew.
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

        # Each root: what a node draws comes after the hook of some root above it.
        self._handles = [root.register_hook(adopt) for root in self._roots if root.requires_grad]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for task in self._tasks:
            del _graph_tasks[task]


def _current() -> torch.Generator | None:
    """The generator of the replica that this thread works for."""
    make: Callable[[], torch.Generator] | None = getattr(_thread, "generator", None)
    if make is None:
        make = _graph_tasks.get(torch_private.current_graph_task())
    return None if make is None else make()


class _ThreadAwareGenerator:
    """Stands in for ``default_generator`` in ``torch.random`` during a step."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_current() or torch_private.default_generator, name)


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
                vars(torch.random)["default_generator"] = torch_private.default_generator


_libraries: list[Library] = []


def _install_kernels() -> None:
    """Route the random operators to kernels of ours, once per process."""
    with _lock:
        if not _libraries:
            _libraries.extend(torch_private.route(_kernel_of))


def _kernel_of(operator: Callable[..., Any], position: int) -> Callable[..., Any]:
    """A kernel that fills in the replica's generator where an operator draws from the CPU's."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if position < len(args) else kwargs.get("generator")
        if (given is None or given is torch_private.default_generator) and _is_on_cpu(args, kwargs):
            mine = _current()
            if mine is not None and position < len(args):
                args = (*args[:position], mine, *args[position + 1 :])
            elif mine is not None:
                kwargs["generator"] = mine
        with torch_private.switched_off():
            return operator(*args, **kwargs)

    return kernel


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws on the CPU: other devices refuse the CPU's generators."""
    device = kwargs.get("device")
    if device is None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
    return bool(device.type == "cpu")
