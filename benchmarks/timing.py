"""Rounds in which every contender runs once, so that whatever disturbs one disturbs
all.
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
    """Seconds of each contender in each round; the order rotates, the first round is
    dropped.

    Args:
        benchmark: pytest-benchmark's fixture; it times whole rounds and keeps the
            medians.
        contenders: each runs once and returns the seconds that it took.
        rounds: how many are kept.

    """
    order = list(contenders)
    kept: list[dict[str, float]] = []

    def one_round() -> None:
        seconds = {}
        for name in order:
            time.sleep(_SETTLE_SECONDS)
            seconds[name] = contenders[name]()
        order.append(order.pop(0))
        kept.append(seconds)

    benchmark.pedantic(one_round, rounds=rounds, iterations=1, warmup_rounds=1)
    seconds = {name: [one[name] for one in kept[1:]] for name in contenders}
    benchmark.extra_info.update({k: statistics.median(v) for k, v in seconds.items()})
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
    """The median of the rounds' ratios, and an interval that holds it with 95 %
    confidence.
    """

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
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios)))
        for _ in range(_RESAMPLES)
    )
    edge = _RESAMPLES // 40
    return Ratio(statistics.median(ratios), medians[edge], medians[-edge - 1])
