"""The page: a table that grows by a line whenever a row has found something."""

import os
import platform
import threading
import time
from pathlib import Path

import torch

from benchmarks.card.setting import Setting
from scatterpar import __version__

NOT_REACHED = "not reached"
NOT_RUN = "not run"
FAILED = "FAILED"
PASSED = "passed"
MEASURED = "measured"  # nothing was predicted
_COLUMNS = "| check | result | verdict |\n|---|---|---|\n"


class Page:
    """A file that is complete after each line: whoever ends the run keeps what was found.

    Attributes:
        has_failed: whether a line has the verdict ``FAILED``.
    """

    def __init__(self, file: Path, setting: Setting) -> None:
        self._file = file
        self._lock = threading.Lock()  # several rows run at a time
        self._lines = 0
        self._begin = time.monotonic()
        self.has_failed = False
        file.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "scatterpar": __version__,
            "devices": " ".join(map(str, setting.devices)),
            "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
            "Python": f"{platform.python_version()}, {platform.platform()}",
            "cores": os.cpu_count(),
        }
        text = "".join(f"- {name}: {value}\n" for name, value in facts.items())
        if not setting.is_real:
            who = "null GPUs, or replicas on a processor"
            text += f"\n**No GPU computed this: {who}.**\n"
        file.write_text(f"{text}\n{_COLUMNS}", encoding="utf-8")

    def add(self, check: str, result: str, verdict: str) -> None:
        """Append a line, and see that it is on the disk."""
        cells = [_as_cell(text) for text in (check, result, verdict)]
        line = f"| {' | '.join(cells)} |\n"
        with self._lock:
            self._lines += 1
            self.has_failed |= verdict.startswith(FAILED)
            self._append(line)
        print(line, end="", flush=True)

    def end(self) -> None:
        """Say below the table how long all of it took."""
        minutes = (time.monotonic() - self._begin) / 60
        lines = f"{self._lines} lines in {minutes:.1f} minutes"
        self._append(f"\n{lines}, by `benchmarks card`.\n")

    def _append(self, text: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def _as_cell(text: str) -> str:
    """One line without the mark between cells."""
    return " ".join(text.replace("|", "/").split())
