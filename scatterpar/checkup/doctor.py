"""``scatterpar.doctor()``: the examination, from what there is to the verdict."""

from __future__ import annotations

import argparse
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from json import dumps
from pathlib import Path
from typing import Any

import torch

from scatterpar.checkup import copies, training
from scatterpar.checkup.copies import Route
from scatterpar.checkup.training import Speed, Step
from scatterpar.checkup.verdicts import Verdict, judge
from scatterpar.devices.verbs import DeviceLike, resolve

_WITHOUT_ACCELERATOR = ("cpu:0", "cpu:1")
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE"),
    *("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)
_SECONDS = 10


@dataclass
class Report:
    """What ``doctor()`` found, in the order of the page; ``print`` shows that again."""

    devices: list[str]
    machine: dict[str, str] = field(default_factory=dict)
    copies: list[Route] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    _lines: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong; slow is not wrong."""
        return not any(verdict.kind == "WRONG" for verdict in self.verdicts)

    @property
    def exit_code(self) -> int:
        """0: fine; 1: something is wrong."""
        return 0 if self.passed else 1

    def __str__(self) -> str:
        return "\n".join(self._lines).lstrip()

    def __repr__(self) -> str:
        return f"<{'fine' if self.passed else 'WRONG'}: {len(self.verdicts)} verdicts>"

    def show(self, *findings: object) -> None:
        """Print what was found, at once: a broken machine may hang in what comes next."""
        for finding in findings:
            self._lines.append(str(finding))
            print(finding, flush=True)

    def title(self, words: str) -> None:
        """The line above a section."""
        self.show(f"{chr(10) if self._lines else ''}{words}", "-" * len(words))

    def write(self, path: Path) -> None:
        """All of it as JSON; NaN and infinity become text, which JSON does not have."""
        content = {k: v for k, v in asdict(self).items() if not k.startswith("_")}
        content["exit_code"] = self.exit_code
        path.write_text(dumps(_plain(content), indent=2) + "\n", encoding="utf-8")


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
        devices = _WITHOUT_ACCELERATOR
    places = resolve(devices)
    if json is not None:
        Path(json).open("ab").close()  # a minute later is late for a name that cannot be written
    found = Report([str(place) for place in places])
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        _examine(places, found)
    if json is not None:
        found.write(Path(json))
    return found


def _examine(places: Sequence[torch.device], found: Report) -> None:
    from scatterpar import __version__

    load = load_per_core()  # before this adds to it
    found.title("what there is")
    found.machine = _describe(places, __version__)
    found.show(*(f"{name + ':':22} {words}" for name, words in found.machine.items()))
    found.title("copies")
    for route in copies.examine(places):
        found.copies.append(route)
        found.show(route)
    found.title("one exact step")
    for name in training.NETWORKS:
        found.steps.append(training.take_step(name, places))
        found.show(found.steps[-1])
    found.title("speed")
    for name in training.NETWORKS:
        found.speeds.append(training.measure(name, places, is_judged=load <= 1))
        found.show(found.speeds[-1])
    found.title("verdict")
    found.verdicts = judge(places, found.copies, found.steps, found.speeds, load)
    found.show(*found.verdicts)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _describe(devices: Sequence[torch.device], version: str) -> dict[str, str]:
    """The machine in words, by what is described."""
    built, cudnn = torch.version, torch.backends.cudnn
    lock = "on" if getattr(sys, "_is_gil_enabled", lambda: True)() else "off"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    iommu = Path("/sys/class/iommu")
    found = {
        "scatterpar": version,
        "torch": f"{built.__version__}, CUDA {built.cuda}, ROCm {built.hip}, "
        f"cuDNN {cudnn.version() if cudnn.is_available() else None}",
        "Python": f"{platform.python_version()}, interpreter lock {lock}",
        "system": f"{platform.system()} {platform.release().partition('-')[0]} "
        f"{platform.machine()}",
        "processor": f"{cores} cores for this process, {torch.get_num_threads()} torch threads",
        "host memory": _host_memory(),
        "load": f"{load_per_core():.1f} processes for each core",
        "IOMMU": ("on" if any(iommu.iterdir()) else "off") if iommu.is_dir() else "unknown",
        "variables": ", ".join(f"{n}={os.environ[n]}" for n in _VARIABLES if n in os.environ)
        or "none of those that matter here",
    }
    different = list(dict.fromkeys(devices))
    found |= {str(device): _device(device) for device in different}
    if any(device.type == "cuda" for device in different) and (links := _topology()):
        found["nvidia-smi topo -m"] = links
    return found


def load_per_core() -> float:
    """How many processes want each core, over the last minute; zero where nobody counts."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def _host_memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (AttributeError, ValueError, OSError):  # Windows
        return "unknown"


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        kind = "the host's memory" if device.index is None else "a virtual device, in host memory"
        return f"CPU replica, {kind}"
    module = torch.get_device_module(device)
    words = [device.type]
    if hasattr(module, "get_device_properties"):
        words = [str(module.get_device_properties(device))]
    if hasattr(module, "mem_get_info"):
        words.append(f"{module.mem_get_info(device)[0] / 2**30:.1f} GiB free")
    return ", ".join(words)


def _topology() -> str:
    asked = [shutil.which("nvidia-smi") or "", "topo", "-m"]
    try:
        shown = subprocess.run(asked, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "\n" + shown.stdout.replace("\x1b[4m", "").replace("\x1b[0m", "").rstrip()


def main(arguments: Sequence[str]) -> int:
    """`python -m scatterpar doctor`; returns the exit code.

    0: nothing is wrong; 1: something is; 2: an argument is wrong, with one line on stderr that
    says what; 130: interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="python -m scatterpar doctor",
        description="Examine this machine: what it has, whether copies between devices arrive as "
        "they were sent, whether a step on all devices is exact, how fast it is, and what to do.",
        epilog="exit code: 0 nothing is wrong, 1 something is, 2 an argument is wrong",
    )
    parser.add_argument(
        "--devices",
        nargs="+",
        metavar="DEVICE",
        help="one for each replica, such as cuda:0,cuda:1 or cpu:0 cpu:1; default: every "
        "accelerator, or two virtual devices (cpu:0,cpu:1) without any",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there too")
    given = parser.parse_args(arguments)  # ends the process with 2 itself
    names = [name.strip() for words in given.devices or () for name in words.split(",")]
    devices = [int(name) if name.isdecimal() else name for name in names]
    try:
        return doctor(None if given.devices is None else devices, given.json).exit_code
    except (ValueError, TypeError, OSError) as error:
        print(f"scatterpar doctor: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("scatterpar doctor: interrupted", file=sys.stderr)
        return 130
