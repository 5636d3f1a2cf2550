"""Drop what user code logs and warns of during a look: the step does both again.

A loop of another library asks ``is_look()``, and silences the loggers of its own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from scatterpar.torch_private.settings import ForAllThreads

_within_look = ContextVar("within_look", default=False)

# The pattern matches every message. Without one, the filter would equal that of
# ``warnings.simplefilter("ignore")``, which removes its equal, also in another thread.
_IGNORE = ("ignore", re.compile(""), Warning, None, 0)


def is_look() -> bool:
    """Whether a look calls the present function, whose calls leave nothing."""
    return _within_look.get()


@contextlib.contextmanager
def records_dropped() -> Iterator[None]:
    """In the body, no handler of ``logging`` gets what this thread logs.

    Other threads of the process log as ever.
    """
    # A context variable: a look of one thread is none of another's.
    token = _within_look.set(True)
    try:
        with _handlers_called_by_steps_alone:
            yield
    finally:
        _within_look.reset(token)


@ForAllThreads
@contextlib.contextmanager
def _handlers_called_by_steps_alone() -> Iterator[None]:
    """In the body, user code of a look logs nothing."""
    logger: Any = logging.Logger
    handle = logger.callHandlers
    # All records pass this one, whatever handlers there are.
    logger.callHandlers = _handling_nothing(handle)
    try:
        yield
    finally:
        logger.callHandlers = handle


def _handling_nothing(handle: Callable[..., None]) -> Callable[..., None]:
    """``Logger.callHandlers``, which does nothing in a look."""

    @functools.wraps(handle)
    def handled(logger: logging.Logger, record: logging.LogRecord) -> None:
        if not is_look():
            handle(logger, record)

    return handled


@contextlib.contextmanager
def warnings_dropped() -> Iterator[None]:
    """In the body, warnings are ignored, and Python does not note them as shown.

    ``warnings.catch_warnings`` would make Python forget what it has shown before: the
    user's warnings would appear again after each look.
    """
    filters: Any = warnings.filters
    # First, because the first filter that fits decides.
    filters.insert(0, _IGNORE)
    try:
        yield
    finally:
        # Nothing is left to remove if the user's code called resetwarnings.
        with contextlib.suppress(ValueError):
            filters.remove(_IGNORE)
