"""What an iteration takes when gradients are synchronised at every n-th one only."""

import statistics
from contextlib import ExitStack
from dataclasses import replace

import pytest

from benchmarks import peers
from benchmarks.models import CASES
from benchmarks.processes import Gang
from benchmarks.tables import Table
from benchmarks.timing import interleaved, ratio

REPLICAS = 2
ROWS = 32  # of one iteration on one replica
EVERY = (1, 2, 4, 8, 16)
DDP, ENGINE = "DistributedDataParallel, no_sync", "engine"
TOLERANCE = 1e-4  # relative, between float32 gradients summed in different orders


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_every_nth(benchmark, publish, quick, name):
    with ExitStack() as stack:
        contenders = {}
        for every in EVERY:
            case = replace(CASES[name], batch=REPLICAS * ROWS * every, accum=every)
            contenders[DDP, every] = stack.enter_context(Gang("ddp", case, REPLICAS))
            contenders[ENGINE, every] = peers.engine(case, ["cpu"] * REPLICAS)
            check_gradients(contenders, every)
        steps = {key: per_iteration(peer.step, key[1]) for key, peer in contenders.items()}
        seconds = interleaved(benchmark, steps, 2 if quick else 21)
    rows = [row(seconds, every) for every in EVERY]
    columns = [
        "synchronised every",
        "DDP, ms an iteration",
        "DDP saves",
        "engine, ms an iteration",
        "DDP / engine",
    ]
    kept = [
        {"who": who, "every": every, "seconds_an_iteration": times}
        for (who, every), times in seconds.items()
    ]
    publish(name, Table(columns, rows), {"rows": ROWS, "times": kept}, draw(seconds))


def check_gradients(contenders, every):
    """Both compute the same gradient."""
    found, expected = (contenders[who, every].gradient() for who in (ENGINE, DDP))
    assert (found - expected).norm() < TOLERANCE * expected.norm()


def per_iteration(step, every):
    """One step's seconds, divided among its iterations."""
    return lambda: step() / every


def row(seconds, every):
    ddp, engine, first = seconds[DDP, every], seconds[ENGINE, every], seconds[DDP, EVERY[0]]
    saved = 1 - ratio(ddp, first).median
    times = [f"{statistics.median(times) * 1e3:.2f}" for times in (ddp, engine)]
    return [every, times[0], f"{saved:.0%}", times[1], str(ratio(ddp, engine))]


def draw(seconds):
    """Milliseconds an iteration over n, a line with the quartiles for each contender."""

    def on(axes):
        for who in (DDP, ENGINE):
            quartiles = [statistics.quantiles(seconds[who, n], n=4) for n in EVERY]
            low, middle, high = ([1e3 * value for value in q] for q in zip(*quartiles, strict=True))
            axes.plot(EVERY, middle, "o-", label=who)
            axes.fill_between(EVERY, low, high, alpha=0.2)
        axes.set_xscale("log", base=2)
        axes.set_xticks(EVERY, [str(n) for n in EVERY])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("gradients synchronised every ... iterations")
        axes.set_ylabel("milliseconds an iteration, median and quartiles")
        axes.legend()

    return on
