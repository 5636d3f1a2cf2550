"""Carry the caller's thread-local state to workers."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from scatterpar.devices import streams
from scatterpar.errors import warn
from scatterpar.torch_private.autograd import saved_tensors_hooks
from scatterpar.torch_private.thread_modes import (
    PROFILE_ALL_THREADS,
    is_profiled,
    modes,
)


def autocast_types() -> list[str]:
    """The device types that autocast is enabled for in this thread."""
    accelerator = torch.accelerator.current_accelerator()
    device_types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [kind for kind in device_types if torch.is_autocast_enabled(kind)]


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """In the body, this thread does not use autocast's cache of weights.

    The process has one, which any thread clears that leaves autocast: a weight used
    twice would be cast once or twice, depending on another replica's timing.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class CallerContext:
    """The state of the caller's thread that a new thread would lack.

    Grad and inference mode, autocast, default device, saved-tensor hooks, context
    variables, and streams. They are captured at construction, and entered in another
    thread, which may use tensors that the caller has computed on any stream. Modes of
    torch are not carried over, because few can work in several threads:
    ``warn_of_what_replicas_lack``.
    """

    def __init__(self) -> None:
        self._variables = contextvars.copy_context()
        self._streams = streams.current_streams()
        self._default_device = torch.get_default_device()
        self._contexts: list[
            Callable[[], contextlib.AbstractContextManager[object]]
        ] = []
        # Inference mode includes no_grad.
        if torch.is_inference_mode_enabled():
            self._contexts.append(torch.inference_mode)
        elif not torch.is_grad_enabled():
            self._contexts.append(torch.no_grad)
        for kind in autocast_types():
            # torch's ``parallel_apply`` loses the dtype: bf16 turns into fp16.
            dtype = torch.get_autocast_dtype(kind)
            self._contexts.append(partial(torch.autocast, kind, dtype))
        hooks = saved_tensors_hooks()
        if hooks:
            enter_hooks = partial(torch.autograd.graph.saved_tensors_hooks, *hooks)
            self._contexts.append(enter_hooks)

    def bound(
        self, device: torch.device, work: Callable[..., Any], args: Sequence[Any]
    ) -> Callable[[], Any]:
        """A call of ``work(*args)`` on ``device``, for another thread."""
        # Two threads cannot enter one context of variables at once.
        variables = self._variables.copy()
        return partial(variables.run, self._run, device, work, args)

    def _run(
        self, device: torch.device, work: Callable[..., Any], args: Sequence[Any]
    ) -> Any:
        """Returns ``work(*args)``, with the captured context apart from variables."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(streams.use_device(device, self._streams))
            stack.enter_context(no_autocast_cache())
            # The CPU is every thread's default.
            if streams.is_async(self._default_device):
                is_same_type = device.type == self._default_device.type
                stack.enter_context(device if is_same_type else self._default_device)
            for make_context in self._contexts:
                stack.enter_context(make_context())
            return work(*args)


def warn_of_what_replicas_lack() -> None:
    """Warn of modes and profilers of this thread, which see no thread of a replica."""
    # Such as FlopCounterMode, which counts the caller's operators alone.
    names = modes()
    if names:
        warn(
            f"{', '.join(names)}: a mode sees only the thread in which it was entered, "
            "and replicas compute in other threads; enter the mode in the module's "
            "forward, or use one replica"
        )
    if is_profiled():
        warn(
            "a profiler of torch records the caller's thread alone; to see the "
            f"replicas' operators, pass {PROFILE_ALL_THREADS} to torch.profiler.profile"
        )
