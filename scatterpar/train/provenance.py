"""What made a run: written beside its results, so that it can be made again."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scatterpar.train.errors import UsageError

_PACKAGES = ("scatterpar", "torch", "torchvision", "numpy", "pillow")


def provenance(options: dict[str, Any], devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return options, versions, devices and the commit of the folder that the run started in."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "options": options,
        "versions": {"python": platform.python_version(), **_versions()},
        "system": platform.platform(),
        "devices": [_device(device) for device in devices],
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": (_git("status", "--porcelain") or "").splitlines(),
    }


def record(path: Path, values: dict[str, Any]) -> None:
    """Append to a list in a JSON file: a run that is resumed has several starts.

    Raises:
        UsageError: it cannot be written.
    """
    earlier: list[Any] = []
    with contextlib.suppress(OSError, json.JSONDecodeError):
        earlier = json.loads(path.read_text(encoding="utf-8"))
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(json.dumps([*earlier, values], indent=2, default=str), encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        raise UsageError(f"--out: {path} cannot be written: {error.strerror}") from error


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device}: {torch.cuda.get_device_name(device)}"


def _git(*arguments: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()
    return None
