"""What does a step cost that computes nothing? Microseconds over the bare loop.

``python -m benchmarks fixed_cost`` times both in turns, on the same one-row
micro-batches of one linear layer::

    engine       engine.forward_backward(inputs, targets, criterion)
    bare loop    for each row: (criterion(module(x), y) / sub_steps).backward()
"""

import statistics
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks import peers
from benchmarks.tables import Table
from benchmarks.timing import in_a_row, interleaved
from scatterpar import ScatterOnceParallel
from scatterpar.threads import workers

FEATURES = 4
CLASSES = 2
REPLICAS = (1, 2, 4, 8)
CROWDS = (4, 8)  # replicas that are also started all at once
ACCUMS = (1, 4, 16)
DEPTHS = (1, 10, 100, 300)
PHASES = ("scatter", "replicate", "compute", "reduce")


def test_replicas_and_sub_steps(benchmark, publish, rounds):
    module = nn.Linear(FEATURES, CLASSES)
    first = {}
    contenders = {}
    kinds = [(replicas, "in turns") for replicas in REPLICAS]
    kinds += [(replicas, "all at once") for replicas in CROWDS]
    for replicas, start in kinds:
        for accum in ACCUMS:
            engine = ScatterOnceParallel(module, accum, ["cpu"] * replicas)
            step = engine.forward_backward if start == "in turns" else crowded(engine)
            key = (replicas, start, accum)
            contenders |= pair(step, module, replicas * accum, key, first)
    seconds = interleaved(benchmark, contenders, rounds(31))
    over = {}
    rows = []
    for replicas, start in kinds:
        keys = [(replicas, start, accum) for accum in ACCUMS]
        costs = [microseconds_over(seconds, key) for key in keys]
        over[replicas, start] = costs
        sub_steps = [replicas * accum for accum in ACCUMS]
        fit = statistics.linear_regression(sub_steps, costs)
        cold = microseconds_over(first, (replicas, start, 1))
        name = f"{replicas}, {start}" if replicas in CROWDS else str(replicas)
        measured = [f"{cost:.0f}" for cost in [*costs, fit.intercept]]
        rows.append([name, *measured, f"{fit.slope:.1f}", f"{cold:.0f}"])
    columns = [
        "replicas",
        *[f"accum {accum}" for accum in ACCUMS],
        "per step",
        "per sub-step",
        "accum 1, after a pause",
    ]
    by_accum = {}
    for (replicas, start), costs in over.items():
        by_accum[f"{replicas}, {start}"] = dict(zip(ACCUMS, costs, strict=True))
    data = {"microseconds_over_bare": by_accum}
    publish("sub-steps", Table(columns, rows), data, draw(over))


def crowded(engine):
    """Steps in which all replicas start at once, however few cores there are."""

    def step(*batch):
        # As many threads at a time as there are replicas.
        with mock.patch.object(workers, "max_concurrency", len):
            engine.forward_backward(*batch)

    return step


@pytest.mark.longer
def test_modules_and_parameters(benchmark, publish, rounds):
    replicas = 4
    engines = {}
    phases = {}
    contenders = {}
    for depth in DEPTHS:
        engine = ScatterOnceParallel(chain(depth), 1, ["cpu"] * replicas)
        engines[depth] = engine
        phases[depth] = []
        contenders |= pair(
            engine.forward_backward, engine.module, replicas, (depth,), {}
        )
        step = contenders["engine", depth]
        contenders["engine", depth] = noting(step, engine, phases[depth])
    seconds = interleaved(benchmark, contenders, rounds(11))
    rows = []
    for depth, engine in engines.items():
        bare = 1e6 * statistics.median(seconds["bare", depth])
        times = [bare, microseconds_over(seconds, (depth,))]
        for phase in PHASES:
            of_phase = [noted[phase] for noted in phases[depth]]
            times.append(1e6 * statistics.median(of_phase))
        num_modules = len(list(engine.module.modules()))
        num_parameters = len(list(engine.module.parameters()))
        texts = [f"{time:.0f}" for time in times]
        rows.append([num_modules, num_parameters, *texts])
    columns = ["modules", "parameters", "bare loop", "engine over it", *PHASES]
    publish("tree-size", Table(columns, rows), {"rows": rows})


def microseconds_over(seconds, key):
    """The median, over the rounds, of the engine's time less the bare loop's."""
    pairs = zip(seconds["engine", *key], seconds["bare", *key], strict=True)
    return 1e6 * statistics.median(engine - bare for engine, bare in pairs)


def pair(step, module, sub_steps, key, first):
    """An engine's step and the bare loop of as many sub-steps, on the same rows.

    Each gives the median of a burst; ``first`` collects the bursts' first steps.
    """
    inputs = torch.randn(sub_steps, FEATURES)
    targets = torch.randint(CLASSES, (sub_steps,))

    def by_engine():
        step(inputs, targets, peers.criterion)

    def bare():
        for number in range(sub_steps):
            output = module(inputs[number : number + 1])
            loss = peers.criterion(output, targets[number : number + 1])
            (loss / sub_steps).backward()

    contenders = {}
    for kind, run in (("engine", by_engine), ("bare", bare)):
        first[kind, *key] = []
        contender = partial(in_a_row, run, module.zero_grad, first[kind, *key])
        contenders[kind, *key] = contender
    return contenders


def noting(step, engine, phases):
    """``step``, which also keeps the engine's own account of its phases."""

    def noted():
        seconds = step()
        phases.append(engine.last_step.seconds)
        return seconds

    return noted


def chain(depth):
    """A layer from the features to the classes, after ``depth - 1`` others."""
    layers = [nn.Linear(FEATURES, FEATURES) for _ in range(depth - 1)]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


def draw(over):
    """Microseconds over the bare loop against sub-steps, a line per kind of replicas."""

    def on(axes):
        for (replicas, start), costs in over.items():
            style = "o-" if start == "in turns" else "o:"
            label = f"{replicas} replicas"
            if replicas in CROWDS:
                label += f", {start}"
            sub_steps = [replicas * accum for accum in ACCUMS]
            axes.plot(sub_steps, costs, style, label=label)
        axes.set_xlabel("sub-steps of all replicas together")
        axes.set_ylabel("microseconds over the bare loop")
        axes.legend()

    return on
