"""Ctrl-C: prompt while the replicas compute, deferred while anything is being changed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interrupts"]


class Interrupts:
    """For as long as it is entered, an interrupt is delivered only where it is ``allowed``.

    Python delivers signals to the main thread alone; in any other this does nothing.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._allowed = False
        self._pending: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._allowed = False
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        self.deliver()

    def defer(self) -> None:
        """From here on, interrupts wait."""
        self._allowed = False

    def deliver(self) -> None:
        """Raise what has been waiting."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._handler(*pending)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Interrupts are raised inside the body, at once."""
        self._allowed = True
        try:
            self.deliver()
            yield
        finally:
            self._allowed = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._allowed:
            self._handler(number, frame)
        else:
            self._pending = (number, frame)
