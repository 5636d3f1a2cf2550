"""What there is: versions, cards, memory, and what is between the cards."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["IOMMU", "LOAD", "describe", "load_per_core"]

IOMMU, LOAD = "IOMMU", "load average"
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
    found = {
        "scatterpar": version,
        "torch": _torch(),
        "Python": f"{platform.python_version()}, interpreter lock {_lock()}",
        "system": f"{platform.system()} {_kernel()} {platform.machine()}",
        "processor": f"{cores()} cores for this process, {torch.get_num_threads()} torch threads",
        "host memory": _host_memory(),
        LOAD: _load(),
        IOMMU: _iommu(),
        "variables": ", ".join(f"{n}={os.environ[n]}" for n in _VARIABLES if n in os.environ)
        or "none of those that matter here",
    }
    for device in dict.fromkeys(devices):
        found[str(device)] = _device(device)
    found |= _peers(list(dict.fromkeys(devices)))
    if any(device.type == "cuda" for device in devices) and (links := _topology()):
        found["nvidia-smi topo -m"] = links
    return found


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_per_core() -> float:
    """How many processes want each core, over the last minute; zero where nobody counts."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def _torch() -> str:
    version = torch.version
    built = {"CUDA": version.cuda, "ROCm": version.hip, "XPU": getattr(version, "xpu", None)}
    runtimes = [f"{name} {number}" for name, number in built.items() if number]
    if torch.backends.cudnn.is_available():
        runtimes.append(f"cuDNN {torch.backends.cudnn.version()}")
    return ", ".join([version.__version__, *runtimes])


def _kernel() -> str:
    """The kernel's version, without what a distribution adds."""
    return platform.release().partition("-")[0]


def _lock() -> str:
    enabled = getattr(sys, "_is_gil_enabled", lambda: True)()
    return "on" if enabled else "off"


def _host_memory() -> str:
    try:
        return _size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # Windows
        return "unknown"


def _load() -> str:
    if not hasattr(os, "getloadavg"):
        return "unknown"
    return f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def _iommu() -> str:
    groups = Path("/sys/class/iommu")
    if not groups.is_dir():
        return "unknown"
    return "on" if any(groups.iterdir()) else "off"


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        kind = "the host's memory" if device.index is None else "a virtual device, in host memory"
        return f"CPU replica, {kind}"
    module = torch.get_device_module(device)
    words = [device.type]
    if hasattr(module, "get_device_properties"):
        properties: Any = module.get_device_properties(device)
        words = [properties.name]
        if hasattr(properties, "total_memory"):
            words.append(_size(properties.total_memory))
        if hasattr(properties, "major"):
            words.append(f"compute capability {properties.major}.{properties.minor}")
    if hasattr(module, "mem_get_info"):
        words.append(f"{_size(module.mem_get_info(device)[0])} free")
    return ", ".join(words)


def _peers(devices: Sequence[torch.device]) -> dict[str, str]:
    """Whether cards reach each other's memory without the host, by pair."""
    cards = [device for device in devices if device.type == "cuda"]
    return {
        f"{one} to {other}": "peer access"
        if torch.cuda.can_device_access_peer(one, other)
        else "no peer access: through the host's memory"
        for one in cards
        for other in cards
        if one != other
    }


def _topology() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        asked = [program, "topo", "-m"]
        shown = subprocess.run(asked, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "\n" + shown.stdout.replace("\x1b[4m", "").replace("\x1b[0m", "").rstrip()


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
