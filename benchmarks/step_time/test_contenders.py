"""A step's time in pytest-benchmark's usual form: a group per model, a contender per row.

``pytest benchmarks/step_time/test_contenders.py --benchmark-only`` takes about a
minute. The rows of a group are measured one after the other, so a disturbance may hit
one of them alone. ``test_step_time.py`` interleaves them, and its ratios are what the
pages quote.
"""

from dataclasses import replace

import pytest

from benchmarks import peers
from benchmarks.models import CASES

REPLICAS = ["cpu"] * 2
ROUNDS = {"cnn": 11, "mlp": 21, "resnet20": 5}
# The others have 4096: a quarter of the time, on the same terms.
ROWS = {"resnet20": 1024}


def engine(case):
    return peers.engine(case, REPLICAS)


def per_call(case):
    return peers.per_call(case, REPLICAS)


def call(case):
    return peers.call(case, REPLICAS)


def plain_loop(case):
    return peers.loop(case, case.accum * len(REPLICAS))


CONTENDERS = {
    "engine": engine,
    "nn.DataParallel's per-call schedule x 16": per_call,
    "the engine's call x 16": call,
    "plain loop, equal micro-batches": plain_loop,
}


@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("name", CASES)
def test_step(benchmark, quick, rounds, name, contender):
    case = CASES[name]
    if name in ROWS:
        case = replace(case, batch=ROWS[name])
    if quick:
        case = case.small()
    peer = CONTENDERS[contender](case)
    benchmark.group = f"{name}, {case.batch} rows"
    benchmark.name = contender
    benchmark.pedantic(
        peer.run,
        setup=peer.module.zero_grad,
        rounds=rounds(ROUNDS[name]),
        warmup_rounds=1,
    )
    assert all(parameter.grad is not None for parameter in peer.module.parameters())
