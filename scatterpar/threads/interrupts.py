"""Defer interrupts, such as that of Ctrl-C, while a step must not be torn in two."""

from __future__ import annotations

# Not the functions of ``signal``: they look up enum members, and a step calls them nine
# times.
import _signal  # type: ignore[import-not-found]
import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

_SIGNALS = (
    "SIGINT",
    "SIGBREAK",
    "SIGTERM",
    "SIGHUP",
    "SIGALRM",
    "SIGUSR1",
    "SIGUSR2",
)
# Which of them there are depends on the system.
_INTERRUPTS = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]


class Interrupts:
    """Defers interrupts in its body: signals with Python handlers. ::

        with Interrupts() as interrupts:
            ...                               signals are kept
            with interrupts.allowed():
                ...                           kept and new signals run their handlers
            ...                               signals are kept
                                              kept signals run their handlers

    Handlers may raise, as that of Ctrl-C or of a time limit. Python runs them in the
    main thread only; in any other thread this does nothing. ``except
    KeyboardInterrupt`` cannot replace this: Python may raise before the ``try`` is
    entered. ``signal.pthread_sigmask`` is not on Windows, and delivers a blocked signal
    too late.

    Attributes:
        are_allowed: whether a signal runs its handler at once: false in the body,
            except in that of ``allowed``.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}  # the user's, by number of the signal
        self.are_allowed = False
        self._pending: dict[int, FrameType | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in _INTERRUPTS:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
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
        # A handler that is back may raise before the next one is, and once more: of
        # three tries each goes on where an interrupt has ended the one before it.
        try:
            try:
                try:
                    self._restore()
                except BaseException:
                    self._restore()
                    raise
            except BaseException:
                self._restore()
                raise
        finally:
            self.are_allowed = True
            self.deliver()

    def _restore(self) -> None:
        """Put the user's handlers back that are not."""
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) is not handler:
                _signal.signal(number, handler)

    def deliver(self) -> None:
        """Run the handlers of interrupts that have been waiting."""
        if self._pending:
            number, frame = self._pending.popitem()
            try:
                self._handlers[number](number, frame)
            finally:  # each handler runs, even if the one before it has raised
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
