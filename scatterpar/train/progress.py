"""Progress of reading and computing: a bar on stderr, or a line now and then."""

from __future__ import annotations

import shutil
import sys
import threading
from typing import Any, TextIO

from torch import Tensor, nn
from tqdm import tqdm

_LINE_SECONDS = 10.0  # between lines, without a terminal
_LINE = "{desc}{percentage:.0f}%, {rate_fmt}, {remaining} left{postfix}"
# tqdm's own lock is a semaphore of the system, which a killed process leaves behind.
tqdm.set_lock(threading.RLock())


class _Lines:
    """A file for tqdm, which gets a line in the place of each drawing of a bar."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        line = text.strip()  # tqdm returns to the start of a line, and clears it
        if line:
            print(line, file=self._file)

    def flush(self) -> None:
        self._file.flush()


class Progress(tqdm):  # type: ignore[misc]
    """A bar of images, which several threads may move. If stderr is no terminal, there
    are lines instead.
    """

    def __init__(
        self, total: int, done: int = 0, *, file: TextIO, is_shown: bool = True
    ) -> None:
        # tqdm starts no thread: every batch of images updates the bar.
        tqdm.monitor_interval = 0
        self._limit = total
        self._has_lines = not sys.stderr.isatty()
        options: dict[str, Any] = {}
        if self._has_lines:
            options["file"] = _Lines(file)
            options["bar_format"] = _LINE
            options["mininterval"] = _LINE_SECONDS
            options["delay"] = _LINE_SECONDS
        # A terminal may not know its size; tqdm would show nothing in one of 0 x 0.
        size = shutil.get_terminal_size()
        super().__init__(
            total=total,
            ncols=size.columns - 1,
            nrows=size.lines,
            initial=done,
            disable=not is_shown,
            unit=" images",
            unit_scale=True,
            leave=False,
            miniters=1,
            **options,
        )

    def describe(self, words: str, **numbers: str) -> None:
        """Show words before the bar, and numbers after it."""
        with self.get_lock():
            self.set_description(words, refresh=False)
            self.set_postfix(numbers, refresh=not self._has_lines)

    def begin(self, images: int) -> None:
        """Begin with so many images, beyond which `add` does not move the bar."""
        self._limit = self.n + images

    def add(self, _: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
        """Move the bar by the rows whose loss was computed, in any thread. This is a
        forward hook of a criterion: it moves the bar within a step.
        """
        with self.get_lock():
            self.update(min(len(inputs[0]), self._limit - self.n))

    def report(self, done: int) -> None:
        """Set the bar to the images that are done."""
        with self.get_lock():
            self.update(done - self.n)
