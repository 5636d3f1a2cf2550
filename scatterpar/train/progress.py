"""Progress of reading and computing: a bar on stderr, or a line now and then."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from typing import Any, TextIO

from torch import Tensor, nn
from tqdm import tqdm

from scatterpar.train.command_line import printable

_LINE_SECONDS = 10.0  # between lines, without a terminal
_LINE = "{desc}{percentage:.0f}%, {rate_fmt}, {remaining} left{postfix}"
# tqdm's own lock is a semaphore of the system, which a killed process leaves behind.
tqdm.set_lock(threading.RLock())


class Progress(contextlib.AbstractContextManager["Progress"]):
    """A bar of images, which several threads may move. If stderr is no terminal, there
    are lines instead.
    """

    def __init__(
        self, total: int, done: int = 0, *, file: TextIO, is_shown: bool = True
    ) -> None:
        # tqdm starts no thread: every batch of images updates the bar.
        tqdm.monitor_interval = 0
        self._lock = threading.Lock()
        self._limit = total
        self._file = file  # of lines
        self._said = time.perf_counter()
        self._has_lines = is_shown and not sys.stderr.isatty()
        # tqdm counts and estimates for lines, too, which are not drawn as a bar. Closed
        # with the bar.
        self._nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        # A terminal may not know its size; tqdm would show nothing in one of 0 x 0.
        size = shutil.get_terminal_size()
        self._bar: Any = tqdm(
            total=total,
            file=self._nowhere if self._has_lines else None,
            bar_format=_LINE if self._has_lines else None,
            ncols=size.columns - 1,
            nrows=size.lines,
            initial=done,
            disable=not is_shown,
            unit=" images",
            unit_scale=True,
            leave=False,
            miniters=1,
        )

    def describe(self, words: str, **numbers: str) -> None:
        """Show words before the bar, and numbers after it."""
        with self._lock:
            self._bar.set_description(words, refresh=False)
            self._bar.set_postfix(numbers)

    def begin(self, images: int) -> None:
        """Begin with so many images, beyond which `add` does not move the bar."""
        self._limit = self._bar.n + images

    def add(self, _: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
        """Move the bar by the rows whose loss was computed, in any thread. This is a
        forward hook of a criterion: it moves the bar within a step.
        """
        with self._lock:
            self._bar.update(min(len(inputs[0]), self._limit - self._bar.n))

    def report(self, done: int) -> None:
        """Set the bar to the images that are done. Without a terminal, print a line if
        the last one was printed some time ago.
        """
        with self._lock:
            self._bar.update(done - self._bar.n)
        now = time.perf_counter()
        if self._has_lines and now - self._said >= _LINE_SECONDS:
            self._said = now
            tqdm.write(printable(str(self._bar)), file=self._file)
            self._file.flush()

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        self._nowhere.close()
