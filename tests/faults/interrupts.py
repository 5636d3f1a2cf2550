"""Ctrl-C in a step: the state is that of before it or of a whole one, and the next step
is exact.

``python -m faults.interrupts LAYOUT TIMES [PLACE [FILES]]`` strikes between two
instructions of the engine, or of these files of it. ``python -m faults.interrupts again
LAYOUT TIMES`` strikes two and three times, one after another, and looks at what the
next engine of the process computes. Real signals, which nearly always hit the long
waits, are in ``test_fault_interrupts.py``.
"""

from __future__ import annotations

import _thread
import contextlib
import copy
import faulthandler
import signal
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import scatterpar
from faults.grid import ACCUM, SECONDS_EACH, bench_on, say
from faults.places import PLACES
from faults.state import capture, differences, values_differ
from scatterpar import ScatterOnceParallel

PACKAGE = Path(scatterpar.__file__).parent
WATCHED = (str(PACKAGE), contextlib.__file__, threading.__file__)
FIRST_LINE = "forward, first line"


class At:
    """Counts instructions of the engine, and interrupts before the one of a given
    number.
    """

    def __init__(self, number: int, watched: tuple[str, ...] = WATCHED) -> None:
        self.number, self.watched = number, watched
        self.seen = 0
        self.where = "nowhere"
        self.forked = False

    def __enter__(self) -> At:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.watched):
            return None
        # Whatever a finalizer raises, Python drops.
        if event == "call" and _is_under(frame, "__del__"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.seen += 1
            self._count(frame)
        return self._trace

    def _count(self, frame: FrameType) -> None:
        """An instruction is about to run."""
        if self.seen - 1 == self.number:
            self._note(frame)
            signal.raise_signal(signal.SIGINT)

    def _note(self, frame: FrameType) -> None:
        name = Path(frame.f_code.co_filename).name
        self.where = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
        self.forked = _is_under(frame, "fork_rng", "recompute_fn")


class Again(At):
    """Interrupts several times: first as ``At``, then every ``gap`` instructions.

    A handler that raises in a trace function would end the trace. So an interrupt waits
    for the next call that the traced code makes, as that of a real signal does.

    Attributes:
        struck: how many interrupts there were.
    """

    def __init__(self, number: int, times: int, gap: int) -> None:
        super().__init__(number)
        self.numbers = {number + gap * i for i in range(times)}
        self.struck = 0
        # A lookup calls it in C, where no handler runs.
        strike = partial(_thread.interrupt_main, signal.SIGINT)
        self._strikes: Any = defaultdict(strike)

    def _count(self, frame: FrameType) -> None:
        if self.seen - 1 in self.numbers:
            if not self.struck:
                self._note(frame)
            self.struck += 1
            self._strikes[self.seen]


def _is_under(frame: FrameType | None, *names: str) -> bool:
    """Whether one of the functions is being executed in ``frame`` or further out."""
    while frame is not None and frame.f_code.co_name not in names:
        frame = frame.f_back
    return frame is not None


def run(
    layout: str, times: str, name: str = FIRST_LINE, *files: str
) -> Iterator[dict[str, Any]]:
    """Interrupt one step after another, each a little later."""
    # on a busy machine OpenMP threads mostly wait for each other
    torch.set_num_threads(1)
    bench, place = bench_on(layout), PLACES[name]
    watched = tuple(str(PACKAGE / file) for file in files) or WATCHED
    bench.back_to_start(bench.subject, accumulate=True)
    with At(-1, watched) as count:
        bench.step(bench.engine, place)
    for i in range(int(times)):
        faulthandler.dump_traceback_later(SECONDS_EACH, exit=True)
        accumulate = i % 2 == 0
        whole = bench.expected(place, accumulate)[0]
        bench.back_to_start(bench.subject, accumulate=accumulate)
        before, raised = capture(bench.subject), "nothing"
        with At(count.seen * i // int(times), watched) as at:
            try:
                bench.step(bench.engine, place)
            except BaseException as error:
                raised = type(error).__name__
        changed = differences(before, capture(bench.subject))
        # cut off, torch's fork_rng puts back what it found once the error is let go
        if at.forked:
            changed = [path for path in changed if path != "torch's generator"]
        left = values_differ(whole, bench.subject)
        wrong = [] if raised == "KeyboardInterrupt" else [f"raised {raised}"]
        if changed and left:
            wrong.append(f"half a step: {changed[:3]} changed, {left[:3]} did not")
        bench.back_to_start(bench.subject, accumulate=accumulate)
        wrong += [f"next step: {name}" for name in bench.good_step(place, accumulate)]
        # whoever reads may come to it much later
        faulthandler.cancel_dump_traceback_later()
        # else this step executed fewer instructions than the counted one
        if at.where != "nowhere":
            yield {
                "layout": layout,
                "where": at.where,
                "whole": bool(changed),
                "wrong": wrong,
            }


GAPS = 3, 40, 700  # instructions: in the same function, while it ends, while it undoes


def run_again(layout: str, times: str, name: str = FIRST_LINE) -> Iterator[Any]:
    """Interrupt steps two and three times; the next engine of the process is exact."""
    torch.set_num_threads(1)
    bench, place = bench_on(layout), PLACES[name]
    with At(-1) as count:
        bench.step(bench.engine, place)
    handler = signal.getsignal(signal.SIGINT)
    for i in range(int(times)):
        faulthandler.dump_traceback_later(SECONDS_EACH, exit=True)
        bench.back_to_start(bench.subject, accumulate=True)
        whole, loss, _ = bench.expected(place, True)
        before, raised = capture(bench.subject), "nothing"
        number = count.seen * i // int(times)
        with Again(number, 2 + i % 2, GAPS[i // 2 % len(GAPS)]) as strikes:
            try:
                bench.step(bench.engine, place)
                sum(())  # a call, in which the last interrupt arrives
            except KeyboardInterrupt as error:
                raised = type(error).__name__
                frames = traceback.walk_tb(error.__traceback__)
                names = {frame.f_code.co_name for frame, _ in frames}
                strikes.forked = not names.isdisjoint({"fork_rng", "recompute_fn"})
        changed = differences(before, capture(bench.subject))
        if strikes.forked:
            changed = [path for path in changed if path != "torch's generator"]
        wrong = [] if raised == "KeyboardInterrupt" else [f"raised {raised}"]
        if changed and values_differ(whole, bench.subject):
            wrong.append(f"half a step: {changed[:3]}")
        # What the process has set is as before, also if the step is whole.
        wrong += [path for path in changed if path.startswith("torch: ")]
        if signal.getsignal(signal.SIGINT) is not handler:
            wrong.append("the handler of Ctrl-C")
        # The next engine of the process, with a module of its own.
        twin = copy.deepcopy(bench.start)
        with ScatterOnceParallel(twin, ACCUM, bench.devices, verify=False) as engine:
            bench.back_to_start(twin, accumulate=True)
            if bench.step(engine, place) != loss:
                wrong.append("the next engine: loss")
            wrong += [f"the next engine: {n}" for n in values_differ(whole, twin)]
        bench.back_to_start(bench.subject, accumulate=True)
        wrong += [f"next step: {name}" for name in bench.good_step(place, True)]
        faulthandler.cancel_dump_traceback_later()
        if strikes.struck:
            yield {
                "layout": layout,
                "where": strikes.where,
                "struck": strikes.struck,
                "whole": bool(changed),
                "wrong": wrong,
            }


if __name__ == "__main__":
    if sys.argv[1] == "again":
        say(run_again(*sys.argv[2:]))
    else:
        say(run(*sys.argv[1:]))
