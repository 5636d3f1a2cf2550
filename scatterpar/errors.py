"""Notes on the user's errors, restores after an error, and warnings."""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import torch

# torch's optimizer calls the package before a step.
_PACKAGES = (str(Path(__file__).parent), str(Path(torch.optim.__file__).parent))


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn; the location is the line of the user's code that called the package."""
    frame = inspect.currentframe()
    level = 1
    # Up to the first frame of the user's.
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
        level += 1
    warnings.warn(text, category, stacklevel=level)


class Told:
    """Which subjects were told: a warning or log of each is given once."""

    def __init__(self) -> None:
        self._subjects: set[Hashable] = set()
        self._lock = threading.Lock()

    def is_new(self, subject: Hashable) -> bool:
        """Whether nobody has asked for this subject before."""
        with self._lock:
            is_new = subject not in self._subjects
            self._subjects.add(subject)
        return is_new

    def __reduce__(self) -> Any:
        return Told, ()  # a copy tells again


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
