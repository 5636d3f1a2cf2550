"""The interpreters that are measured: this one, and a free-threaded one where there is
any.
"""

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


def commands() -> dict[str, list[str]]:
    """How each interpreter is started, by what it is called in the tables."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        found, free = {}, sys.executable
    else:
        found, free = {"this": [sys.executable]}, shutil.which(FREE_THREADED)
    # the same build both ways, so that the lock is the only difference
    if free is not None:
        found |= {"lock": [free, "-X", "gil=1"], "no lock": [free, "-X", "gil=0"]}
    return found


class Interpreter:
    """A process that measures when it is asked to, and sleeps while others do."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            [*command, "-m", "benchmarks.interpreter.measure"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.found = self._reply()
        lock = "with the lock" if self.found["lock"] else "without the lock"
        self.name = f"{self.found['python']} {lock}"

    def __call__(self, **request: Any) -> dict[str, float]:
        """The median seconds of what is requested."""
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
            raise RuntimeError(
                f"{self._process.args[0]} ended with code {self._process.wait()}; it "
                "needs torch"
            )
        return json.loads(line)
