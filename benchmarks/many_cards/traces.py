"""Traces of null GPUs: what a step launches, copies and waits for, and how long each
thread of the host computes in between.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nullcuda.card import Record

PROGRAMS = ("step", "call", "trainer")
GRAPHS = {"default": None, "off": False}
BASELINE_ACCUM = 4  # sub-steps of the step on one GPU, beside which a trace was made

# Records that are no work: what a thread computes for them counts for its next record.
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
LAUNCHES = {"launch", "library", "graph_launch"}
COPIES = {"copy_in", "copy_out", "copy_peer", "copy_within", "fill"}
_ON_STREAM = LAUNCHES | COPIES | {"event_record", "event_wait"}
_LARGE = ("gemm", "matmul", "convolution", "execute", "backend")
_NANOSECOND = 1e-9


@dataclass
class Trace:
    """Records in order, and what each of them comes after.

    Attributes:
        records: launches, copies, events and waits.
        gaps: for each record, the seconds that its thread has computed since its last
            one.
        predecessors: for each record the numbers of those that other threads must have
            done before.
        by_thread: the numbers of the records of each thread.
        python_threads: the caller's thread and the workers. The others are autograd's.
        captured: whether sub-steps are launched as graphs.
    """

    records: Sequence[Record]
    gaps: list[float] = field(default_factory=list)
    predecessors: list[list[int]] = field(default_factory=list)
    by_thread: dict[int, list[int]] = field(default_factory=dict)
    python_threads: set[int] = field(default_factory=set)
    captured: bool = False

    @classmethod
    def of(cls, records: Iterable[Record]) -> Trace:
        """The trace of these records."""
        trace = cls([record for record in records if record.kind not in _NO_WORK])
        trace.python_threads = {
            record.thread
            for record in trace.records
            if record.kind in ("hand_over", "take_over")
        } or {trace.records[0].thread}
        trace.captured = any(r.kind == "graph_launch" for r in trace.records)
        computed: dict[int, int] = {}
        last_on_device: dict[tuple[int, bool], int] = {}
        last_event: dict[int, int] = {}
        caller = trace.caller
        # By key, and whether the caller hands work over, or a worker its results.
        handed_over: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        for number, record in enumerate(trace.records):
            since_last = record.cpu - computed.get(record.thread, record.cpu)
            trace.gaps.append(max(0, since_last) * _NANOSECOND)
            computed[record.thread] = record.cpu
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
    def host_seconds(self) -> float:
        """The seconds that all threads have computed."""
        return sum(self.gaps)

    @property
    def caller_seconds(self) -> float:
        """The seconds that the caller's thread has computed."""
        return sum(self.gaps[number] for number in self.by_thread[self.caller])


class Round(NamedTuple):
    """Steps of a program, and right after them one on one GPU without graphs.

    Attributes:
        steps: the trace of the program's steps.
        baseline: that of the step on one GPU, of ``BASELINE_ACCUM`` sub-steps.
    """

    steps: Trace
    baseline: Trace


class Case(NamedTuple):
    """What was traced.

    Attributes:
        network: ``resnet50`` or ``gpt``.
        cards: the number of GPUs.
        accum: sub-steps of each of them in a step.
        program: ``step`` for ``forward_backward``, ``call`` for ``engine(x)``,
            ``trainer`` for a Trainer of transformers.
        graphs: a key of ``GRAPHS``.
        pageable: whether the batch is in pageable memory of the host.
        fused: whether AdamW is the fused one, whose step takes one call of torch.
    """

    network: str
    cards: int
    accum: int = 16
    program: str = "step"
    graphs: str = "default"
    pageable: bool = False
    fused: bool = False

    @property
    def name(self) -> str:
        """A name for files."""
        pageable = "-pageable" if self.pageable else ""
        fused = "-fused" if self.fused else ""
        parts = self.network, self.program, self.cards, self.accum, self.graphs
        return "-".join(map(str, parts)) + pageable + fused


class Traced(NamedTuple):
    """The traces of a case.

    Attributes:
        case: what was traced.
        num_steps: the number of steps in each round.
        rounds: the traces.
        seconds: of each later step that was not traced, by the clock.
        caller_seconds: of such steps, what the caller's thread has computed.
        host_seconds: what all threads together have computed.
        baseline_host_seconds: what they have computed in steps on one GPU beside these.
        graphs: what became of graphs, in words.
        micro_batch: the bytes of the inputs of one micro-batch in the trace.
    """

    case: Case
    num_steps: int
    rounds: Sequence[Round]
    seconds: Sequence[float]
    caller_seconds: Sequence[float]
    host_seconds: Sequence[float]
    baseline_host_seconds: Sequence[float]
    graphs: str
    micro_batch: int


def traced(case: Case, folder: Path, number: int = 0) -> Traced:
    """Read the traces of a case; make them in a process of its own if need be.

    Each ``number`` is a run of its own: another process, and another file.
    """
    name = f"{case.name}-{number}" if number else case.name
    file = folder / f"{name}.pickle"
    if not file.exists():
        module = "benchmarks.many_cards.launch_trace"
        command = [sys.executable, "-W", "ignore", "-m", module, str(file)]
        command += ["--network", case.network, "--cards", str(case.cards)]
        command += ["--accum", str(case.accum), "--program", case.program]
        command += ["--graphs", case.graphs]
        if case.pageable:
            command.append("--pageable")
        if case.fused:
            command.append("--fused")
        environment = os.environ | {"NULLCUDA_DEVICES": str(case.cards)}
        subprocess.run(command, env=environment, check=True)
    content: dict[str, Any] = pickle.loads(file.read_bytes())
    rounds: list[Round] = []
    for steps, baseline in content.pop("rounds"):
        rounds.append(Round(Trace.of(_records(steps)), Trace.of(_records(baseline))))
    return Traced(case, rounds=rounds, **content)


def _records(fields: Iterable[Any]) -> list[Record]:
    return [Record(*record) for record in fields]


def is_large(record: Record) -> bool:
    """Whether a library computes a convolution or a matrix product."""
    name = record.name.lower()
    return record.kind == "library" and any(word in name for word in _LARGE)
