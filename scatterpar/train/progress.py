"""Progress of reading and computing: a bar on stderr, or a line now and then."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from typing import Any, TextIO

from torch import Tensor, nn
from tqdm import tqdm

from scatterpar.train.command_line import printable

_LINE_SECONDS = 10.0  # between lines, without a progress bar
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
        self._start: tuple[float, int] | None = None  # the time, and what was done
        self._said = time.perf_counter()
        # A terminal may not know its size; tqdm would show nothing in one of 0 x 0.
        size = shutil.get_terminal_size()
        self._bar: Any = tqdm(
            total=total,
            ncols=size.columns - 1,
            nrows=size.lines,
            initial=done,
            disable=None if is_shown else True,
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

    def report(self, done: int, words: str) -> None:
        """Set the bar to the images that are done. Without a bar, print a line with the
        words, if there are any, and if the last line was printed some time ago.
        """
        now = time.perf_counter()
        with self._lock:
            self._bar.update(done - self._bar.n)
        if self._start is None:
            # The first batch sets up the engine: estimates begin after it.
            self._start = (now, done)
            return
        if not self._bar.disable or not words or now - self._said < _LINE_SECONDS:
            return
        self._said = now
        started, done_before = self._start
        speed = (done - done_before) / (now - started)
        left = tqdm.format_interval((self._bar.total - done) / max(speed, 1e-9))
        line = f"{words}, {speed:,.0f} images/s, {left} left"
        tqdm.write(printable(line), file=self._file)
        self._file.flush()

    def __exit__(self, *_: object) -> None:
        self._bar.close()
