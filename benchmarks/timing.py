"""Times of contenders that are compared in rounds, and their ratios.

::

    for each round:                                 the order rotates
        for each contender: sleep 10 ms; seconds = contender()
    ratio of two contenders: the median of their ratios, round by round

Each contender runs once in each round, so what disturbs one disturbs all.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_RESAMPLES = 2000
_BURST = 20
_SETTLE_SECONDS = 0.01  # idle OpenMP threads spin a little before they sleep


def interleaved(
    benchmark: Any, contenders: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each contender in each round, without the first round.

    Args:
        benchmark: pytest-benchmark's fixture; it times whole rounds and keeps the
            medians.
        contenders: each runs once and returns the seconds that it took.
        rounds: the number of rounds that count.

    """
    order = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}

    def run_round() -> None:
        for name in order:
            time.sleep(_SETTLE_SECONDS)
            seconds[name].append(contenders[name]())
        order.append(order.pop(0))

    # The first round allocates memory and starts threads.
    benchmark.pedantic(run_round, rounds=rounds, iterations=1, warmup_rounds=1)
    for name in contenders:
        del seconds[name][0]
        benchmark.extra_info[name] = statistics.median(seconds[name])
    return seconds


def timed(function: Callable[[], Any]) -> float:
    """The seconds that one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_a_row(
    function: Callable[[], Any], before: Callable[[], Any], first: list[float]
) -> float:
    """The median seconds of a burst of calls, with ``before`` before each, untimed.

    The call that comes after a pause (cold caches, sleeping threads) goes to ``first``.
    """
    burst = []
    for _ in range(_BURST):
        before()
        burst.append(timed(function))
    first.append(burst[0])
    return statistics.median(burst)


@dataclass(frozen=True)
class Ratio:
    """The median of the rounds' ratios, and its interval of 95 % confidence."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Compare two contenders round by round; the interval is a bootstrap of the median.

    >>> str(ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]))
    '2.000 (2.000 to 2.000)'
    """
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    generator = random.Random(0)
    medians = []
    for _ in range(_RESAMPLES):
        resample = generator.choices(ratios, k=len(ratios))
        medians.append(statistics.median(resample))
    medians.sort()
    edge = _RESAMPLES // 40  # 2.5 % of them on each side
    return Ratio(statistics.median(ratios), medians[edge], medians[-edge - 1])
