"""Notes on the user's errors, restores after an error, and warnings."""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from types import FrameType
from typing import Any

from scatterpar.libraries import PACKAGE_FOLDER, is_library_file


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn; the location is the line of the user's code that called the package.

    In a thread without one, as a worker's, it is the line outside of the package.
    """
    files: list[str] = []
    frame = inspect.currentframe()
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    levels_of_user = [k for k, file in enumerate(files) if not is_library_file(file)]
    levels = [k for k, file in enumerate(files) if not file.startswith(PACKAGE_FOLDER)]
    level = [*levels_of_user, *levels, 0][0]
    warnings.warn(text, category, stacklevel=level + 1)


class Defect(BaseException):
    """A mistake in this package, in its tests.

    No ``Exception``: where errors of the user's code are expected, it is none of these.
    """


# Set by the tests: a mistake in this package fails the test that meets it.
raises_defects = False


def defect(text: str) -> None:
    """Tell of a mistake in this package. Warns; raises ``Defect`` in its tests."""
    if raises_defects:
        raise Defect(text)
    warn(f"a mistake in scatterpar: {text}; please report it", RuntimeWarning)


class Told:
    """The subjects of warnings and logs that were given: each is given once."""

    def __init__(self) -> None:
        self._subjects: set[Hashable] = set()
        self._lock = threading.Lock()

    def mark(self, subject: Hashable) -> bool:
        """Mark a subject. Returns whether this is the first time."""
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


def leave_out_own_frames(error: BaseException) -> None:
    """Let the traceback of ``error`` go on in the first line that is not the package's.

    Called by the frame that has caught the error. Between it and a line of the user's
    are a dozen calls that tell the user nothing. An error of the package itself keeps
    its traceback.
    """
    caller = error.__traceback__
    assert caller is not None
    trace = caller.tb_next
    own_frames = []
    while trace is not None and _is_own(trace.tb_frame):
        own_frames.append(trace.tb_frame)
        trace = trace.tb_next
    if trace is None:
        return
    # The frames that stay refer to these, and so to what their variables hold, such as
    # the output of a micro-batch.
    for frame in own_frames:
        frame.clear()
    error.__traceback__ = trace


def _is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE_FOLDER)


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
