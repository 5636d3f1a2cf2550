"""Real signals at random moments, once and twice: ``python -m faults.ctrl_c virtual 30``.

Half of the strikes come in pairs. Each time the state is that of before the step, or that of
a whole one, and the next step is exact.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from faults.grid import SECONDS_EACH, bench_on, say
from faults.places import PLACES
from faults.state import capture

PLACE = PLACES["forward, first line"]


def interrupts(delays: list[float]) -> threading.Thread:
    """Send Ctrl-C to this process after each of the delays."""

    def send() -> None:
        for delay in delays:
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


class Strikes:
    """Lets interrupts through inside of ``attempt`` alone; others are counted."""

    def __init__(self) -> None:
        self.outside = 0
        self.inside = 0
        self._shield()

    def _shield(self) -> None:
        signal.signal(signal.SIGINT, self._count)

    def _count(self, *_: object) -> None:
        self.outside += 1

    def attempt(self, function: Callable[[], Any]) -> None:
        """Call ``function`` with the usual reaction to Ctrl-C."""
        try:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                function()
            finally:
                self._shield()
        except KeyboardInterrupt:
            self._shield()
            self.inside += 1


def run(layout: str, times: int) -> Iterator[dict[str, Any]]:
    """Interrupt steps at ``times`` moments, every second time twice in a row."""
    draw = random.Random(7)
    torch.set_num_threads(1)  # on a busy machine OpenMP threads mostly wait for each other
    bench = bench_on(layout)
    expected, _, _ = bench.expected(PLACE, True)
    strikes = Strikes()
    for i in range(times):
        faulthandler.dump_traceback_later(SECONDS_EACH, exit=True)
        wrong: list[str] = []
        strikes.inside = strikes.outside = 0
        thread = interrupts([draw.uniform(0, 0.01) for _ in range(1 + i % 2)])
        while thread.is_alive():
            bench.back_to_start(bench.subject, accumulate=True)
            before = capture(bench.subject)
            strikes.attempt(lambda: bench.step(bench.engine, PLACE))
            # Struck twice: threads given up draw on from their accelerator's generator.
            wrong += bench.half_a_step(before, expected, ("generator of",) if i % 2 else ())
        bench.back_to_start(bench.subject, accumulate=True)
        wrong += [f"next step: {name}" for name in bench.good_step(PLACE, True)]
        faulthandler.cancel_dump_traceback_later()  # whoever reads may come to it much later
        yield {"layout": layout, "inside": strikes.inside, "wrong": wrong}


if __name__ == "__main__":
    say(run(sys.argv[1], int(sys.argv[2])))
