"""What the numbers were measured on."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

# Whose loops are timed beside the engine, as they are installed.
_PEERS = ("accelerate", "transformers", "lightning", "fastai")


def describe() -> dict[str, str]:
    """Date, processor, system, versions, and how busy the machine was at the start."""
    kind = f"{platform.system()} {platform.machine()}"
    libc = " ".join(platform.libc_ver())
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "intra-op threads": str(torch.get_num_threads()),
        "system": f"{kind}, {libc}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        **_versions(),
        "load average at the start": f"{os.getloadavg()[0]:.2f}",
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            _, _, name = line.partition(":")
            return name.strip()
    return platform.processor()


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PEERS:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
