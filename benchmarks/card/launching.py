"""How many small sub-steps a second N threads launch on N streams of one card.

The sub-steps compute next to nothing, so a round of N of them takes as long as launching does, and
N times as long where the threads wait for each other.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import torch

from benchmarks.card.findings import Findings, Found, arguments
from benchmarks.card.networks import NETWORKS

_THREADS = (1, 2, 4, 8)


def rounds(name: str, card: torch.device, small: bool) -> Found:
    """The milliseconds of a round, one sub-step of each thread, forward and backward."""
    network = NETWORKS[name](card, small)
    module = network.module(card)
    inputs, targets = network.tiny(2, 0)
    inputs = inputs.to(card)
    targets = None if targets is None else targets.to(card)

    def sub_steps() -> Callable[[int], None]:
        mine, stream = copy.deepcopy(module), torch.cuda.Stream(card)
        torch.cuda.synchronize(card)

        def run(count: int) -> None:
            with torch.cuda.stream(stream):
                for _ in range(count):
                    network.loss(mine(inputs), targets).backward()
            stream.synchronize()

        return run

    found: dict[str, object] = {}
    seconds = 0.0
    for threads in _THREADS:
        taken = _together([sub_steps() for _ in range(threads)], 1 if small else 30)
        seconds = seconds or taken
        found[f"threads: {threads}"] = f"{1e3 * taken:.2f} ms, {taken / seconds:.2f} times one's"
    return found


def _together(each: list[Callable[[int], None]], count: int) -> float:
    """The seconds of a round, where all begin at once."""
    ready = Barrier(len(each) + 1)

    def work(run: Callable[[int], None]) -> None:
        run(2)
        ready.wait()
        run(count)

    with ThreadPoolExecutor(len(each)) as pool:
        done = [pool.submit(work, run) for run in each]
        ready.wait(60)
        start = time.perf_counter()
        for one in done:
            one.result()
        return (time.perf_counter() - start) / count


def main() -> int:
    """Measure both networks."""
    given = arguments(__doc__)
    if given.device.type != "cuda":
        print(f"streams are CUDA's, and {given.device} is not")
        return 0
    findings = Findings(given.out)
    for name in NETWORKS:
        findings.look(name, partial(rounds, name, given.device, given.small))
    return findings.close()


if __name__ == "__main__":
    raise SystemExit(main())
