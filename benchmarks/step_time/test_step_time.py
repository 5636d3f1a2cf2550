"""How long one optimizer step's gradient takes: the engine and its peers."""

import statistics
from contextlib import ExitStack

import pytest

from benchmarks import peers
from benchmarks.models import CASES
from benchmarks.processes import RankProcesses
from benchmarks.tables import Table
from benchmarks.timing import interleaved, ratio

REPLICAS = 2
# so that the README's figures take under 12 minutes
ROUNDS = {"cnn": 15, "mlp": 15, "resnet20": 7}
TOLERANCE = 1e-4  # relative, between float32 gradients summed in different orders


@pytest.mark.parametrize("name", CASES)
def test_two_replicas(benchmark, publish, quick, name):
    case = CASES[name].small() if quick else CASES[name]
    ours, accum = "engine", case.accum
    with ExitStack() as stack:
        contenders = {
            ours: stack.enter_context(RankProcesses("engine", case, 1)),
            "DistributedDataParallel, no_sync": stack.enter_context(
                RankProcesses("ddp", case, REPLICAS)
            ),
            "accelerate, accumulate": stack.enter_context(
                RankProcesses("accelerate", case, REPLICAS)
            ),
            # The engine's own micro-batches, and those of nn.DataParallel without an
            # accelerator.
            f"plain loop, {accum * REPLICAS} sub-steps": peers.loop(
                case, accum * REPLICAS
            ),
            f"plain loop, {accum} sub-steps": peers.loop(case, accum),
            f"nn.DataParallel x {accum}": peers.data_parallel(case),
            f"per-call schedule x {accum}": peers.per_call(case, ["cpu"] * REPLICAS),
        }
        errors = disagreement(contenders, ours)
        rounds = 3 if quick else ROUNDS[name]
        steps = {who: contender.step for who, contender in contenders.items()}
        seconds = interleaved(benchmark, steps, rounds)
    publish(
        name,
        _table(seconds, errors, ours),
        {"seconds": seconds, "errors": errors},
        draw(seconds),
    )


@pytest.mark.parametrize("name", CASES)
def test_one_replica(benchmark, publish, quick, name):
    case = CASES[name].small() if quick else CASES[name]
    ours = "engine, one replica"
    contenders = {
        ours: peers.engine(case, ["cpu"]),
        f"plain loop, {case.accum} sub-steps": peers.loop(case, case.accum),
    }
    errors = disagreement(contenders, ours)
    rounds = 3 if quick else 31 if case.name != "resnet20" else 9
    seconds = interleaved(
        benchmark, {who: c.step for who, c in contenders.items()}, rounds
    )
    table = _table(seconds, errors, ours)
    publish(f"{name}-one-replica", table, {"seconds": seconds, "errors": errors})


def disagreement(contenders, ours):
    """Each contender's relative gradient error against ours; none may be large."""
    expected = contenders[ours].gradient()
    errors = {}
    for who, contender in contenders.items():
        found = contender.gradient()
        errors[who] = float((found - expected).norm() / expected.norm())
        assert errors[who] < TOLERANCE, (
            f"{who} computes another gradient: {errors[who]:.1e}"
        )
    return errors


def _table(seconds, errors, ours):
    rows = [
        [
            who,
            f"{statistics.median(times) * 1e3:.1f}",
            f"{min(times) * 1e3:.1f} to {max(times) * 1e3:.1f}",
            str(ratio(times, seconds[ours])) if who != ours else "1",
            f"{errors[who]:.0e}" if who != ours else "",
        ]
        for who, times in seconds.items()
    ]
    columns = [
        "contender",
        "ms, median",
        "ms, range",
        "time / engine's",
        "gradient differs by",
    ]
    return Table(columns, rows)


def draw(seconds):
    """Horizontal bars: the medians."""

    def on(axes):
        names = list(seconds)[::-1]
        bars = axes.barh(
            names, [statistics.median(seconds[name]) * 1e3 for name in names]
        )
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.set_xlabel("milliseconds per step, median")

    return on
