"""How does a step's own cost grow with its work? The time over the plain loop.

Both run the same sub-steps, in turns::

    engine    engine.forward_backward(inputs, targets, criterion)
    plain     for each micro-batch: (criterion(module(x), y) / sub_steps).backward()
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
# Layers (two parameters each), replicas, sub-steps per replica. The first step is the
# base; each of the others has more of one of them.
STEP = (3, 2, 1)
SUB_STEPS = (3, 2, 64)
PARAMETERS = (401, 2, 1)
REPLICAS = (3, 8, 1)
criterion = nn.MSELoss()


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_own_cost(benchmark, publish, rounds):
    keys = STEP, SUB_STEPS, PARAMETERS, REPLICAS
    contenders = {}
    for key in keys:
        contenders |= pair(*key)
    seconds = interleaved(benchmark, contenders, rounds(21))
    costs = []
    for key in keys:
        engine = seconds[name_of("engine", *key)]
        plain = seconds[name_of("plain", *key)]
        over = [ours - theirs for ours, theirs in zip(engine, plain, strict=True)]
        costs.append(1e6 * statistics.median(over))
    step, sub_steps, parameters, replicas = costs
    per_sub_step = (sub_steps - step) / (SUB_STEPS[2] - 1)
    per_parameter = (parameters - step) / (2 * (PARAMETERS[0] - STEP[0]))
    plain_step = statistics.median(seconds[name_of("plain", *STEP)])
    plain_sub_step = 1e6 * plain_step / (STEP[1] * STEP[2])
    costs_of_works = {
        "one sub-step on each of two replicas, 6 parameters": step,
        "per round of two sub-steps, from 1 to 64 on each": per_sub_step,
        "per parameter, from 6 to 802": per_parameter,
        "one sub-step on each of eight replicas in one memory": replicas,
    }
    rows = []
    for work, cost in costs_of_works.items():
        rows.append([work, f"{cost:.1f}", f"{cost / plain_sub_step:.2g}"])
    columns = ["work", "µs over the plain loop", "in sub-steps of that loop"]
    publish("own-cost", Table(columns, rows), {"rows": rows, "plain": plain_sub_step})


def name_of(kind, layers, replicas, accum):
    return f"{kind}, {layers} layers, {replicas} replicas, accum {accum}"


def pair(layers, replicas, accum):
    """An engine's step and the loop of as many sub-steps, on the same micro-batches."""
    chain = []
    for _ in range(layers):
        chain += [nn.Linear(FEATURES, FEATURES), nn.ReLU()]
    module = nn.Sequential(*chain)
    sub_steps = replicas * accum
    engine = ScatterOnceParallel(module, accum, ["cpu"] * replicas)
    inputs = torch.randn(ROWS * sub_steps, FEATURES)
    targets = torch.randn(ROWS * sub_steps, FEATURES)

    def by_engine():
        engine.forward_backward(inputs, targets, criterion)

    def plain():
        for x, y in zip(inputs.split(ROWS), targets.split(ROWS), strict=True):
            (criterion(module(x), y) / sub_steps).backward()

    contenders = {}
    for kind, run in (("engine", by_engine), ("plain", plain)):
        name = name_of(kind, layers, replicas, accum)
        contenders[name] = partial(in_a_row, run, module.zero_grad, [])
    return contenders
