"""Scripts in processes of their own, with a hard limit on their time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

Found = TypeVar("Found")
TESTS = Path(__file__).parent.parent
SECONDS = 110.0


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    """The environment of a script: this folder's modules and the package are importable."""
    path = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start Python with ``arguments``, and ``variables`` in its environment."""
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | variables,
    )


def finish(process: subprocess.Popen[str], seconds: float = SECONDS) -> Outcome:
    """Wait for a process; one that hangs is killed, and fails the test with what it said."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {seconds} s\n{out[-2000:]}\n{err}") from None
    return Outcome(process.returncode, out, err)


def finish_all(processes: dict[str, subprocess.Popen[str]]) -> dict[str, Outcome]:
    """Wait for all at once: each is read as it writes, since a full pipe would hold it up."""
    with ThreadPoolExecutor(len(processes)) as pool:
        return dict(zip(processes, pool.map(finish, processes.values()), strict=True))


def run(*arguments: str, seconds: float = SECONDS, **variables: str) -> Outcome:
    """Run Python with ``arguments`` to its end."""
    return finish(start(*arguments, **variables), seconds)


def run_on_layouts(
    layouts: Iterable[str], accelerator: dict[str, str], module: str, *arguments: str
) -> dict[str, Outcome]:
    """Run ``module`` with each layout, all at once; the simulated one only if it was built."""
    possible = [layout for layout in layouts if accelerator or layout != "accelerator"]
    return finish_all({n: start("-m", module, n, *arguments, **accelerator) for n in possible})


def of(outcomes: dict[str, Found], layout: str) -> Found:
    """What was found on ``layout``; skips the test if it could not be tried."""
    if layout not in outcomes:
        pytest.skip("there is no g++ to build the simulated accelerator")
    return outcomes[layout]
