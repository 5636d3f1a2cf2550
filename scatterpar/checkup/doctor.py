"""``scatterpar.doctor()``: examine the machine, from its devices to the conclusions."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from json import dumps
from pathlib import Path

import torch
from torch.utils.collect_env import get_pretty_env_info

from scatterpar.checkup.copies import DoctorVerdict, RouteResult, examine, on_copies
from scatterpar.checkup.small_step import (
    Speed,
    StepComparison,
    measure,
    on_speed,
    on_step,
    take_step,
)
from scatterpar.devices.device_ids import DeviceLike, parse_devices, resolve
from scatterpar.devices.links import TO_THE_DOCTOR
from scatterpar.version import __version__

# Environment variables with these beginnings change how devices or collectives work.
_PREFIXES = ("CUDA_", "NCCL_", "OMP_", "PYTORCH_")
# Long lines of torch's page that say nothing about training.
_LEFT_OUT = ("Vulnerability", "Flags:")


@dataclass
class Report:
    """The findings of ``doctor()``. ``print`` shows the page again: verdicts, then the
    measurements behind them, then the machine.
    """

    devices: list[str]
    machine: dict[str, str]
    copies: list[RouteResult] = field(default_factory=list)
    step: StepComparison | None = None
    speed: Speed | None = None
    verdicts: list[DoctorVerdict] = field(default_factory=list)
    page: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong; slow is not wrong."""
        return not any(verdict.kind == "WRONG" for verdict in self.verdicts)

    @property
    def exit_code(self) -> int:
        """0 if all is fine, 1 if something is wrong."""
        return int(not self.passed)

    def __str__(self) -> str:
        return self.page

    def __repr__(self) -> str:
        numbers = Counter(verdict.kind for verdict in self.verdicts)
        kinds = [f"{number} {kind}" for kind, number in numbers.items()]
        return f"<verdicts: {', '.join(kinds)}>"

    def show(self, *findings: object) -> None:
        """Print findings at once, because a broken machine may hang in the next
        test.
        """
        for finding in findings:
            if isinstance(finding, DoctorVerdict):
                self.verdicts.append(finding)
            self.page += f"{finding}\n"
            print(finding, flush=True)

    @contextlib.contextmanager
    def section(self, title: str) -> Iterator[None]:
        """A heading. If the body raises, that is a verdict, and the next section
        follows.
        """
        # The page begins with a heading, without a line above it.
        above = "\n" if self.page else ""
        line = "-" * len(title)
        self.show(f"{above}{title}\n{line}")
        try:
            yield
        except Exception as error:
            text = f"{title} failed: {type(error).__name__}: {error}"
            text = text.removesuffix(TO_THE_DOCTOR)
            self.show(DoctorVerdict("WRONG", text))


def doctor(
    devices: Sequence[DeviceLike] | None = None,
    json: str | os.PathLike[str] | None = None,
) -> Report:
    """Examine this machine, for example a new one, or if a loss looks wrong.

    Prints verdicts first: whether copies between all memories arrive unaltered, whether
    one step on all devices has the gradient of one device, and how fast the engine is.
    The measurements follow, and last what the machine has. Takes half a minute on two
    GPUs, and about a minute on eight. Changes no random generator.

    Args:
        devices: one entry per replica, like ``device_ids`` of ``ScatterOnceParallel``.
            Default: every visible accelerator, or two virtual devices if there is none.
        json: a file to write the findings to, as JSON.

    Returns:
        The findings, with ``.passed``, ``.exit_code`` (0 fine, 1 something is wrong),
        ``.verdicts``, and the measurements.

    Raises:
        TypeError: ``devices`` is no list, or has an entry that is no device.
        ValueError: a device that this machine does not have.
        OSError: the file cannot be written.
    """
    if devices is None and not torch.accelerator.is_available():
        devices = ("cpu:0", "cpu:1")
    places = resolve(devices)
    if json is not None:
        Path(json).open("ab").close()  # raises now if the file cannot be written
    load = load_per_core()  # before the measurements add to it
    report = Report([str(place) for place in places], describe(load))
    # The caller may train under another mode or default device. The doctor's networks
    # need gradients, and tensors on the host.
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        with report.section("copies"):
            for route in examine(places):
                report.copies.append(route)
                # Of a copy that hangs, the terminal shows the one before.
                if sys.stderr.isatty():
                    print(route, file=sys.stderr, flush=True)
            report.show(*on_copies(report.copies))
        with report.section("one exact step"):
            report.step = take_step(places)
            report.show(*on_step(report.step))
        with report.section("speed"):
            report.speed = measure(places)
            report.show(*on_speed(places, report.speed, load))
    report.show(f"\n{report!r}")
    with report.section("measurements"):
        # What failed has none.
        report.show(*filter(None, [*report.copies, report.step, report.speed]))
    # Last, because it is long, and the same in every report of this machine.
    with report.section("machine"):
        for name, words in report.machine.items():
            report.show(f"{name}: {words}")
    if json is not None:
        findings = asdict(report)
        findings["exit_code"] = report.exit_code
        Path(json).write_text(dumps(findings, indent=2), encoding="utf-8")
    return report


def describe(load: float) -> dict[str, str]:
    """Describe the machine: torch's page, and the devices that it leaves out."""
    variables: list[str] = []
    for name, value in os.environ.items():
        if name.startswith(_PREFIXES):
            variables.append(f"{name}={value}")
    lines: list[str] = []
    for line in get_pretty_env_info().splitlines():
        if not line.startswith(_LEFT_OUT):
            lines.append(line)
    page = "\n".join(lines)
    has_iommu = any(Path("/sys/class/iommu").glob("*"))
    return {
        "scatterpar": __version__,
        "load": f"{load:.1f} processes for each core",
        "IOMMU": "on" if has_iommu else "off or unknown",
        "variables": ", ".join(sorted(variables)) or "none of those that matter here",
        "torch.utils.collect_env": f"\n{page}",
    }


def load_per_core() -> float:
    """The number of runnable processes per core, over the last minute;
    zero if unknown.
    """
    if not hasattr(os, "getloadavg"):
        return 0.0
    load, *_ = os.getloadavg()
    return load / (os.cpu_count() or 1)


def main(arguments: Sequence[str]) -> int:
    """Run `python -m scatterpar doctor`. Returns the exit code: 0, 1, or 2 for a bad
    argument.
    """
    parser = argparse.ArgumentParser(
        prog="python -m scatterpar doctor",
        description="Examine this machine: devices, copies between them, one exact "
        "step, speed.",
        epilog="exit code: 0 nothing is wrong, 1 something is, 2 an argument is wrong",
    )
    words = "one per replica, such as cuda:0,cuda:1 (default: all, else cpu:0,cpu:1)"
    parser.add_argument(
        "--devices", nargs="+", metavar="DEVICE", default=(), help=words
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the findings there too"
    )
    options = parser.parse_args(arguments)  # exits with 2 by itself
    try:
        devices = parse_devices(options.devices) or None
        report = doctor(devices, options.json)
    except (ValueError, TypeError, OSError) as error:
        print(f"scatterpar doctor: error: {error}", file=sys.stderr)
        return 2
    return report.exit_code
