"""Capture the work that is launched on a device, and replay it as one launch: CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scatterpar import torch_private
from scatterpar.devices import runtime

_RECORDING: dict[torch.device, threading.Lock] = defaultdict(threading.Lock)  # of all engines


def can_record(device: torch.device) -> bool:
    """Whether a ``Recorder`` works on ``device``."""
    return device.type == "cpu" or hasattr(torch.get_device_module(device.type), "CUDAGraph")


class Recorder:
    """Captures work on one device, as graphs that share memory: they must not run at the same time.

    On the CPU nothing is captured; a replay calls the work itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for all graphs. Autograd nodes refer to it, and a traceback may keep them.
        self._stream = runtime.stream_for("recording", device)
        self._pool: Any = None
        self._session = contextlib.ExitStack()

    def forget(self) -> None:
        """Let later graphs use a separate memory pool."""
        self._pool = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Enter to warm up and capture: one recorder at a time per device with streams."""
        if self._stream is None:
            yield
            return
        self._pool = self._pool or torch.get_device_module(self._device).graph_pool_handle()
        with _RECORDING[self._device], runtime.recording(), contextlib.ExitStack() as self._session:
            try:
                yield
            except BaseException:
                self.forget()  # the pool may have been freed
                raise

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run the body on the capturing stream, in the memory pool of the graphs.

        A capture cannot use memory that torch has cached for other streams, so the memory of
        activations would be reserved twice.
        """
        if self._stream is None:
            yield
            return
        with self._on_stream(), torch_private.allocating(self._stream, self._pool) as release:
            self._session.callback(release)
            yield

    def record(self, work: Callable[..., None], *args: Any) -> Callable[..., None]:
        """Capture the kernels that ``work(*args)`` launches, without running them.

        Returns a function that replays the kernels, whatever its arguments; on the CPU that is
        ``work`` itself. ``work`` must not synchronize with the device.
        """
        if self._stream is None:
            return work
        gc.collect()  # else objects may be freed during the capture, and wait for the device
        graph = torch.get_device_module(self._device).CUDAGraph()
        with self._on_stream():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work(*args)
            except BaseException:
                torch_private.give_up_capture(graph, self._device, self._pool)
                raise
            graph.capture_end()
        return lambda *_: graph.replay()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run the body on the capturing stream, in order with the current stream's other work."""
        stream = self._stream
        assert stream is not None
        current = torch.accelerator.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with stream:
                yield
        finally:
            current.wait_stream(stream)
