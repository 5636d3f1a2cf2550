"""What user code logs during a look is dropped, because the step logs it again.

So is what it writes into files that it opens in its calls. A loop of another library
asks ``is_look()``, and silences the loggers of its own.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import io
import logging
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from scatterpar.state.whose import is_library
from scatterpar.torch_private import ForAllThreads

_is_look = ContextVar("is_look", default=False)


def is_look() -> bool:
    """Whether a look calls the present function, whose calls leave nothing."""
    return _is_look.get()


@contextlib.contextmanager
def records_dropped() -> Iterator[None]:
    """In the body, no handler of ``logging`` gets what this thread logs, and no file
    that it opens gets what it writes.

    Other threads of the process log and write as ever.
    """
    # A context variable: a look of one thread is none of another's.
    token = _is_look.set(True)
    try:
        with _functions_exchanged:
            yield
    finally:
        _is_look.reset(token)


@ForAllThreads
@contextlib.contextmanager
def _functions_exchanged() -> Iterator[None]:
    """In the body, user code of a look logs nothing, and a file that it opens gets
    nothing.
    """
    logger: Any = logging.Logger
    handle = logger.callHandlers
    openers = builtins.open, io.open
    # All records pass this one, whatever handlers there are.
    logger.callHandlers = _handling_nothing(handle)
    # ``pathlib`` calls the one of ``io``.
    builtins.open = io.open = _opening_nothing(builtins.open)
    try:
        yield
    finally:
        builtins.open, io.open = openers
        logger.callHandlers = handle


def _handling_nothing(handle: Callable[..., None]) -> Callable[..., None]:
    """``Logger.callHandlers``, which does nothing in a look."""

    @functools.wraps(handle)
    def handled(logger: logging.Logger, record: logging.LogRecord) -> None:
        if not is_look():
            handle(logger, record)

    return handled


def _opening_nothing(opener: Callable[..., Any]) -> Callable[..., Any]:
    """``open``, which opens the null device if user code in a look opens a path to
    write.
    """

    @functools.wraps(opener)
    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        writes = not {*mode}.isdisjoint("wax")
        # A number is a file that is open already.
        if writes and is_look() and not isinstance(file, int) and _is_asked_by_user():
            file = os.devnull
            mode = mode.replace("x", "w")
        return opener(file, mode, *args, **options)

    return opened


def _is_asked_by_user() -> bool:
    """Whether user code opens the file, itself or as a path of ``pathlib``.

    A library may read again what it has written: a compiler its code.
    """
    frame = inspect.currentframe()
    modules = __name__, "pathlib", "pathlib._local"  # the last one since Python 3.13
    while frame is not None and frame.f_globals.get("__name__") in modules:
        frame = frame.f_back
    return frame is not None and not is_library(frame.f_globals.get("__name__"))
