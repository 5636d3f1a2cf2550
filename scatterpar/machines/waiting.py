"""Waiting for other ranks: who waits for one that was lost is told what for, and how long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch.distributed as dist

__all__ = ["waiting_for"]


@contextlib.contextmanager
def waiting_for(what: str, group: dist.ProcessGroup, *, still: str = "") -> Iterator[None]:
    """Around collectives of ``group`` alone: an error of theirs means that a rank is missing.

    Args:
        what: is waited for.
        group: whose ``timeout=`` is the time limit.
        still: what is as it was, for the error's text.

    Raises:
        RuntimeError: a rank was lost, or did not come in time; from torch's own error.
    """
    start = time.perf_counter()
    try:
        yield
    except RuntimeError as error:
        seconds = time.perf_counter() - start
        raise RuntimeError(
            f"rank {dist.get_rank(group)} of {dist.get_world_size(group)} waited {seconds:.1f} s "
            f"for {what}, and another rank was lost, or did not come within the process group's "
            f"timeout{still}. The group cannot be used any more: start all ranks again"
        ) from error
