"""Rows as processes: each with a limit, some of them at the same time."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.card.page import FAILED, NOT_REACHED, NOT_RUN, Page
from benchmarks.card.rows import Group, Row
from benchmarks.card.setting import Setting

_LEAST = 5.0  # seconds; a row with less time does not begin
ROOT = Path(__file__).parents[2]
ROW = ["-m", "benchmarks.card.row"]


class Run:
    """All groups of rows, one after the other, within ``seconds``."""

    def __init__(self, setting: Setting, page: Page, seconds: float) -> None:
        self._setting = setting
        self._page = page
        self._begin = time.monotonic()
        self._seconds = seconds

    def take(self, group: Group, rows: Sequence[Row]) -> None:
        """Run the rows of one group, in their order, as many at a time as the group says.

        A row ends at its limit, or at the end of its group's part of the whole.
        """
        deadline = self._begin + group.until * self._seconds
        cores = os.cpu_count() or 1
        at_a_time = min(group.at_a_time, max(1, cores // 2))

        def run(row: Row) -> None:
            self._run(row, deadline)

        with ThreadPoolExecutor(at_a_time) as pool:
            # After Ctrl-C the rest of the iterator is dropped, and no more rows begin.
            for _ in pool.map(run, rows):
                pass

    def _run(self, row: Row, deadline: float) -> None:
        """Run one row, and write on the page what it says."""
        reason = row.reason_not_to_run(self._setting)
        if reason:
            self._page.add(row.name, reason, NOT_RUN)
            return
        seconds = min(row.limit, deadline - time.monotonic())
        if seconds < _LEAST:
            self._page.add(row.name, "the time of its group was over", NOT_REACHED)
            return
        name = re.sub("[^A-Za-z0-9]+", "-", row.name)
        log = self._setting.folder / f"{name}.txt"
        with (
            log.open("w") as file,
            _process(row, self._setting, seconds, file) as process,
        ):
            ended = threading.Event()
            timer = threading.Timer(seconds, _end_late, (process, ended))
            timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    self._page.add(*json.loads(line))
                code = process.wait()
            finally:
                timer.cancel()
        if ended.is_set():
            result = f"ended after {seconds:.0f} s; see {log.name}"
            self._page.add(row.name, result, NOT_REACHED)
        elif code:
            result = f"its process ended with {code}; see {log.name}"
            self._page.add(row.name, result, FAILED)


@contextlib.contextmanager
def _process(
    row: Row, setting: Setting, seconds: float, log: object
) -> Iterator[subprocess.Popen[str]]:
    """A process that runs the row, with all that it starts in a session of its own.

    It ends when its standard input does, so no row outlives this process.
    """
    until = time.time() + seconds
    arguments = {"row": row.name, "until": until, "setting": setting.as_json()}
    command = [sys.executable, "-W", "ignore", *ROW, json.dumps(arguments)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,  # type: ignore[call-overload]  # a file
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _kill(process)
        process.wait()


def _end_late(process: subprocess.Popen[str], ended: threading.Event) -> None:
    ended.set()
    _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
