"""A look ends before its calls open a file to write: the step writes it again.

::

    with files_refused():
        log = open("losses.txt", "a")     Inconclusive: the file is not touched

Python tells an audit hook of each file before it is opened, whoever opens it: user
code, NumPy, Pillow. A hook stays for the life of the process; it is added by the first
look, and does nothing outside of looks. Files that are read leave nothing behind, nor
does the null device.

Files that other libraries open in C++ are not told. A finalizer may write its file: it
is that of an object which some call happened to free, and nobody runs it again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

from scatterpar.numerics.comparison import Inconclusive
from scatterpar.torch_private.compiler import COMPILERS, NOT_COMPILING
from scatterpar.torch_private.settings import files_of_torch_audited

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Whose files are caches: they are read again, and a second call finds them.
_CACHING = ("importlib.", "numba.", "triton.", *COMPILERS)
_FINALIZERS = "weakref."  # the module of ``weakref.finalize``
_REMEDY = (
    "Such code is not looked at: write files outside of forward and the criterion, "
    "from what these return. verify=False does not check."
)


class _Watch:
    """The first file that calls of a look would have written.

    Attributes:
        name: its name; empty if there was none.
    """

    name = ""

    def inconclusive(self) -> Inconclusive:
        """What ends the look."""
        why = f"a call opens {self.name!r} to write"
        return Inconclusive(why, patience=1, is_final=True, remedy=_REMEDY)


# Of this thread's look: a thread that user code starts has a context of its own.
_watch: ContextVar[_Watch | None] = ContextVar("_watch", default=None)


@contextlib.contextmanager
def files_refused() -> Iterator[None]:
    """In the body, a file that this thread opens to write ends the look.

    Raises:
        Inconclusive: before the file is touched; and at the end of the body if its code
            has caught that.
    """
    _add_hook()
    watch = _Watch()
    token = _watch.set(watch)
    try:
        with files_of_torch_audited:
            yield
    finally:
        _watch.reset(token)
        if watch.name:
            raise watch.inconclusive() from None


@functools.cache
def _add_hook() -> None:
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open":
        return
    watch = _watch.get()
    if watch is None:
        return
    path, _, flags = arguments
    # A number is a file that is open already.
    if isinstance(path, int) or not flags & _WRITES:
        return
    name = os.fsdecode(path)
    if name == os.devnull or not _is_of_a_call():
        return
    watch.name = os.path.basename(name)
    raise watch.inconclusive()


def _is_of_a_call() -> bool:
    """Whether a call opens the file, and no compiler, import or finalizer."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = f"{frame.f_globals.get('__name__')}."
        if module.startswith(_CACHING) and module != NOT_COMPILING:
            return False
        if frame.f_code.co_name == "__del__" or module == _FINALIZERS:
            return False
        frame = frame.f_back
    return True
