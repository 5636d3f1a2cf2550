"""The arguments and results of checks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

REPOSITORY = Path(__file__).parents[3]


class NotRun(Exception):
    """A check cannot run on this machine; the message says why."""


class Finding(NamedTuple):
    """What a check found: whether the threshold holds, and the figures in words."""

    passed: bool
    words: str


@dataclass(frozen=True)
class Setting:
    """Where checks run.

    Attributes:
        devices: the machine's GPUs, or CPU replicas.
        small: tiny sizes, to try the checks.
        under: a module that prepares a process for null GPUs, or an empty string.
    """

    devices: tuple[torch.device, ...]
    small: bool
    under: str = ""

    @property
    def is_real(self) -> bool:
        """Whether these are GPUs that compute and take time."""
        return self.devices[0].type != "cpu" and not self.under

    def limit(self, seconds: float) -> float:
        """The time limit on this machine for a check that may take ``seconds`` on GPUs."""
        return seconds if self.is_real else 20 * seconds

    def start(
        self,
        *command: str,
        stdout: Any = subprocess.PIPE,
        session: bool = False,
        **environment: str,
    ) -> subprocess.Popen[str]:
        """Start ``python -m command``. Its output and its errors go to ``stdout``.

        With ``session`` it gets a process group of its own, which can be killed with its children.
        """
        path = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [sys.executable, "-u", "-m", *([self.under] if self.under else []), *command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)} | environment,
            start_new_session=session,
        )


class Check(NamedTuple):
    """One row of the page.

    Attributes:
        what: what is checked.
        threshold: when it passes.
        find: runs the check.
        seconds: the longest that it may take on GPUs.
        gpus: how many it needs.
        cuda: needs torch's CUDA, at least on null GPUs.
        real: what it needs that null GPUs do not have, such as time.
    """

    what: str
    threshold: str
    find: Callable[[Setting], Finding]
    seconds: float
    gpus: int = 1
    cuda: bool = False
    real: str = ""

    @property
    def needs(self) -> str:
        """What it needs, in words."""
        count = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"
        if self.real:
            return f"{count}: {self.real}"
        return f"{count} or null GPUs" if self.cuda else f"{count} or CPU replicas"

    def missing(self, setting: Setting) -> str:
        """What it needs and ``setting`` does not have, in words; empty if nothing is missing."""
        if setting.devices[0].type == "cpu" and self.cuda:
            return "CPU replicas have no CUDA"
        if len(setting.devices) < self.gpus:
            return f"{self.gpus} devices are needed, and {len(setting.devices)} are here"
        if self.real and setting.under:
            return f"null GPUs have no {self.real}"
        return ""
