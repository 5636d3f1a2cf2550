"""Notes on the user's errors, restores after an error, and warnings."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn; the location is the line of the user's code that called the package."""
    frame = inspect.currentframe()
    level = 1
    # Up to the first frame that is not the package's.
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(text, category, stacklevel=level)


def add_note(error: BaseException, text: str) -> None:
    """Add a note to a user's error, unless it has the note or refuses notes."""
    # A note must not replace the user's error.
    with contextlib.suppress(Exception):
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)


@contextlib.contextmanager
def restored(*restores: Callable[[], object]) -> Iterator[None]:
    """Call ``restores`` after the body.

    If the body has failed, failures of ``restores`` become notes on its error.
    """
    try:
        yield
    except BaseException as error:
        restore_after(error, *restores)
        raise
    restore_after(None, *restores)


def restore_after(error: BaseException | None, *restores: Callable[[], object]) -> None:
    """Call ``restores``.

    With an ``error``, which is raised later, failures are notes on it.
    """
    for restore in restores:
        try:
            restore()
        except Exception as failure:  # as on a device where a kernel's assertion failed
            if error is None:
                raise
            add_note(error, f"after that, something could not be put back: {failure!r}")


class Refusal(RuntimeError):
    """Refuses what several threads cannot do at once.

    It goes before the errors that the same attempt causes in other threads.
    """
