"""The parts of the run: what each is, and how it is run, ended and told of."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"

_Command = Callable[[Sequence[str], Path, bool], list[str]]


@dataclass(frozen=True)
class Part:
    """One process of the run.

    Attributes:
        name: of the part and of its files.
        title: on the page.
        seconds: when it is ended.
        command: what Python runs, by the devices, the folder, and whether all is to be tiny.
        sums_up: its last line tells the result.
    """

    name: str
    title: str
    seconds: float
    command: _Command
    sums_up: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a part went.

    Attributes:
        part: which one.
        code: of its process; ``None`` where it was ended.
        seconds: that it took.
        words: the same for people.
    """

    part: Part
    code: int | None
    seconds: float
    words: str

    @property
    def went_well(self) -> bool:
        """Whether it came to its end without an error."""
        return self.code == 0


def _tests(devices: Sequence[str], folder: Path, small: bool) -> list[str]:
    """Those marked ``cuda``; only their files, since to collect all takes long."""
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if "mark.cuda" in path.read_text()]
    options = ["-m", "cuda and not slow", "-q", "-p", "no:cacheprovider", "--color=no"]
    return ["pytest", *options, *map(str, files)]


def _doctor(devices: Sequence[str], folder: Path, small: bool) -> list[str]:
    names = ",".join(devices)
    return ["scatterpar", "doctor", "--devices", names, "--json", str(folder / "doctor.json")]


def _steps_of(network: str, seconds: float) -> _Command:
    def command(devices: Sequence[str], folder: Path, small: bool) -> list[str]:
        options = ["--devices", ",".join(devices), "--out", str(folder / f"{network}.json")]
        size = ["--small", "--seconds", "5"] if small else ["--seconds", f"{seconds:g}"]
        return ["benchmarks.card.steps", network, *options, *size]

    return command


def _on_the_first(module: str) -> _Command:
    def command(devices: Sequence[str], folder: Path, small: bool) -> list[str]:
        out = ["--out", str(folder / f"{module}.json")]
        return [f"benchmarks.card.{module}", "--device", devices[0], *out, *["--small"] * small]

    return command


def _assertion(devices: Sequence[str], folder: Path, small: bool) -> list[str]:
    return ["benchmarks.card.assertion", "--device", devices[0]]


# Together at most ten minutes, whatever happens.
PARTS = (
    Part("tests", "Tests marked `cuda`", 130, _tests, sums_up=True),
    Part("doctor", "The doctor", 60, _doctor),
    Part("inside", "The first card from inside", 110, _on_the_first("inside")),
    Part("launching", "Threads that launch", 40, _on_the_first("launching")),
    Part("assertion", "An assertion on the card", 25, _assertion, sums_up=True),
    Part("resnet50", "ResNet-50", 100, _steps_of("resnet50", 60)),
    Part("gpt2", "GPT-2 small", 100, _steps_of("gpt2", 60)),
)


def run_part(
    part: Part,
    devices: Sequence[str],
    folder: Path,
    small: bool,
    environment: dict[str, str],
    under: str | None = None,
) -> Outcome:
    """Run it to its end, or end it; what it prints goes to a file of its name.

    Args:
        part: which one.
        devices: one for each replica.
        folder: for its files.
        small: tiny sizes.
        environment: of its process.
        under: a module that readies the process for what it is given.
    """
    command = [*([under] if under else []), *part.command(devices, folder, small)]
    path = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
    log = folder / f"{part.name}.txt"
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | environment | {"PYTHONPATH": path},
            start_new_session=True,  # so that it can be ended with its children
        )
        code: int | None = None
        try:
            code = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - start
    return Outcome(part, code, seconds, _words(code, seconds, log, part.sums_up))


def _words(code: int | None, seconds: float, log: Path, sums_up: bool) -> str:
    if code == 0 and not sums_up:
        return f"done, in {seconds:.0f} s"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = f"; its last words: {lines[-1][:300]}" if lines else "; it said nothing"
    if code == 0:
        return f"done, in {seconds:.0f} s{last}"
    if code is None:
        return f"not done after {seconds:.0f} s, its limit, and ended{last}"
    how = f"signal {-code}" if code < 0 else f"code {code}"
    return f"FAILED with {how} after {seconds:.0f} s{last}"
