"""Carry the caller's thread-local state to workers, and defer interrupts."""

from __future__ import annotations

# Not the functions of ``signal``: they look up enum members, and a step calls them nine
# times.
import _signal  # type: ignore[import-not-found]
import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, Self

import torch

from scatterpar.devices import runtime
from scatterpar.report import warn
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
        self._streams = runtime.current_streams()
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
            stack.enter_context(runtime.use_device(device, self._streams))
            stack.enter_context(no_autocast_cache())
            if runtime.is_async(self._default):
                here = device.type == self._default.type
                stack.enter_context(device if here else self._default)
            for make_context in self._contexts:
                stack.enter_context(make_context())
            return work()


_NAMES = ("SIGINT", "SIGBREAK", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_INTERRUPTS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class Interrupts:
    """Defers interrupts in its body, except in that of ``allowed``: signals with Python
    handlers.

    Handlers may raise, as that of Ctrl-C or of a time limit. Python runs them in the
    main thread only; in any other thread this does nothing. ``except
    KeyboardInterrupt`` cannot replace this: Python may raise before the ``try`` is
    entered. ``signal.pthread_sigmask`` is not on Windows, and delivers a blocked signal
    too late.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self.are_allowed = False
        self._pending: dict[int, FrameType | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            found = [(number, _signal.getsignal(number)) for number in _INTERRUPTS]
            self._handlers = {
                number: handler for number, handler in found if callable(handler)
            }
            self.are_allowed = True  # an interrupt may come between these lines
            try:
                for number in self._handlers:
                    _signal.signal(number, self._receive)
                self.are_allowed = False
            except BaseException:  # no ``__exit__`` follows
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.are_allowed = True
        try:
            for number, handler in self._handlers.items():
                _signal.signal(number, handler)
        finally:
            self.deliver()

    def deliver(self) -> None:
        """Run the handlers of interrupts that have been waiting."""
        if self._pending:
            number, frame = self._pending.popitem()
            try:
                self._handlers[number](number, frame)
            finally:
                self.deliver()

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """In the body, interrupts are delivered at once."""
        self.are_allowed = True
        try:
            self.deliver()
            yield
        finally:
            self.are_allowed = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.are_allowed:
            self._handlers[number](number, frame)
        else:
            self._pending[number] = frame
