"""What the engine costs where there is nothing to compute: over the bare loop, in microseconds."""

import statistics
from functools import partial

import torch
from torch import nn

from benchmarks import peers
from benchmarks.tables import Table
from benchmarks.timing import in_a_row, interleaved
from scatterpar import ScatterOnceParallel

FEATURES = 4
CLASSES = 2
REPLICAS = (1, 2, 4, 8)
ACCUMS = (1, 4, 16)
DEPTHS = (1, 10, 100, 300)
PHASES = ("scatter", "replicate", "compute", "reduce")


def test_replicas_and_sub_steps(benchmark, publish, quick):
    module = nn.Linear(FEATURES, CLASSES)
    engines = {
        (replicas, accum): ScatterOnceParallel(module, accum, ["cpu"] * replicas)
        for replicas in REPLICAS
        for accum in ACCUMS
    }
    first = {}
    contenders = {
        key: function
        for (replicas, accum), engine in engines.items()
        for key, function in pair(engine, replicas * accum, (replicas, accum), first).items()
    }
    seconds = interleaved(benchmark, contenders, 3 if quick else 31)
    over = {key: microseconds_over(seconds, key) for key in engines}
    rows = []
    for replicas in REPLICAS:
        sub_steps = [replicas * accum for accum in ACCUMS]
        fit = statistics.linear_regression(sub_steps, [over[replicas, accum] for accum in ACCUMS])
        measured = [f"{over[replicas, accum]:.0f}" for accum in ACCUMS]
        cold = f"{microseconds_over(first, (replicas, 1)):.0f}"
        rows.append([replicas, *measured, f"{fit.intercept:.0f}", f"{fit.slope:.1f}", cold])
    columns = [
        "replicas",
        *[f"accum {a}" for a in ACCUMS],
        "per step",
        "per sub-step",
        "accum 1, after a pause",
    ]
    data = {f"{replicas} x {accum}": value for (replicas, accum), value in over.items()}
    publish("sub-steps", Table(columns, rows), {"microseconds_over_bare": data}, draw(over))


def test_modules_and_parameters(benchmark, publish, quick):
    replicas = 4
    engines = {depth: ScatterOnceParallel(chain(depth), 1, ["cpu"] * replicas) for depth in DEPTHS}
    contenders = {
        key: function
        for depth, engine in engines.items()
        for key, function in pair(engine, replicas, (depth,), {}).items()
    }
    phases = {depth: [] for depth in DEPTHS}
    for depth, engine in engines.items():
        step = contenders["engine", depth]
        contenders["engine", depth] = noting(step, engine, phases[depth])
    seconds = interleaved(benchmark, contenders, 3 if quick else 11)
    rows = []
    for depth, engine in engines.items():
        bare = 1e6 * statistics.median(seconds["bare", depth])
        parts = [1e6 * statistics.median(noted[p] for noted in phases[depth]) for p in PHASES]
        times = [bare, microseconds_over(seconds, (depth,)), *parts]
        sizes = [len(list(engine.module.modules())), len(list(engine.module.parameters()))]
        rows.append([*sizes, *[f"{time:.0f}" for time in times]])
    columns = ["modules", "parameters", "bare loop", "engine over it", *PHASES]
    publish("tree-size", Table(columns, rows), {"rows": rows})


def microseconds_over(seconds, key):
    """The median, over the rounds, of the engine's time less the bare loop's."""
    took, bare = seconds["engine", *key], seconds["bare", *key]
    return 1e6 * statistics.median(a - b for a, b in zip(took, bare, strict=True))


def pair(engine, sub_steps, key, first):
    """The engine and the loop that does as many sub-steps, on the same one-row micro-batches.

    Each gives the median of a burst; ``first`` collects the bursts' first steps.
    """
    inputs = torch.randn(sub_steps, FEATURES)
    targets = torch.randint(CLASSES, (sub_steps,))
    module = engine.module

    def ours():
        engine.forward_backward(inputs, targets, peers.criterion)

    def bare():
        for i in range(sub_steps):
            (peers.criterion(module(inputs[i : i + 1]), targets[i : i + 1]) / sub_steps).backward()

    runs = {("engine", *key): ours, ("bare", *key): bare}
    first.update({name: [] for name in runs})
    return {
        name: partial(in_a_row, run, module.zero_grad, first[name]) for name, run in runs.items()
    }


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
    """Microseconds over the bare loop against sub-steps, a line per number of replicas."""

    def on(axes):
        for replicas in REPLICAS:
            points = [(replicas * accum, over[replicas, accum]) for accum in ACCUMS]
            axes.plot(*zip(*points, strict=True), "o-", label=f"{replicas} replicas")
        axes.set_xlabel("sub-steps of all replicas together")
        axes.set_ylabel("microseconds over the bare loop")
        axes.legend()

    return on
