"""Does the simulation agree with null GPUs' own times?

    tests/nullcuda/run python -m benchmarks.many_cards.validation

Each case is run on null GPUs with a trace and, some steps later, without one. Compared
are, in times of an eager sub-step of one GPU that ran beside them:

    caller      what the caller's thread computes in a step: most of it is serial
    threads     what all threads compute
    clock       the step's time: by the clock, and of the simulation with this machine's
                cores and GPUs that take no time

Nothing is fitted to these cases, except one number, the hand-over of the GIL, which
counts for steps without graphs: ``--hand-over``. The clock's column needs a machine
that does nothing else; the others are the processor's time of threads.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.many_cards.simulation import Machine, Simulation
from benchmarks.many_cards.traces import BASELINE_ACCUM, Case, Traced, traced

CASES = (
    Case("resnet50", 4, 16),
    Case("resnet50", 4, 8),
    Case("resnet50", 4, 4),
    Case("resnet50", 8, 16),
    Case("resnet50", 8, 8),
    Case("resnet50", 8, 4),
    Case("gpt", 4, 16),
    Case("gpt", 4, 4),
    Case("gpt", 8, 16),
    Case("gpt", 8, 4),
    Case("gpt", 4, 4, "call"),
    Case("gpt", 4, 4, "trainer"),
    Case("resnet50", 4, 4, graphs="off"),
)
_US = 1e-6


class Comparison(NamedTuple):
    """A step in times of an eager sub-step: of the trace, and as it was measured."""

    simulated: float
    measured: float

    def __str__(self) -> str:
        ratio = self.simulated / self.measured
        return f"{self.simulated:.1f} / {self.measured:.1f} = {ratio:.2f}"


def compare(case: Traced, hand_over: float) -> dict[str, Comparison]:
    """The comparisons of a case, by their names."""
    baseline = median(case.baseline_host_seconds) / BASELINE_ACCUM
    machine = Machine.null(hand_over=hand_over, cores=os.cpu_count() or 1)
    simulated: dict[str, list[float]] = {"caller": [], "threads": [], "clock": []}
    for steps, baseline_trace in case.rounds:
        of_round = baseline_trace.host_seconds / BASELINE_ACCUM * case.num_steps
        simulated["caller"].append(steps.caller_seconds / of_round)
        simulated["threads"].append(steps.host_seconds / of_round)
        simulated["clock"].append(Simulation(steps, machine).end / of_round)
    measured = {
        "caller": median(case.caller_seconds),
        "threads": median(case.host_seconds),
        # The quietest step: what else runs on the machine makes others longer.
        "clock": min(case.seconds),
    }
    return {
        name: Comparison(median(simulated[name]), measured[name] / baseline)
        for name in simulated
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., Any] = parser.add_argument
    add("--hand-over", type=float, default=8, help="of the GIL, in us")
    add("--folder", type=Path, help="keeps the traces for the next run")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    print(f"load {load:.1f}, {os.cpu_count()} cores; simulated / measured\n")
    print("| network | program | GPUs | sub-steps | caller | threads | clock |")
    print("|---|---|---:|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for case in CASES:
            cells = compare(traced(case, folder), options.hand_over * _US).values()
            program = case.program + (", graphs=False" if case.graphs == "off" else "")
            head = f"| {case.network} | {program} | {case.cards} | {case.accum} |"
            print(f"{head} {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
