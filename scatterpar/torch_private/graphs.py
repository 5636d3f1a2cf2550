"""The capture of CUDA graphs: workspaces, and captures that failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


def free_cublas_workspaces() -> None:
    """Free the workspaces of cuBLAS, of which torch keeps one per handle and stream.

    Called after a capture: the next one then allocates its workspaces in the graph's
    own memory pool. Otherwise all graphs of a stream write to
    the same workspaces, and from torch 2.12 on the end of one graph frees them for all
    (https://github.com/pytorch/pytorch/issues/193402).
    """
    free: Callable[[], None] | None = getattr(
        torch._C, "_cuda_clearCublasWorkspaces", None
    )
    if free is not None:  # else torch was built without CUDA
        free()


@contextlib.contextmanager
def capturing_on(stream: torch.Stream, current: torch.Stream) -> Iterator[None]:
    """In the body ``stream`` is the current one, in order with ``current``.

    A capture runs no kernel but one: before torch 2.13 its beginning fills the seeds of
    generators, which replays on ``current`` read and fill.
    """
    stream.wait_stream(current)
    try:
        with stream:
            yield
    except BaseException:
        # On a device that has failed this fails, too: the body's error is the one.
        with contextlib.suppress(RuntimeError):
            current.wait_stream(stream)
        raise
    current.wait_stream(stream)


_LOST: list[Any] = []  # graphs whose capture failed, kept alive


def give_up_capture(
    graph: Any, device: torch.device, pool: Any, *, has_ended: bool
) -> None:
    """End the failed capture of a CUDA graph, so that operators on ``device`` work as
    before.

    Before torch 2.13, ``capture_end`` raises for an invalid capture before it informs
    the allocator and the generator. The allocator then still allocates in the graph's
    pool, and the generator refuses to draw, until the next successful capture. So this
    function captures a trivial graph.

    Args:
        graph: the graph that was captured.
        device: on which it was captured.
        pool: its memory.
        has_ended: whether it was ``capture_end`` that failed. A second call in torch
            2.12 leaves an error of CUDA behind, which the next operator raises.
    """
    if not has_ended:
        try:
            graph.capture_end()
            return
        except Exception:  # the caller raises the error that invalidated the capture
            pass
    # the allocator was informed
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        _LOST.append(graph)
        another = type(graph)()
        another.capture_begin(capture_error_mode="thread_local")
        # torch warns of a graph without a kernel
        torch.empty(1, device=device).zero_()
        another.capture_end()
