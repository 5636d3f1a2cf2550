"""How long would a step take on 1, 2, 4 and 8 GPUs, all launched by one process?

    tests/nullcuda/run python -m benchmarks.many_cards.simulation

Nobody has run the engine on several real GPUs. Null GPUs (``tests/nullcuda``) say what
is launched, copied and waited for, in which order and by which thread. Here each entry
of such a trace gets a duration::

    thread      its entries run in order; a launch holds the GIL for a part of its time
    stream      kernels run in order, each from the time when it was launched at the
                earliest
    event       a stream, or the host, waits for what was recorded
    copy        its bytes over the speed of the link

Durations are arguments: the time in which the host launches a sub-step, that in which a
GPU computes it, a hand-over of the GIL, the links. Not in it: NVLink's topology, the
allocator, kernels that share a GPU, cores that are missing.
"""

from __future__ import annotations

import argparse
import heapq
import os
import pickle
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nullcuda.card import Record

ACCUM = 16
STEPS = 2  # that are recorded
GRAPHS = {"default": None, "on": True, "off": False}

# What a trace has beside launches, copies and waits.
_NO_WORK = {
    "read",
    "write",
    "not_done",
    "event_query",
    "stream_query",
    "context",
    "stream_create",
    "host_malloc",
    "host_free",
    "device_malloc",
    "device_free",
    "enable_peer",
}
_LAUNCHES = {"launch", "library", "graph_launch"}
_COPIES = {"copy_in", "copy_out", "copy_peer", "copy_within", "fill"}
_ON_STREAM = _LAUNCHES | _COPIES | {"event_record", "event_wait"}
_LARGE = ("gemm", "matmul", "convolution", "execute", "backend")

_MS = 1e-3
_US = 1e-6
_COPY_CALL = 5 * _US  # the host's time for a copy
_EVENT_CALL = 2 * _US
_WAKE_UP = 30 * _US  # of a thread that waited for an event
_PEER_LATENCY = 6 * _US
_HBM = 1.5e12  # bytes per second within a GPU
_PINNED = 25e9  # bytes per second from the host to a GPU
_SHARE_OF_LARGE = 0.7  # of the device's time: convolutions and matrix products
# Of the host's time for an eager sub-step, and of a forward pass in which the GIL is
# held. Measured for ResNet-50 and a GPT: 0.45 to 0.67.
_SHARE_OF_FORWARD = 0.58
_SHARE_OF_GIL = 0.6


@dataclass(frozen=True)
class Durations:
    """The durations of a machine, in seconds and bytes per second.

    Attributes:
        host: in which the host launches an eager sub-step.
        device: in which a GPU computes a sub-step.
        graph_launch: in which the host launches a captured sub-step.
        tape: what an operator costs more if it is written on a tape.
        hand_over: of the GIL to a thread that waits for it.
        link: the speed between two GPUs.
    """

    host: float
    device: float
    graph_launch: float
    tape: float
    hand_over: float
    link: float


@dataclass
class Trace:
    """Records in order, and what each of them comes after.

    Attributes:
        records: launches, copies, events and waits.
        predecessors: for each record the numbers of those that other threads must have
            done before.
        by_thread: the numbers of the records of each thread.
        python_threads: the caller's thread and the workers. The others are autograd's.
    """

    records: Sequence[Record]
    predecessors: list[list[int]] = field(default_factory=list)
    by_thread: dict[int, list[int]] = field(default_factory=dict)
    python_threads: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, records: Sequence[Record]) -> Trace:
        """The trace of these records."""
        trace = cls([record for record in records if record.kind not in _NO_WORK])
        trace.python_threads = {
            record.thread
            for record in trace.records
            if record.kind in ("hand_over", "take_over")
        } or {trace.records[0].thread}
        last_on_device: dict[tuple[int, bool], int] = {}
        last_event: dict[int, int] = {}
        caller = trace.caller
        # By key, and whether the caller hands work over, or a worker its results.
        handed_over: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        for number, record in enumerate(trace.records):
            predecessors: list[int] = []
            if record.device >= 0 and record.kind in _ON_STREAM:
                # Autograd's thread of a device goes on with what a worker began, and
                # the worker with what that thread did. Python's own threads hand over.
                is_of_python = record.thread in trace.python_threads
                last = last_on_device.get((record.device, not is_of_python))
                if last is not None:
                    predecessors.append(last)
                last_on_device[record.device, is_of_python] = number
            if record.kind == "event_record":
                last_event[record.address] = number
            waits = record.kind in ("event_wait", "event_sync")
            if waits and record.address in last_event:
                predecessors.append(last_event[record.address])
            is_caller = record.thread == caller
            if record.kind == "hand_over":
                handed_over[record.address, is_caller].append(number)
            if record.kind == "take_over":
                # A worker may begin when another one has ended, and does not wait for
                # it.
                predecessors += handed_over[record.address, not is_caller]
            trace.predecessors.append(predecessors)
            trace.by_thread.setdefault(record.thread, []).append(number)
        return trace

    @property
    def caller(self) -> int:
        """The thread that hands work over first: the caller's."""
        for record in self.records:
            if record.kind == "hand_over":
                return record.thread
        return self.records[0].thread

    @property
    def captured(self) -> bool:
        """Whether sub-steps are launched as graphs."""
        return any(record.kind == "graph_launch" for record in self.records)


@dataclass(frozen=True)
class Costs:
    """What one entry of a trace takes.

    Attributes:
        gil: of a launch in a forward pass, while the GIL is held.
        call: of a launch in a forward pass, without the GIL.
        backward_call: of a launch by autograd's threads.
        large: a convolution or matrix product on the GPU.
        small: any other kernel.
    """

    gil: float
    call: float
    backward_call: float
    large: float
    small: float


def costs_of(eager: Trace, durations: Durations) -> Costs:
    """The costs per entry, so that an eager sub-step on one GPU takes its durations."""
    substeps = STEPS * ACCUM
    launches = [r for r in eager.records if r.kind in ("launch", "library")]
    in_forward = sum(r.thread in eager.python_threads for r in launches)
    in_backward = len(launches) - in_forward
    large = sum(is_large(record) for record in launches)
    small = sum(record.kind == "launch" for record in launches)
    forward = _SHARE_OF_FORWARD * durations.host * substeps
    backward = durations.host * substeps - forward
    return Costs(
        gil=_SHARE_OF_GIL * forward / in_forward,
        call=(1 - _SHARE_OF_GIL) * forward / in_forward,
        backward_call=backward / max(in_backward, 1),
        large=_SHARE_OF_LARGE * durations.device * substeps / large,
        small=(1 - _SHARE_OF_LARGE) * durations.device * substeps / small,
    )


def is_large(record: Record) -> bool:
    """Whether a library computes a convolution or a matrix product."""
    name = record.name.lower()
    return record.kind == "library" and any(word in name for word in _LARGE)


class Simulation:
    """Runs a trace with durations.

    Attributes:
        end: when the last stream and the last thread are done, in seconds.
    """

    def __init__(self, trace: Trace, durations: Durations, costs: Costs) -> None:
        self._trace = trace
        self._durations = durations
        self._costs = costs
        self._threads: defaultdict[int, float] = defaultdict(float)
        self._streams: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._events: dict[int, float] = {}
        self._gil_is_free = 0.0
        self._gil_holder: int | None = None
        # In a captured step, what is launched eagerly is on tape.
        self._tape = durations.tape if trace.captured else 0.0
        self._run()
        self.end = max([*self._threads.values(), *self._streams.values()])

    def _run(self) -> None:
        """Run all entries: each thread's in order, the earliest first."""
        trace = self._trace
        done: dict[int, float] = {}
        positions = dict.fromkeys(trace.by_thread, 0)
        waiting: defaultdict[int, list[int]] = defaultdict(list)
        ready: list[tuple[float, int, int]] = []

        def enqueue(thread: int) -> None:
            numbers = trace.by_thread[thread]
            if positions[thread] == len(numbers):
                return
            number = numbers[positions[thread]]
            predecessors = trace.predecessors[number]
            for predecessor in predecessors:
                if predecessor not in done:
                    waiting[predecessor].append(thread)
                    return
            times = [done[predecessor] for predecessor in predecessors]
            start = max([self._threads[thread], *times])
            heapq.heappush(ready, (start, number, thread))

        for thread in trace.by_thread:
            enqueue(thread)
        while ready:
            start, number, thread = heapq.heappop(ready)
            start = max(start, self._threads[thread])
            end = self._entry(trace.records[number], start)
            self._threads[thread] = end
            done[number] = end
            positions[thread] += 1
            for other in waiting.pop(number, []):
                enqueue(other)
            enqueue(thread)

    def _entry(self, record: Record, start: float) -> float:
        """Run one entry. Returns when its thread goes on."""
        if record.kind in _LAUNCHES:
            return self._launch(record, start)
        if record.kind in _COPIES:
            return self._copy(record, start)
        stream = record.device, record.stream
        match record.kind:
            case "event_record":
                start += _EVENT_CALL
                self._events[record.address] = max(self._streams[stream], start)
            case "event_wait":
                start += _EVENT_CALL
                event = self._events.get(record.address, 0.0)
                self._streams[stream] = max(self._streams[stream], event)
            case "event_sync":
                event = self._events.get(record.address, 0.0)
                start = max(start, event) + _WAKE_UP
            case "stream_sync":
                start = max(start, self._streams[stream])
            case "device_sync":
                for (device, _), time in self._streams.items():
                    if device == record.device:
                        start = max(start, time)
        return start

    def _launch(self, record: Record, start: float) -> float:
        """Launch a kernel or a graph. Returns when the thread goes on."""
        costs = self._costs
        if record.kind == "graph_launch":
            end = self._with_gil(record.thread, start, self._durations.graph_launch)
            self._on_stream(record, end, self._durations.device)
            return end
        if record.thread in self._trace.python_threads:
            end = self._with_gil(record.thread, start, costs.gil + self._tape)
            end += costs.call
        else:
            # A tape is Python, which autograd's threads run with the GIL, too.
            if self._tape:
                start = self._with_gil(record.thread, start, self._tape)
            end = start + costs.backward_call
        if record.kind == "launch":
            self._on_stream(record, end, costs.small)
        elif is_large(record):
            self._on_stream(record, end, costs.large)
        return end

    def _copy(self, record: Record, start: float) -> float:
        """Start a copy. Returns when the thread goes on."""
        start += _COPY_CALL
        match record.kind:
            case "copy_in" | "copy_out":
                seconds = _COPY_CALL + record.bytes / _PINNED
            case "copy_peer":
                seconds = _PEER_LATENCY + record.bytes / self._durations.link
            case _:
                seconds = record.bytes / _HBM
        end = self._on_stream(record, start, seconds)
        return max(start, end) if record.blocks else start

    def _on_stream(self, record: Record, start: float, seconds: float) -> float:
        """The stream works from ``start`` at the earliest. Returns when it is done."""
        stream = record.device, record.stream
        self._streams[stream] = max(start, self._streams[stream]) + seconds
        return self._streams[stream]

    def _with_gil(self, thread: int, start: float, seconds: float) -> float:
        """Hold the GIL for a while, when it is free. Returns when it is released."""
        begin = max(start, self._gil_is_free)
        is_contended = self._gil_is_free > start - 5 * _US
        if self._gil_holder not in (None, thread) and is_contended:
            begin += self._durations.hand_over
        self._gil_is_free = begin + seconds
        self._gil_holder = thread
        return self._gil_is_free


def traced(network: str, cards: int, graphs: str, folder: Path) -> Trace:
    """The trace of two steps, made in a process of its own."""
    file = folder / f"{network}-{cards}-{graphs}.pickle"
    if not file.exists():
        module = "benchmarks.many_cards.launch_trace"
        command = [sys.executable, "-W", "ignore", "-m", module, network, str(cards)]
        environment = os.environ | {"NULLCUDA_DEVICES": str(cards)}
        command += [str(file), "--graphs", graphs]
        subprocess.run(command, env=environment, check=True)
    records = pickle.loads(file.read_bytes())
    return Trace.of([Record(*fields) for fields in records])


def print_table(options: Any, folder: Path) -> None:
    """Print steps of each number of GPUs, beside what the GPUs compute."""
    print(
        "Steps of 16 sub-steps, in times of what each GPU computes. Where there are two"
    )
    print(f"numbers, a hand-over of the GIL takes 0 and {options.hand_over:g} us.\n")
    columns = "".join(f" {cards} |" for cards in options.cards)
    print(f"| network | graphs | host, ms | link, GB/s |{columns}")
    print("|---|---|---:|---:|" + "---:|" * len(options.cards), flush=True)
    for network in options.network:
        eager = traced(network, 1, "off", folder)
        for graphs in options.graphs:
            traces = [traced(network, n, graphs, folder) for n in options.cards]
            for host in options.host:
                for link in options.link:
                    cells = [
                        _cell(eager, trace, host, link, options) for trace in traces
                    ]
                    head = f"| {network} | {graphs} | {host:g} | {link:g} |"
                    print(f"{head} {' | '.join(cells)} |", flush=True)


def _cell(eager: Trace, trace: Trace, host: float, link: float, options: Any) -> str:
    ratios: list[float] = []
    for hand_over in (0.0, options.hand_over):
        durations = Durations(
            host=host * _MS,
            device=options.device * _MS,
            graph_launch=options.graph_launch * _US,
            tape=options.tape * _US,
            hand_over=hand_over * _US,
            link=link * 1e9,
        )
        simulation = Simulation(trace, durations, costs_of(eager, durations))
        ratios.append(simulation.end / STEPS / (ACCUM * durations.device))
    low = f"{ratios[0]:.2f}"
    high = f"{ratios[1]:.2f}"
    return low if low == high else f"{low} to {high}"


def main(arguments: Sequence[str]) -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., Any] = parser.add_argument
    add("--network", nargs="+", default=["resnet50", "gpt"])
    add("--cards", nargs="+", type=int, default=[1, 2, 4, 8])
    add("--graphs", nargs="+", choices=GRAPHS, default=["off", "default"])
    add("--host", nargs="+", type=float, default=[26, 10], help="ms per sub-step")
    add("--device", type=float, default=28, help="ms per sub-step")
    add("--link", nargs="+", type=float, default=[300, 20], help="GB/s")
    add("--hand-over", type=float, default=8, help="of the GIL, in us")
    add("--graph-launch", type=float, default=200, help="us")
    add("--tape", type=float, default=15, help="us per operator")
    add("--folder", type=Path, help="keeps the traces for the next run")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print_table(options, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
