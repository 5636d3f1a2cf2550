"""``scatterpar.doctor()``: the examination, from what there is to the verdict."""

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

from scatterpar.checkup.copies import Route, examine
from scatterpar.checkup.training import Speed, Step, measure, take_step
from scatterpar.checkup.verdicts import Verdict, on_copies, on_speed, on_step
from scatterpar.devices.runtime import DeviceLike, named, resolve

_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE"),
    *("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)


@dataclass
class Report:
    """What ``doctor()`` found, in the order of the page; ``print`` shows that again."""

    devices: list[str]
    machine: dict[str, str]
    copies: list[Route] = field(default_factory=list)
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
        """Print what was found, at once: a broken machine may hang in what comes next."""
        for finding in findings:
            self.page += f"{finding}\n"
            print(finding, flush=True)


def doctor(
    devices: Sequence[DeviceLike] | None = None, json: str | os.PathLike[str] | None = None
) -> Report:
    """Examine this machine: for a new one, and for a loss that looks wrong.

    Prints, as it goes, what there is, whether copies between all memories arrive as they were
    sent, whether one step on all devices has the gradient of one device, how fast the engine
    is, and what follows from that. Takes less than a minute on a quiet machine. Generators and
    gradients of the caller's stay as they are.

    Args:
        devices: one entry per replica, as ``device_ids`` of ``ScatterOnceParallel``. Default:
            every visible accelerator, or two virtual devices without any.
        json: a file for the findings as JSON.

    Returns:
        The findings: ``.passed``, ``.exit_code`` (0 fine, 1 something is wrong), ``.verdicts``
        and the rest of the page.

    Raises:
        TypeError: ``devices`` is no list, or has an entry that is no device.
        ValueError: a device that this machine does not have.
        OSError: the file cannot be written.

    Example:
        .. code-block:: python

            import scatterpar

            found = scatterpar.doctor(devices=["cpu:0", "cpu:1"])
            assert found.passed, found
    """
    if devices is None and not torch.accelerator.is_available():
        devices = ("cpu:0", "cpu:1")
    places = resolve(devices)
    if json is not None:
        Path(json).open("ab").close()  # a minute later is late for a name that cannot be written
    load = load_per_core()  # before this adds to it
    found = Report([str(place) for place in places], describe(places, load))
    lines = (f"{name + ':':22} {words}" for name, words in found.machine.items())
    found.show("what there is", "-------------", *lines)
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        found.show("\ncopies", "------")
        for route in examine(places):
            found.copies.append(route)
            found.show(route)
        found.step = take_step(places)
        found.show("\none exact step", "--------------", found.step)
        found.speed = measure(places)
        found.show("\nspeed", "-----", found.speed)
    found.verdicts = [*on_copies(found.copies), *on_step(found.step)]
    found.verdicts += on_speed(places, found.speed, load)
    found.show("\nverdict", "-------", *found.verdicts)
    if json is not None:
        content = asdict(found) | {"exit_code": found.exit_code}
        Path(json).write_text(dumps(content, indent=2), encoding="utf-8")
    return found


def describe(devices: Sequence[torch.device], load: float) -> dict[str, str]:
    """The machine in words, by what is described."""
    from scatterpar import __version__

    lock = "on" if getattr(sys, "_is_gil_enabled", lambda: True)() else "off"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    built = torch.version
    found = {
        "scatterpar": __version__,
        "torch": f"{built.__version__}, CUDA {built.cuda}, ROCm {built.hip}",
        "Python": f"{platform.python_version()}, interpreter lock {lock}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{cores} cores for this process, {torch.get_num_threads()} torch threads",
        "load": f"{load:.1f} processes for each core",
        "IOMMU": "on" if any(Path("/sys/class/iommu").glob("*")) else "off or unknown",
        "variables": ", ".join(f"{n}={os.environ[n]}" for n in _VARIABLES if n in os.environ)
        or "none of those that matter here",
    }
    for device in dict.fromkeys(devices):
        module = torch.get_device_module(device)
        found[str(device)] = "in the host's memory" if device.type == "cpu" else device.type
        if hasattr(module, "mem_get_info"):
            free = f"{module.mem_get_info(device)[0] / 2**30:.1f} GiB free"
            found[str(device)] = f"{module.get_device_properties(device)}, {free}"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if any(device.type == "cuda" for device in devices):
            asked = ["nvidia-smi", "topo", "-m"]
            run = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
            found["nvidia-smi topo -m"] = "\n" + re.sub(r"\x1b\[\d*m", "", run.stdout).rstrip()
    return found


def load_per_core() -> float:
    """How many processes want each core, over the last minute; zero where nobody counts."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def main(arguments: Sequence[str]) -> int:
    """`python -m scatterpar doctor`; returns the exit code: 0, 1, or 2 for a bad argument."""
    parser = argparse.ArgumentParser(
        prog="python -m scatterpar doctor",
        description="Examine this machine: devices, copies between them, one exact step, speed.",
        epilog="exit code: 0 nothing is wrong, 1 something is, 2 an argument is wrong",
    )
    devices_help = "one per replica, such as cuda:0,cuda:1 (default: all, else cpu:0,cpu:1)"
    parser.add_argument("--devices", nargs="+", metavar="DEVICE", help=devices_help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there too")
    given = parser.parse_args(arguments)  # ends the process with 2 itself
    try:
        return doctor(named(given.devices or ()) or None, given.json).exit_code
    except (ValueError, TypeError, OSError) as error:
        print(f"scatterpar doctor: error: {error}", file=sys.stderr)
        return 2
