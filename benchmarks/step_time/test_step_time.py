"""How long does the gradient of one optimizer step take, beside the engine's peers?

``python -m benchmarks step_time`` times them in turns, in every round::

    engine                    engine.forward_backward(images, labels, criterion)
    DistributedDataParallel   a process per replica, no_sync() in all sub-steps but one
    accelerate                a process per replica, accelerator.accumulate(model)
    plain loop                for each micro-batch: (loss / sub_steps).backward()
    nn.DataParallel           the plain loop with it, or with its schedule on CPU replicas
    the engine's call         the plain loop with it, in the place of nn.DataParallel

Their gradients are compared before.
"""

import statistics

import pytest

from benchmarks import peers
from benchmarks.models import CASES
from benchmarks.processes import RankProcesses
from benchmarks.tables import Table
from benchmarks.timing import interleaved, ratio

REPLICAS = 2
# So that the README's figures take under 12 minutes.
ROUNDS = {"cnn": 15, "mlp": 15, "resnet20": 7}
ROUNDS_OF_ONE = {"cnn": 31, "mlp": 31, "resnet20": 9}
TOLERANCE = 1e-4  # relative, between float32 gradients summed in different orders


@pytest.mark.parametrize("name", CASES)
def test_two_replicas(benchmark, publish, quick, rounds, name):
    case = CASES[name].small() if quick else CASES[name]
    accum = case.accum
    with (
        RankProcesses("engine", case, 1) as engine,
        RankProcesses("ddp", case, REPLICAS) as ddp,
        RankProcesses("accelerate", case, REPLICAS) as accelerate,
    ):
        contenders = {
            "engine": engine,
            "DistributedDataParallel, no_sync": ddp,
            "accelerate, accumulate": accelerate,
        }
        # The engine's own micro-batches, and the larger ones of nn.DataParallel, which
        # does not split them without an accelerator.
        for sub_steps in (accum * REPLICAS, accum):
            loop = peers.loop(case, sub_steps)
            contenders[f"plain loop, {sub_steps} sub-steps"] = loop
        contenders[f"nn.DataParallel x {accum}"] = peers.data_parallel(case)
        per_call = peers.per_call(case, ["cpu"] * REPLICAS)
        contenders[f"per-call schedule x {accum}"] = per_call
        contenders[f"the engine's call x {accum}"] = peers.call(
            case, ["cpu"] * REPLICAS
        )
        count = rounds(ROUNDS[name])
        table, seconds, errors = measured(benchmark, contenders, "engine", count)
    data = {"seconds": seconds, "errors": errors}
    publish(name, table, data, draw(seconds))


@pytest.mark.parametrize("name", CASES)
def test_one_replica(benchmark, publish, quick, rounds, name):
    case = CASES[name].small() if quick else CASES[name]
    ours = "engine, one replica"
    contenders = {
        ours: peers.engine(case, ["cpu"]),
        f"plain loop, {case.accum} sub-steps": peers.loop(case, case.accum),
    }
    count = rounds(ROUNDS_OF_ONE[name])
    table, seconds, errors = measured(benchmark, contenders, ours, count)
    data = {"seconds": seconds, "errors": errors}
    publish(f"{name}-one-replica", table, data)


def measured(benchmark, contenders, ours, rounds):
    """A table of the contenders, their seconds, and the errors of their gradients."""
    errors = disagreement(contenders, ours)
    steps = {name: contender.step for name, contender in contenders.items()}
    seconds = interleaved(benchmark, steps, rounds)
    return _table(seconds, errors, ours), seconds, errors


def disagreement(contenders, ours):
    """Each contender's relative gradient error against ours; none may be large."""
    expected = contenders[ours].gradient()
    errors = {}
    for name, contender in contenders.items():
        difference = contender.gradient() - expected
        error = float(difference.norm() / expected.norm())
        assert error < TOLERANCE, f"{name} computes another gradient: {error:.1e}"
        errors[name] = error
    return errors


def _table(seconds, errors, ours):
    rows = []
    for name, times in seconds.items():
        milliseconds = [1e3 * time for time in times]
        middle = f"{statistics.median(milliseconds):.1f}"
        extremes = f"{min(milliseconds):.1f} to {max(milliseconds):.1f}"
        beside = "1"
        error = ""
        if name != ours:
            beside = str(ratio(times, seconds[ours]))
            error = f"{errors[name]:.0e}"
        rows.append([name, middle, extremes, beside, error])
    columns = ["contender", "ms, median", "ms, range", "time / engine's"]
    return Table([*columns, "gradient differs by"], rows)


def draw(seconds):
    """Horizontal bars: the medians."""

    def on(axes):
        names = list(reversed(seconds))  # the first one is drawn at the bottom
        medians = [statistics.median(seconds[name]) * 1e3 for name in names]
        bars = axes.barh(names, medians)
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.set_xlabel("milliseconds per step, median")

    return on
