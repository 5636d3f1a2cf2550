"""The measured noise scale beside the true one, where that is known; and what it costs."""

import math
import time
from statistics import median

import torch
from torch import nn

from benchmarks.tables import Table
from scatterpar import NoiseScale, ScatterOnceParallel

SIZE, SPREAD = 16, 2.0
ROWS, REPLICAS, STEPS = 256, 4, 300
DISTANCES = (4.0, 2.0, 1.0, 0.5, 0.25)
ROUNDS = 31


def test_noise_scale(benchmark, publish, quick):
    steps = 20 if quick else STEPS
    found = benchmark.pedantic(measure, args=(steps,), rounds=1)
    cost = cost_of_measuring(2 if quick else ROUNDS)
    rows = [
        [f"{distance:g}", f"{case['true']:.0f}", f"{case['estimate']:.0f}"]
        for distance, case in found.items()
    ]
    columns = ["distance to the solution", "true noise scale, rows", "estimate, rows"]
    publish("truth", Table(columns, rows), {"distances": found, "cost": cost})
    table = Table(["a step with measure_noise=True, over one without"], [[f"{cost:.3f}"]])
    publish("cost", table, {"ratio": cost})
    if not quick:
        for case in found.values():
            assert abs(math.log(case["estimate"] / case["true"])) < math.log(1.25)


def measure(steps):
    """Linear regression, whose gradient's mean and covariance are known at every point.

    A row is x ~ N(0, 1) in `SIZE` dimensions with the target y = w·x + N(0, SPREAD²), and its
    loss is half the squared error. At the distance d = v - w the mean gradient is d, and the
    covariance has the trace (SIZE + 1) |d|² + SIZE · SPREAD².
    """
    torch.manual_seed(0)
    return {distance: one_distance(distance, steps) for distance in DISTANCES}


def one_distance(distance, steps):
    model = nn.Linear(SIZE, 1, bias=False).double()
    truth = torch.zeros_like(model.weight)
    with torch.no_grad():
        model.weight.copy_(truth).add_(distance / SIZE**0.5)
    average = NoiseScale(decay=1 - 1 / steps)
    options = {"device_ids": ["cpu"] * REPLICAS, "measure_noise": True, "shares": [3, 2, 2, 1]}
    with ScatterOnceParallel(model, **options) as engine:
        for _ in range(steps):
            x = torch.randn(ROWS, SIZE, dtype=torch.float64)
            y = x @ truth.detach().T + SPREAD * torch.randn(ROWS, 1, dtype=torch.float64)
            model.zero_grad()
            engine.forward_backward(x, y, half_square)
            average.update(engine.last_step)
    noise = (SIZE + 1) * distance**2 + SIZE * SPREAD**2
    return {"true": noise / distance**2, "estimate": average.scale}


def half_square(outputs, targets):
    return (outputs - targets).square().mean() / 2


def cost_of_measuring(rounds):
    """Step time with the option over step time without it, interleaved."""
    torch.manual_seed(0)
    x, y = torch.randn(1024, 784), torch.randint(10, (1024,))
    seconds = {True: [], False: []}
    engines = {
        flag: ScatterOnceParallel(
            nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10)),
            accum=8,
            device_ids=["cpu"] * 2,
            measure_noise=flag,
        )
        for flag in seconds
    }
    for number in range(rounds + 1):
        for flag, engine in engines.items():
            engine.module.zero_grad()
            start = time.perf_counter()
            engine.forward_backward(x, y, nn.CrossEntropyLoss())
            if number:
                seconds[flag].append(time.perf_counter() - start)
    for engine in engines.values():
        engine.close()
    return median(w / n for w, n in zip(seconds[True], seconds[False], strict=True))
