"""What there is: versions, cards, memory, and what is between the cards."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["describe", "load_per_core"]

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_P2P_DISABLE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
_SECONDS = 10


def describe(devices: Sequence[torch.device], version: str) -> dict[str, str]:
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
