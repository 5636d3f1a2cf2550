"""The interpreters that are measured: this one, and a free-threaded one if there is any."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
FREE_THREADED = "python3.14t"


def commands() -> list[list[str]]:
    """The command of each interpreter: this one, a free-threaded one with the GIL and without."""
    interpreters = []
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        free_threaded = sys.executable
    else:
        interpreters.append([sys.executable])
        free_threaded = shutil.which(FREE_THREADED)
    if free_threaded is not None:
        # The same build both ways, so that the GIL is the only difference.
        interpreters.append([free_threaded, "-X", "gil=1"])
        interpreters.append([free_threaded, "-X", "gil=0"])
    return interpreters


class Interpreter:
    """A process that measures at request, and sleeps while other interpreters do.

    Attributes:
        name: its version, with the lock or without.
        has_lock: whether it runs with the GIL.
    """

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            [*command, "-m", "benchmarks.interpreter.measure"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        description = self._reply()
        self.has_lock = description["lock"]
        lock = "with the lock" if self.has_lock else "without the lock"
        self.name = f"{description['python']} {lock}"

    def __call__(self, **request: Any) -> dict[str, float]:
        """The seconds of the request's parts. See ``measure.py`` for what it names."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _reply(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            program = self._process.args[0]
            code = self._process.wait()
            raise RuntimeError(f"{program} ended with code {code}; it needs torch")
        return json.loads(line)
