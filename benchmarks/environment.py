"""What the numbers were measured on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def describe() -> dict[str, str]:
    """Processor, system, versions, and how busy the machine was at the start."""
    kind = f"{platform.system()} {platform.machine()}"
    libc = " ".join(platform.libc_ver())
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "intra-op threads": str(torch.get_num_threads()),
        "system": f"{kind}, {libc}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": _version("accelerate"),
        "load average at the start": f"{os.getloadavg()[0]:.2f}",
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            _, _, name = line.partition(":")
            return name.strip()
    return platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
