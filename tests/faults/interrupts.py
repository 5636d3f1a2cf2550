"""Ctrl-C in a step: the state is that of before it or of a whole one, and the next step
is exact.

``python -m faults.interrupts LAYOUT TIMES [PLACE [FILES]]`` strikes between two
instructions of the engine, or of these files of it. Real signals, which nearly always
hit the long waits, are in ``test_fault_interrupts.py``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import scatterpar
from faults.grid import SECONDS_EACH, bench_on, say
from faults.places import PLACES
from faults.state import capture, differences, values_differ

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
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.seen += 1
            if self.seen - 1 == self.number:
                name = Path(frame.f_code.co_filename).name
                self.where = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
                self.forked = _is_under(frame, "fork_rng", "recompute_fn")
                signal.raise_signal(signal.SIGINT)
        return self._trace


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


if __name__ == "__main__":
    say(run(*sys.argv[1:]))
