"""The own cost of a step as its work grows: the time over the plain loop of the same
sub-steps.
"""

import statistics
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.tables import Table
from benchmarks.timing import in_a_row, interleaved
from scatterpar import ScatterOnceParallel

ROWS = 4  # per micro-batch
FEATURES = 8
# Layers (two parameters each), replicas, sub-steps per replica.
STEP, SUB_STEPS, PARAMETERS, REPLICAS = (3, 2, 1), (3, 2, 64), (401, 2, 1), (3, 8, 1)
criterion = nn.MSELoss()


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_own_cost(benchmark, publish, quick):
    contenders = {}
    for key in (STEP, SUB_STEPS, PARAMETERS, REPLICAS):
        contenders |= pair(*key)
    seconds = interleaved(benchmark, contenders, 3 if quick else 21)
    step, sub_steps, parameters, replicas = (
        1e6
        * statistics.median(
            a - b for a, b in zip(seconds[ours], seconds[plain], strict=True)
        )
        for ours, plain in zip(
            list(contenders)[::2], list(contenders)[1::2], strict=True
        )
    )
    per_sub_step = (sub_steps - step) / (SUB_STEPS[2] - 1)
    per_parameter = (parameters - step) / (2 * (PARAMETERS[0] - STEP[0]))
    rows = [
        ["one sub-step on each of two replicas, 6 parameters", f"{step:.0f}"],
        ["per round of two sub-steps, from 1 to 64 on each", f"{per_sub_step:.1f}"],
        ["per parameter, from 6 to 802", f"{per_parameter:.2f}"],
        ["one sub-step on each of eight replicas in one memory", f"{replicas:.0f}"],
    ]
    publish("own-cost", Table(["work", "µs over the plain loop"], rows), {"rows": rows})


def pair(layers, replicas, accum):
    """An engine's step and the loop of as many sub-steps, on the same micro-batches."""
    chain = [
        part
        for _ in range(layers)
        for part in (nn.Linear(FEATURES, FEATURES), nn.ReLU())
    ]
    module, sub_steps = nn.Sequential(*chain), replicas * accum
    engine = ScatterOnceParallel(module, accum, ["cpu"] * replicas)
    inputs, targets = (torch.randn(ROWS * sub_steps, FEATURES) for _ in range(2))

    def ours():
        engine.forward_backward(inputs, targets, criterion)

    def plain():
        for rows, values in zip(inputs.split(ROWS), targets.split(ROWS), strict=True):
            (criterion(module(rows), values) / sub_steps).backward()

    key = f"{layers} layers, {replicas} replicas, accum {accum}"
    return {
        f"{name}, {key}": partial(in_a_row, run, module.zero_grad, [])
        for name, run in (("engine", ours), ("plain", plain))
    }
