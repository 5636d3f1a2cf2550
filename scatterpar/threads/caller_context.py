"""Carry the caller's thread-local state to workers."""

from __future__ import annotations

# Not the functions of ``signal``: they look up enum members, and a step calls them nine
# times.
import contextlib
import contextvars
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from scatterpar.devices import streams
from scatterpar.errors import warn
from scatterpar.torch_private import (
    PROFILE_ALL_THREADS,
    is_profiled,
    modes,
    saved_tensors_hooks,
)


def autocast_types() -> list[str]:
    """The device types that autocast is enabled for in this thread."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [kind for kind in kinds if torch.is_autocast_enabled(kind)]


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
    """Grad and inference mode, autocast, default device, saved-tensor hooks, variables,
    streams.

    Captured at construction, and entered in another thread, which may use tensors that
    the caller has computed on any stream. Modes of torch are not carried over, because
    few can work in several threads; a warning says so.
    """

    def __init__(self) -> None:
        if names := modes():
            warn(
                f"{', '.join(names)}: active in the caller's thread, and blind to "
                "what replicas "
                "compute in theirs; enter it in the module's forward, or use one "
                "replica"
            )
        if is_profiled():
            warn(
                "a profiler of torch records the caller's thread alone; to see the "
                "replicas' "
                f"operators, pass {PROFILE_ALL_THREADS} to torch.profiler.profile"
            )
        self._variables = contextvars.copy_context()
        self._streams = streams.current_streams()
        self._default = torch.get_default_device()
        self._contexts: list[
            Callable[[], contextlib.AbstractContextManager[object]]
        ] = []
        if torch.is_inference_mode_enabled():
            self._contexts.append(torch.inference_mode)
        elif not torch.is_grad_enabled():
            self._contexts.append(torch.no_grad)
        for kind in autocast_types():
            self._contexts.append(
                partial(torch.autocast, kind, torch.get_autocast_dtype(kind))
            )
        if hooks := saved_tensors_hooks():
            self._contexts.append(
                partial(torch.autograd.graph.saved_tensors_hooks, *hooks)
            )

    def run(self, device: torch.device, work: Callable[[], Any]) -> Any:
        """Returns ``work()``, run on ``device`` in this thread with the captured
        context.
        """
        return self._variables.copy().run(self._run, device, work)

    def _run(self, device: torch.device, work: Callable[[], Any]) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(streams.use_device(device, self._streams))
            stack.enter_context(no_autocast_cache())
            if streams.is_async(self._default):
                here = device.type == self._default.type
                stack.enter_context(device if here else self._default)
            for make_context in self._contexts:
                stack.enter_context(make_context())
            return work()
