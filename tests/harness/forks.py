"""Processes that begin where torch is imported already.

To import torch, with what an optimizer imports, takes three seconds of a core, and a fork next to
nothing. So they are forked from a server that imports and does nothing else: no thread, no engine,
no random number of one process is there in the next.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).parent.parent


def environment() -> dict[str, str]:
    """The environment of a script: this folder's modules and the package are importable."""
    path = [os.environ.get("PYTHONPATH", ""), str(TESTS), str(TESTS.parent)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def are_possible() -> bool:
    """Whether the system has forks from a server."""
    return "forkserver" in multiprocessing.get_all_start_methods()


def context() -> Any:
    """Of `multiprocessing`: its processes are forked from the server, or start from nothing.

    The training tool's workers come from the same server. Where one of them was first, it has
    imported less.
    """
    if not are_possible():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.imported"])
    with mock.patch.dict(os.environ, environment()):
        forkserver.ensure_running()
    return context
