"""Step time against batch, accum, replicas and parameters: straight lines, or an explanation."""

import statistics
from dataclasses import replace
from functools import partial

import pytest

from benchmarks import peers
from benchmarks.models import CASES, mlp
from benchmarks.tables import Table
from benchmarks.timing import interleaved

BASE = replace(CASES["mlp"], build=partial(mlp, 512), batch=2048)
SWEEPS = {
    "batch": (512, 1024, 2048, 4096, 8192),
    "accum": (1, 2, 4, 8, 16, 32, 64),
    "replicas": (1, 2, 3, 4, 6, 8),
    "parameters": (128, 256, 512, 1024, 1536),
}


def contender(sweep, value, base):
    """The engine with one thing changed, and the number to draw it at."""
    device_ids = ["cpu"] * 2
    case, place = base, value
    if sweep == "batch":
        case = replace(base, batch=value)
    elif sweep == "accum":
        case = replace(base, accum=value)
    elif sweep == "replicas":
        device_ids = ["cpu"] * value
    else:
        case = replace(base, build=partial(mlp, value))
    peer = peers.engine(case, device_ids)
    if sweep == "parameters":
        place = sum(parameter.numel() for parameter in peer.module.parameters())
    return place, peer.step


@pytest.mark.parametrize("sweep", SWEEPS)
def test_growth(benchmark, publish, quick, sweep):
    values = SWEEPS[sweep][:3] if quick else SWEEPS[sweep]
    base = BASE.small() if quick else BASE
    steps = dict(contender(sweep, value, base) for value in values)
    seconds = interleaved(benchmark, steps, 3 if quick else 11)
    places = list(seconds)
    medians = [1e3 * statistics.median(times) for times in seconds.values()]
    fit = statistics.linear_regression(places, medians)
    straight = statistics.correlation(places, medians) ** 2
    rows = [
        [f"{place:,}", f"{took:.1f}", f"{fit.intercept + fit.slope * place:.1f}"]
        for place, took in zip(places, medians, strict=True)
    ]
    table = Table([sweep, "ms, median", f"straight line (R² {straight:.3f})"], rows)
    publish(sweep, table, {"seconds": seconds, "r_squared": straight}, draw(sweep, seconds, fit))


def draw(sweep, seconds, fit):
    """Medians with their range, and the straight line."""

    def on(axes):
        places = list(seconds)
        medians = [1e3 * statistics.median(times) for times in seconds.values()]
        below = [m - 1e3 * min(times) for m, times in zip(medians, seconds.values(), strict=True)]
        above = [1e3 * max(times) - m for m, times in zip(medians, seconds.values(), strict=True)]
        axes.errorbar(places, medians, [below, above], fmt="o", capsize=3, label="median and range")
        line = [fit.intercept + fit.slope * place for place in places]
        axes.plot(places, line, "--", label="straight line")
        axes.set(xlabel=sweep, ylabel="milliseconds per step", ylim=(0, None))
        axes.legend()

    return on
