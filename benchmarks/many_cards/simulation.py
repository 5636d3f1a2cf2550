"""How long would a step take on several GPUs, all launched by one process?

    tests/nullcuda/run python -m benchmarks.many_cards.simulation

Nobody has run the engine on several real GPUs. Null GPUs (``tests/nullcuda``) say what
is launched, copied and waited for, in which order and by which thread, and how long the
thread has computed before each of these records. Here time is given to them::

    thread      computes before each record for as long as on null GPUs, times a factor:
                an eager sub-step takes the host's time. It holds the GIL for a part of
                this, and a core
    stream      kernels run in order, each from the time when it was launched at the
                earliest
    event       a stream, or the host, waits for what was recorded
    copy        its bytes over the speed of the link

So Python's work between two launches, on a tape, or while it looks after parameters, is
in it as it was measured. Not in it: NVLink's topology, the allocator, kernels that
share a GPU, memory bandwidth that several threads share.
"""

from __future__ import annotations

import argparse
import heapq
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from nullcuda.card import Record

from benchmarks.many_cards.traces import (
    BASELINE_ACCUM,
    COPIES,
    LAUNCHES,
    Case,
    Trace,
    Traced,
    is_large,
    traced,
)

_MS = 1e-3
_US = 1e-6
_SHARE_OF_LARGE = 0.7  # of the device's time: convolutions and matrix products
# Of the host's time the part in which a thread holds the GIL, if it runs Python.
# Measured for forward passes of ResNet-50 and a GPT: 0.45 to 0.67.
_SHARE_OF_GIL = 0.6
# Bytes of the inputs of a micro-batch: 128 images, 12 x 1,024 tokens.
_MICRO_BATCHES = {"resnet50": 128 * 3 * 224 * 224 * 4, "gpt": 12 * 1024 * 8}


@dataclass(frozen=True)
class Machine:
    """The durations of a machine, in seconds and bytes per second.

    Attributes:
        pace: seconds of its host per second that a thread has computed in the trace.
        sub_step: in which a GPU computes a sub-step.
        large: a convolution or matrix product on the GPU.
        small: any other kernel.
        graph_launch: in which the driver launches a graph.
        hand_over: of the GIL to a thread that waits for it.
        link: the speed between two GPUs.
        cores: of the host.
        copied_bytes: a copy of so many bytes in the trace has others here.
        wake_up: of a thread that waited for an event.
        latency: of a copy.
        pinned: bytes per second from the host's pinned memory to a GPU.
        pageable: bytes per second that a thread copies from pageable memory to pinned
            memory; measured on an H200's host (card/h200.md).
        device_memory: bytes per second within a GPU.
    """

    pace: float
    sub_step: float
    large: float
    small: float
    graph_launch: float
    hand_over: float
    link: float
    cores: int
    copied_bytes: tuple[tuple[int, int], ...] = ()
    wake_up: float = 30 * _US
    latency: float = 6 * _US
    pinned: float = 25e9
    pageable: float = 7.2e9
    device_memory: float = 1.5e12

    @classmethod
    def null(cls, *, hand_over: float, cores: int) -> Machine:
        """This machine with null GPUs, where nothing on a GPU takes time."""
        return cls(
            pace=1.0,
            sub_step=0.0,
            large=0.0,
            small=0.0,
            graph_launch=0.0,
            hand_over=hand_over,
            link=inf,
            cores=cores,
            wake_up=0.0,
            latency=0.0,
            pinned=inf,
            pageable=inf,
            device_memory=inf,
        )

    @classmethod
    def beside(
        cls,
        baseline: Trace,
        *,
        host: float,
        sub_step: float,
        copied_bytes: tuple[tuple[int, int], ...] = (),
        graph_launch: float = 200 * _US,
        hand_over: float = 0.0,
        link: float = 300e9,
        cores: int = 16,
    ) -> Machine:
        """The machine on which an eager sub-step of ``baseline`` takes these times.

        Args:
            baseline: a step of one GPU without graphs.
            host: seconds in which the host launches a sub-step.
            sub_step: seconds in which a GPU computes it.
        """
        launches = baseline.records
        num_large = sum(map(is_large, launches)) / BASELINE_ACCUM
        num_small = sum(record.kind == "launch" for record in launches) / BASELINE_ACCUM
        return cls(
            pace=host * BASELINE_ACCUM / baseline.host_seconds,
            sub_step=sub_step,
            large=_SHARE_OF_LARGE * sub_step / max(num_large, 1),
            small=(1 - _SHARE_OF_LARGE) * sub_step / max(num_small, 1),
            graph_launch=graph_launch,
            hand_over=hand_over,
            link=link,
            cores=cores,
            copied_bytes=copied_bytes,
        )


class Simulation:
    """Runs a trace on a machine.

    Attributes:
        end: when the last stream and the last thread are done, in seconds.
    """

    def __init__(self, trace: Trace, machine: Machine) -> None:
        self._trace = trace
        self._machine = machine
        self._copied_bytes = dict(machine.copied_bytes)
        self._threads: defaultdict[int, float] = defaultdict(float)
        self._streams: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._events: dict[int, float] = {}
        self._gil_is_free = 0.0
        self._gil_holder: int | None = None
        self._cores_are_free = [0.0] * machine.cores
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
            end = self._entry(number, start)
            self._threads[thread] = end
            done[number] = end
            positions[thread] += 1
            for other in waiting.pop(number, []):
                enqueue(other)
            enqueue(thread)

    def _entry(self, number: int, start: float) -> float:
        """Run one entry. Returns when its thread goes on."""
        record = self._trace.records[number]
        machine = self._machine
        start = self._compute(record, start, machine.pace * self._trace.gaps[number])
        if record.kind == "graph_launch":
            start += machine.graph_launch
            self._on_stream(record, start, machine.sub_step)
        elif record.kind in LAUNCHES:
            if record.kind == "launch":
                self._on_stream(record, start, machine.small)
            elif is_large(record):
                self._on_stream(record, start, machine.large)
        elif record.kind in COPIES:
            return self._copy(record, start)
        return self._wait(record, start)

    def _wait(self, record: Record, start: float) -> float:
        """Events and synchronisations. Returns when the thread goes on."""
        stream = record.device, record.stream
        match record.kind:
            case "event_record":
                self._events[record.address] = max(self._streams[stream], start)
            case "event_wait":
                event = self._events.get(record.address, 0.0)
                self._streams[stream] = max(self._streams[stream], event)
            case "event_sync":
                event = self._events.get(record.address, 0.0)
                if event > start:
                    start = event + self._machine.wake_up
            case "stream_sync":
                start = max(start, self._streams[stream])
            case "device_sync":
                for (device, _), time in self._streams.items():
                    if device == record.device:
                        start = max(start, time)
        return start

    def _copy(self, record: Record, start: float) -> float:
        """Start a copy. Returns when the thread goes on."""
        machine = self._machine
        num_bytes = self._copied_bytes.get(record.bytes, record.bytes)
        match record.kind:
            case "copy_in" | "copy_out":
                seconds = machine.latency + num_bytes / machine.pinned
                if record.pageable:  # the thread copies to pinned memory first
                    start = self._on_core(start, num_bytes / machine.pageable)
            case "copy_peer":
                seconds = machine.latency + num_bytes / machine.link
            case _:
                seconds = num_bytes / machine.device_memory
        end = self._on_stream(record, start, seconds)
        return max(start, end) if record.blocks else start

    def _on_stream(self, record: Record, start: float, seconds: float) -> float:
        """The stream works from ``start`` at the earliest. Returns when it is done."""
        stream = record.device, record.stream
        self._streams[stream] = max(start, self._streams[stream]) + seconds
        return self._streams[stream]

    def _compute(self, record: Record, start: float, seconds: float) -> float:
        """The thread computes before it gets to its record. Returns when it has."""
        is_python = record.thread in self._trace.python_threads
        # A tape is Python, which autograd's threads run with the GIL, too.
        has_gil = is_python or self._trace.captured
        if has_gil and seconds:
            start = self._with_gil(record.thread, start, _SHARE_OF_GIL * seconds)
            seconds *= 1 - _SHARE_OF_GIL
        return self._on_core(start, seconds)

    def _with_gil(self, thread: int, start: float, seconds: float) -> float:
        """Hold the GIL for a while, when it is free. Returns when it is released."""
        begin = max(start, self._gil_is_free)
        is_contended = self._gil_is_free > start - 5 * _US
        if self._gil_holder not in (None, thread) and is_contended:
            begin += self._machine.hand_over
        self._gil_is_free = self._on_core(begin, seconds)
        self._gil_holder = thread
        return self._gil_is_free

    def _on_core(self, start: float, seconds: float) -> float:
        """Take a core for a while, when one is free. Returns when it is released."""
        if not seconds:
            return start
        end = max(start, self._cores_are_free[0]) + seconds
        heapq.heapreplace(self._cores_are_free, end)
        return end


class Host(NamedTuple):
    """What a table assumes of a machine, in its own units.

    Attributes:
        ms: in which the host launches an eager sub-step.
        device_ms: in which a GPU computes it.
        hand_over: of the GIL, in microseconds.
        link: GB/s between two GPUs.
        graph_launch: in microseconds.
        cores: of the host.
    """

    ms: float
    device_ms: float
    hand_over: float
    link: float
    graph_launch: float
    cores: int


def ratio(case: Traced, host: Host) -> float:
    """A step's time in times of what each GPU computes: the median of the rounds."""
    real = _MICRO_BATCHES[case.case.network]
    copied = {case.micro_batch: real}
    whole = case.micro_batch * case.case.cards
    copied[whole] = real * case.case.cards
    ratios: list[float] = []
    for steps, baseline in case.rounds:
        machine = Machine.beside(
            baseline,
            host=host.ms * _MS,
            sub_step=host.device_ms * _MS,
            copied_bytes=tuple(copied.items()),
            graph_launch=host.graph_launch * _US,
            hand_over=host.hand_over * _US,
            link=host.link * 1e9,
            cores=host.cores,
        )
        computed = case.case.accum * machine.sub_step * case.num_steps
        ratios.append(Simulation(steps, machine).end / computed)
    return median(ratios)


PROGRAMS = {
    "step": "`forward_backward`",
    "call": "`engine(x)`",
    "trainer": "a Trainer",
}
# The rows of the table: each is a case per number of GPUs.
ROWS = (
    Case("resnet50", 0, 16),
    Case("resnet50", 0, 8),
    Case("resnet50", 0, 4),
    Case("gpt", 0, 16),
    Case("gpt", 0, 4),
    Case("resnet50", 0, 16, fused=True),
    Case("resnet50", 0, 8, fused=True),
    Case("resnet50", 0, 4, fused=True),
    Case("gpt", 0, 4, fused=True),
    Case("resnet50", 0, 16, pageable=True),
    Case("resnet50", 0, 16, graphs="off"),
    Case("resnet50", 0, 4, graphs="off"),
    Case("gpt", 0, 16, graphs="off"),
    Case("gpt", 0, 4, graphs="off"),
    Case("resnet50", 0, 4, "call"),
    Case("gpt", 0, 4, "call"),
    Case("gpt", 0, 4, "trainer"),
)


class Results(NamedTuple):
    """The results of the runs in which a case was traced.

    Attributes:
        graphs: what became of graphs in the last step of each run.
        ratios: by ``Host.ms`` and ``Host.hand_over``, the ``ratio`` of each run.
    """

    graphs: list[str]
    ratios: defaultdict[tuple[float, float], list[float]]


def print_table(options: Any, folder: Path) -> None:
    """Print steps of each number of GPUs, beside what the GPUs compute."""
    print("Steps in times of what each GPU computes. Where there are two numbers, a")
    print(f"hand-over of the GIL takes 0 and {options.hand_over:g} us.")
    if options.traces > 1:
        print(f"Medians of {options.traces} runs. In brackets: the smallest and the")
        print("largest number of all runs.")
    print()
    columns = [
        f"{cards} GPUs, host {ms:g} ms"
        for ms in options.host
        for cards in options.cards
    ]
    print(f"| network | program | sub-steps | graphs | {' | '.join(columns)} |")
    print("|---|---|---:|---|" + "---:|" * len(columns), flush=True)
    for row in ROWS:
        if row.network in options.network:
            of_cards: list[Results] = []
            for cards in options.cards:
                case = row._replace(cards=cards)
                of_cards.append(_results(case, options, folder))
            cells = [
                _cell(results, ms, options)
                for ms in options.host
                for results in of_cards
            ]
            program = PROGRAMS[row.program]
            if row.pageable:
                program += ", pageable rows"
            if row.fused:
                program += ", `AdamW(fused=True)`"
            head = f"| {row.network} | {program} | {row.accum} | {_graphs(of_cards)} |"
            print(f"{head} {' | '.join(cells)} |", flush=True)


def _results(case: Case, options: Any, folder: Path) -> Results:
    """The results of ``--traces`` runs of a case. The records of one at a time are in
    memory.
    """
    results = Results([], defaultdict(list))
    for number in range(options.traces):
        run = traced(case, folder, number)
        results.graphs.append(run.graphs)
        for ms in options.host:
            for hand_over in (0.0, options.hand_over):
                host = Host(
                    ms,
                    options.device,
                    hand_over,
                    options.link,
                    options.graph_launch,
                    options.cores,
                )
                results.ratios[ms, hand_over].append(ratio(run, host))
    return results


def _graphs(of_cards: Sequence[Results]) -> str:
    """What became of graphs in the last step."""
    texts = [graphs for results in of_cards for graphs in results.graphs]
    return "; ".join(dict.fromkeys(texts))


def _cell(results: Results, ms: float, options: Any) -> str:
    without_wait = results.ratios[ms, 0.0]
    with_wait = results.ratios[ms, options.hand_over]
    cell = _range(median(without_wait), median(with_wait))
    if options.traces > 1:
        ratios = without_wait + with_wait
        cell += f" ({_range(min(ratios), max(ratios))})"
    return cell


def _range(low: float, high: float) -> str:
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., Any] = parser.add_argument
    add("--network", nargs="+", default=["resnet50", "gpt"])
    add("--cards", nargs="+", type=int, default=[4, 8])
    add("--host", nargs="+", type=float, default=[26, 10], help="ms per sub-step")
    add("--device", type=float, default=28, help="ms per sub-step")
    add("--link", type=float, default=300, help="GB/s")
    add("--hand-over", type=float, default=8, help="of the GIL, in us")
    add("--graph-launch", type=float, default=200, help="us")
    add("--cores", type=int, default=16, help="of the host")
    add("--traces", type=int, default=1, help="runs of each case; prints medians")
    add("--folder", type=Path, help="keeps the traces for the next run")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print_table(options, folder)


if __name__ == "__main__":
    main()
