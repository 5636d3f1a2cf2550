"""The streams of calls: what replicas keep between calls is written and read in order.

::

    with torch.cuda.stream(a): engine(x)     replicas compute on the caller's streams,
    with torch.cuda.stream(b): engine(x)     and so does the backward pass of each call

Autograd knows the streams of the master's tensors. Parameters and gradients of the
other replicas it does not see: the streams of a call wait for those of the one before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from scatterpar.devices.streams import has_streams, use_device
from scatterpar.torch_private.autograd import current_graph_task


class StreamsOfCalls:
    """The streams of the calls of one module's replicas."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._master = devices[0]
        self._devices = list(dict.fromkeys(devices))
        self._present: dict[torch.device, torch.Stream] = {}  # of the last call
        self._earlier: set[torch.Stream] = set()  # of all calls

    @contextlib.contextmanager
    def of_call(self) -> Iterator[None]:
        """In the body, a call computes on the current streams.

        In a backward pass, where a checkpoint calls again, on those of the last call:
        the threads of autograd know the stream of their own device alone.
        """
        if current_graph_task() == -1 or not self._present:
            self.follow()
            yield
            return
        others = {d: s for d, s in self._present.items() if d != self._master}
        with use_device(self._master, list(others.values())):
            self.follow()
            yield
        # Outputs of the pair are read on the thread's streams.
        for device, stream in others.items():
            of_thread = torch.accelerator.current_stream(device)
            if of_thread != stream:
                of_thread.wait_stream(stream)

    def follow(self) -> None:
        """Let the caller's streams wait for the present ones, and take their place."""
        for device in self._devices:
            if not has_streams(device):
                continue
            stream = torch.accelerator.current_stream(device)
            before = self._present.get(device, stream)
            if stream != before:
                stream.wait_stream(before)
            self._present[device] = stream
            self._earlier.add(stream)

    @contextlib.contextmanager
    def used_by_node(self) -> Iterator[None]:
        """In the body, the backward pass of a node on the master, the present streams
        are current. They have waited for the streams of the passes around.
        """
        if not self._present:
            yield
            return
        # Autograd has made what arrives on the master ready for this stream.
        others: list[tuple[torch.Stream, torch.Stream]] = []
        for stream in self._earlier | {torch.accelerator.current_stream(self._master)}:
            present = self._present[stream.device]
            if stream != present:
                others.append((stream, present))
                present.wait_stream(stream)
        with use_device(self._master, list(self._present.values())):
            yield
        # The results are read there, and memory that was read is freed there.
        for stream, present in others:
            stream.wait_stream(present)

    def record(self, by_replica: Iterable[Mapping[int, torch.Tensor]]) -> None:
        """Memory of these tensors, maybe of other streams, is read on the present."""
        if len(self._earlier) <= len(self._present):
            return
        for tensors in by_replica:
            for tensor in tensors.values():
                if tensor.layout == torch.strided:
                    tensor.record_stream(self._present[tensor.device])

    def record_here(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Keep the memory of these tensors, which the master's current stream reads."""
        if len(self._earlier) <= len(self._present):
            return
        stream = torch.accelerator.current_stream(self._master)
        for tensor in tensors:
            if tensor is not None and tensor.layout == torch.strided:
                tensor.record_stream(stream)
