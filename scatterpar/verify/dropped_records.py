"""What user code logs during a look is dropped, because the step logs it again.

A loop of another library asks ``is_look()``, and silences the loggers of its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from contextvars import ContextVar

_is_look = ContextVar("is_look", default=False)


def is_look() -> bool:
    """Whether a look calls the present function, whose calls leave nothing."""
    return _is_look.get()


class _OfOtherThreads(logging.Filter):
    """Lets pass what other threads than the present one log."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread


@contextlib.contextmanager
def records_dropped() -> Iterator[None]:
    """In the body, no handler of ``logging`` gets what this thread logs.

    Other threads of the process log as ever, so no level is set. Levels that user code
    sets are restored.
    """
    of_other_threads = _OfOtherThreads()
    levels = [(logger, logger.level) for logger in _loggers()]
    # At handlers, because a logger's filter does not see records of its children.
    handlers = _handlers()
    for handler in handlers:
        handler.addFilter(of_other_threads)
    token = _is_look.set(True)
    try:
        yield
    finally:
        _is_look.reset(token)
        for handler in handlers:
            handler.removeFilter(of_other_threads)
        for logger, level in levels:
            if logger.level != level:
                logger.setLevel(level)


def _handlers() -> list[logging.Handler]:
    """The handlers of all loggers, and the one for loggers without any."""
    handlers: list[logging.Handler] = []
    for logger in _loggers():
        handlers += logger.handlers
    if logging.lastResort is not None:
        handlers.append(logging.lastResort)
    return handlers


def _loggers() -> list[logging.Logger]:
    """The loggers that exist, the root's first."""
    # A copy: other threads make loggers.
    named = [*logging.root.manager.loggerDict.values()]
    loggers = [logger for logger in named if isinstance(logger, logging.Logger)]
    return [logging.root, *loggers]
