"""What the numbers were measured on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def describe() -> dict[str, str]:
    """Processor, operating system, versions, and how busy the machine
    was at the start.
    """
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "intra-op threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}, "
        f"{' '.join(platform.libc_ver())}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": _version("accelerate"),
        "load average at the start": f"{os.getloadavg()[0]:.2f}",
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
