"""The findings of an examination, as a page to paste and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from scatterpar.checkup.copies import Route
from scatterpar.checkup.exactness import Step
from scatterpar.checkup.speed import ENGINE, ONE, PER_CALL, Speed
from scatterpar.checkup.verdicts import Verdict

__all__ = ["Report"]


@dataclass
class Report:
    """What ``doctor()`` found; ``print`` shows the page again.

    Attributes:
        devices: one name per replica.
        machine: what there is, in words.
        copies: between every two memories.
        steps: exact or not.
        speeds: of the engine and of others.
        verdicts: what follows.
    """

    devices: list[str]
    machine: dict[str, str] = field(default_factory=dict)
    copies: list[Route] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong; slow is not wrong."""
        return not any(verdict.kind == "WRONG" for verdict in self.verdicts)

    @property
    def exit_code(self) -> int:
        """0: fine; 1: something is wrong."""
        return 0 if self.passed else 1

    def __str__(self) -> str:
        lines = [title("what there is"), *machine_lines(self.machine)]
        lines += [title("copies"), *map(copy_line, self.copies)]
        lines += [title("one exact step"), *map(step_line, self.steps)]
        lines += [title("speed"), *(line for speed in self.speeds for line in speed_lines(speed))]
        lines += [title("verdict"), *map(str, self.verdicts)]
        return "\n".join(lines).lstrip()

    def __repr__(self) -> str:
        return f"<{'fine' if self.passed else 'WRONG'}: {len(self.verdicts)} verdicts>"

    def write(self, path: Path) -> None:
        """All of it as JSON; NaN and infinity become text, which JSON does not have."""
        content = {**asdict(self), "exit_code": self.exit_code}
        path.write_text(json.dumps(_plain(content), indent=2) + "\n", encoding="utf-8")


def title(words: str) -> str:
    """The line above a section."""
    return f"\n{words}\n{'-' * len(words)}"


def machine_lines(machine: Mapping[str, str]) -> list[str]:
    """A line for each of the facts."""
    return [f"{name + ':':22} {words}" for name, words in machine.items()]


def copy_line(route: Route) -> str:
    """One way, and whether it is safe."""
    if route.error is not None:
        return f"{route.source:>12} to {route.target:12} failed: {route.error}"
    wrong = [f"{n} of {size} bytes altered" for size, n in route.altered.items() if n]
    result = "WRONG: " + ", ".join(wrong) if wrong else "whole"
    speed = f"{route.gigabytes_per_second:.2f} GB/s"
    return f"{route.source:>12} to {route.target:12} {speed:>12}  {result}"


def step_line(step: Step) -> str:
    """One comparison."""
    start = f"{step.problem}, {step.rows} rows, {step.dtype.removeprefix('torch.')}: "
    if step.error is not None:
        return f"{start}failed: {step.error}"
    result = "exact" if step.is_exact else "WRONG"
    return f"{start}{result}, {step.worst:.1e} apart at most ({step.parameter})"


def speed_lines(speed: Speed) -> list[str]:
    """What a step takes, and where the engine's goes."""
    lines = [f"{speed.problem}, a step of {speed.rows} rows:"]
    if speed.error is not None:
        return [*lines, f"  failed: {speed.error}"]
    for name in (ENGINE, PER_CALL, ONE):
        if name in speed.absent:
            lines.append(f"  {name + ':':22} not compared: {speed.absent[name]}")
            continue
        line = f"  {name + ':':22} {_milliseconds(speed.seconds[name])}"
        if name == ENGINE:
            parts = ", ".join(f"{k} {1e3 * v:.1f}" for k, v in speed.phases.items())
            line += f"  ({parts})"
        else:
            line += f"  (the engine takes {speed.ratio(name):.2f} of it)"
        lines.append(line)
    for name, paces in speed.paces.items():
        lines.append(f"  {name + ' alone:':22} {median(paces):8.1f} sub-steps a second")
    return lines


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1e3 * median(seconds):8.1f} ms"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
