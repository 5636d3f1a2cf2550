"""What a device was given is recorded once, and given to it again as one: CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scatterpar import torch_private
from scatterpar.devices import verbs

_RECORDING: dict[torch.device, threading.Lock] = defaultdict(threading.Lock)  # of all engines


def can_record(device: torch.device) -> bool:
    """Whether ``Recorder`` is known here."""
    return device.type == "cpu" or hasattr(torch.get_device_module(device.type), "CUDAGraph")


class Recorder:
    """Records work on one device, as graphs that share memory and never run at the same time.

    On the CPU nothing is recorded: the work itself is called again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for all graphs: nodes of autograd, which a traceback may hold, remember it.
        self._stream = verbs.stream_for("recording", device)
        self._pool: Any = None
        self._session = contextlib.ExitStack()

    def forget(self) -> None:
        """Share no memory with earlier graphs."""
        self._pool = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """The body warms up, once, and records; no other recorder of this device does meanwhile."""
        if self._stream is None:
            yield
            return
        self._pool = self._pool or torch.get_device_module(self._device).graph_pool_handle()
        with _RECORDING[self._device], verbs.recording(), contextlib.ExitStack() as self._session:
            try:
                yield
            except BaseException:
                self.forget()  # nobody may have kept the pool
                raise

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """The body's work is on the stream that records, in memory that it will record with.

        A recording cannot use memory that was cached elsewhere: activations would be there twice.
        """
        if self._stream is None:
            yield
            return
        with self._beside(), torch_private.allocating(self._stream, self._pool) as release:
            self._session.callback(release)
            yield

    def record(self, work: Callable[..., None], *args: Any) -> Callable[..., None]:
        """What gives the current device all that ``work(*args)`` would have given it, and has not.

        On the CPU that is ``work`` itself, with the arguments of each call. Nothing in ``work`` may
        wait for the device.
        """
        if self._stream is None:
            return work
        gc.collect()  # what is freed meanwhile may wait for the device
        graph = torch.get_device_module(self._device).CUDAGraph()
        with self._beside():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work(*args)
            except BaseException:
                torch_private.give_up_capture(graph, self._device, self._pool)
                raise
            graph.capture_end()
        return lambda *_: graph.replay()

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On the stream, between what the current one was given before and what comes later."""
        stream = self._stream
        assert stream is not None
        current = torch.accelerator.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with stream:
                yield
        finally:
            current.wait_stream(stream)
