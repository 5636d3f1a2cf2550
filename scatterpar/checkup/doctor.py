"""``scatterpar.doctor()``: examine the machine, from its devices to the conclusions."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from json import dumps
from pathlib import Path

import torch

from scatterpar.checkup.copies import RouteResult, examine
from scatterpar.checkup.training import Speed, Step, measure, take_step
from scatterpar.checkup.verdicts import Verdict, on_copies, on_speed, on_step
from scatterpar.devices.runtime import DeviceLike, parse_devices, resolve

_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE"),
    *("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)


@dataclass
class Report:
    """The findings of ``doctor()``, in the order of the page, which ``print`` shows again."""

    devices: list[str]
    machine: dict[str, str]
    copies: list[RouteResult] = field(default_factory=list)
    step: Step | None = None
    speed: Speed | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    page: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong; slow is not wrong."""
        return not any(verdict.kind == "WRONG" for verdict in self.verdicts)

    @property
    def exit_code(self) -> int:
        """0: fine; 1: something is wrong."""
        return 0 if self.passed else 1

    def __str__(self) -> str:
        return self.page

    def __repr__(self) -> str:
        return f"<{'fine' if self.passed else 'WRONG'}: {len(self.verdicts)} verdicts>"

    def show(self, *findings: object) -> None:
        """Print findings at once, because a broken machine may hang in the next test."""
        for finding in findings:
            self.page += f"{finding}\n"
            print(finding, flush=True)


def doctor(
    devices: Sequence[DeviceLike] | None = None, json: str | os.PathLike[str] | None = None
) -> Report:
    """Examine this machine, for example a new one, or if a loss looks wrong.

    Prints what the machine has, whether copies between all memories arrive unaltered, whether one
    step on all devices has the gradient of one device, how fast the engine is, and conclusions.
    Takes less than a minute on a quiet machine. The caller's random generators and gradients are
    not changed.

    Args:
        devices: one entry per replica, like ``device_ids`` of ``ScatterOnceParallel``. Default:
            every visible accelerator, or two virtual devices if there is none.
        json: a file to write the findings to, as JSON.

    Returns:
        The findings: ``.passed``, ``.exit_code`` (0 fine, 1 something is wrong), ``.verdicts``,
        and the measurements.

    Raises:
        TypeError: ``devices`` is no list, or has an entry that is no device.
        ValueError: a device that this machine does not have.
        OSError: the file cannot be written.

    Example:
        .. code-block:: python

            import scatterpar

            report = scatterpar.doctor(devices=["cpu:0", "cpu:1"])
            assert report.passed, report
    """
    if devices is None and not torch.accelerator.is_available():
        devices = ("cpu:0", "cpu:1")
    places = resolve(devices)
    if json is not None:
        Path(json).open("ab").close()  # raises now if the file cannot be written
    load = load_per_core()  # before the measurements add to it
    report = Report([str(place) for place in places], describe(places, load))
    lines = (f"{name + ':':22} {words}" for name, words in report.machine.items())
    report.show("what there is", "-------------", *lines)
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        report.show("\ncopies", "------")
        for route in examine(places):
            report.copies.append(route)
            report.show(route)
        report.step = take_step(places)
        report.show("\none exact step", "--------------", report.step)
        report.speed = measure(places)
        report.show("\nspeed", "-----", report.speed)
    report.verdicts = [*on_copies(report.copies), *on_step(report.step)]
    report.verdicts += on_speed(places, report.speed, load)
    report.show("\nverdict", "-------", *report.verdicts)
    if json is not None:
        content = asdict(report) | {"exit_code": report.exit_code}
        Path(json).write_text(dumps(content, indent=2), encoding="utf-8")
    return report


def describe(devices: Sequence[torch.device], load: float) -> dict[str, str]:
    """Descriptions of the machine's parts, by name."""
    from scatterpar import __version__

    gil = "on" if getattr(sys, "_is_gil_enabled", lambda: True)() else "off"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    build = torch.version
    parts = {
        "scatterpar": __version__,
        "torch": f"{build.__version__}, CUDA {build.cuda}, ROCm {build.hip}",
        "Python": f"{platform.python_version()}, interpreter lock {gil}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{cores} cores for this process, {torch.get_num_threads()} torch threads",
        "load": f"{load:.1f} processes for each core",
        "IOMMU": "on" if any(Path("/sys/class/iommu").glob("*")) else "off or unknown",
        "variables": ", ".join(f"{n}={os.environ[n]}" for n in _VARIABLES if n in os.environ)
        or "none of those that matter here",
    }
    for device in dict.fromkeys(devices):
        module = torch.get_device_module(device)
        parts[str(device)] = "in the host's memory" if device.type == "cpu" else device.type
        if hasattr(module, "mem_get_info"):
            free = f"{module.mem_get_info(device)[0] / 2**30:.1f} GiB free"
            parts[str(device)] = f"{module.get_device_properties(device)}, {free}"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if any(device.type == "cuda" for device in devices):
            command = ["nvidia-smi", "topo", "-m"]
            run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            parts["nvidia-smi topo -m"] = "\n" + re.sub(r"\x1b\[\d*m", "", run.stdout).rstrip()
    return parts


def load_per_core() -> float:
    """The number of runnable processes per core, over the last minute; zero if unknown."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def main(arguments: Sequence[str]) -> int:
    """Run `python -m scatterpar doctor`. Returns the exit code: 0, 1, or 2 for a bad argument."""
    parser = argparse.ArgumentParser(
        prog="python -m scatterpar doctor",
        description="Examine this machine: devices, copies between them, one exact step, speed.",
        epilog="exit code: 0 nothing is wrong, 1 something is, 2 an argument is wrong",
    )
    devices_help = "one per replica, such as cuda:0,cuda:1 (default: all, else cpu:0,cpu:1)"
    parser.add_argument("--devices", nargs="+", metavar="DEVICE", help=devices_help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there too")
    options = parser.parse_args(arguments)  # exits with 2 by itself
    try:
        return doctor(parse_devices(options.devices or ()) or None, options.json).exit_code
    except (ValueError, TypeError, OSError) as error:
        print(f"scatterpar doctor: error: {error}", file=sys.stderr)
        return 2
