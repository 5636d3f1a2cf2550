"""What is lost when gradients add up in half precision, and what a wide sum costs."""

import time
from statistics import median

import torch
from torch import nn

from benchmarks.tables import Table
from scatterpar import ScatterOnceParallel

SUBSTEPS = (16, 64, 256)
FEATURES, HIDDEN, CLASSES = 64, 256, 10
ROWS_EACH = 16
ROUNDS = 15


def test_wide_sums(benchmark, publish, quick):
    substeps = SUBSTEPS[:1] if quick else SUBSTEPS
    found = benchmark.pedantic(measure, args=(substeps, 2 if quick else ROUNDS), rounds=1)
    rows = [
        [
            accum,
            f"{case['bfloat16']:.1e}",
            f"{case['float32']:.1e}",
            f"{case['one rounding']:.1e}",
            f"{case['time']:.2f}",
            f"{case['bytes']:.1f}",
        ]
        for accum, case in found.items()
    ]
    columns = [
        "sub-steps",
        "added up in bfloat16",
        "`accumulate_dtype=float32`",
        "one rounding of the exact sum",
        "time",
        "bytes back",
    ]
    publish("errors", Table(columns, rows), {"substeps": found})
    for case in found.values():
        assert case["float32"] < 1.01 * case["one rounding"]


def measure(substeps, rounds):
    """Relative errors of the whole gradient, and the price of the wide sum."""
    return {accum: measure_one(accum, rounds) for accum in substeps}


def measure_one(accum, rounds):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2 * accum * ROWS_EACH, FEATURES, generator=generator).bfloat16()
    targets = torch.randint(CLASSES, (len(inputs),), generator=generator)
    exact = exact_sum(inputs, targets)
    found = {"one rounding": relative(exact.bfloat16().double(), exact)}
    engines = {
        name: ScatterOnceParallel(model(), accum, ["cpu:0", "cpu:1"], accumulate_dtype=wide)
        for name, wide in (("bfloat16", None), ("float32", torch.float32))
    }
    seconds = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            engine.module.zero_grad()
            start = time.perf_counter()
            engine.forward_backward(inputs, targets, nn.CrossEntropyLoss(reduction="sum"))
            seconds[name].append(time.perf_counter() - start)
    for name, engine in engines.items():
        found[name] = relative(flat(engine.module), exact)
    ratios = [w / n for w, n in zip(seconds["float32"], seconds["bfloat16"], strict=True)]
    sent = {name: engine.last_step.bytes["reduce"] for name, engine in engines.items()}
    for engine in engines.values():
        engine.close()
    return {**found, "time": median(ratios), "bytes": sent["float32"] / sent["bfloat16"]}


def model():
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    return nn.Sequential(*layers).bfloat16()


def exact_sum(inputs, targets):
    """The float64 sum of the gradients that the micro-batches have in bfloat16."""
    module, total = model(), 0
    for x, y in zip(inputs.split(ROWS_EACH), targets.split(ROWS_EACH), strict=True):
        module.zero_grad()
        nn.CrossEntropyLoss(reduction="sum")(module(x), y).backward()
        total = total + flat(module)
    return total


def flat(module):
    return torch.cat([parameter.grad.double().flatten() for parameter in module.parameters()])


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()
