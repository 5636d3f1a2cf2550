"""A step's time in pytest-benchmark's usual form: a group per model, a row per
contender.

``pytest benchmarks/step_time/test_contenders.py --benchmark-only`` takes about a
minute. The rows of a group are measured one after the other, so that a disturbance may
hit one of them alone: ``test_step_time.py`` interleaves them, and its ratios are what
the pages quote.
"""

from dataclasses import replace

import pytest

from benchmarks import peers
from benchmarks.models import CASES

REPLICAS = ["cpu"] * 2
ROUNDS = {"cnn": 11, "mlp": 21, "resnet20": 5}
# of 4096 in the others: a quarter of the time, on the same terms
ROWS = {"resnet20": 1024}

CONTENDERS = {
    "engine": lambda case: peers.engine(case, REPLICAS),
    "nn.DataParallel's per-call schedule x 16": lambda case: peers.per_call(
        case, REPLICAS
    ),
    "plain loop, equal micro-batches": lambda case: peers.loop(
        case, case.accum * len(REPLICAS)
    ),
}


@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("name", CASES)
def test_step(benchmark, quick, name, contender):
    case = replace(CASES[name], batch=ROWS.get(name, CASES[name].batch))
    case = case.small() if quick else case
    peer = CONTENDERS[contender](case)
    benchmark.group = f"{name}, {case.batch} rows"
    benchmark.name = contender
    benchmark.pedantic(
        peer.run,
        setup=peer.module.zero_grad,
        rounds=3 if quick else ROUNDS[name],
        warmup_rounds=1,
    )
    assert all(parameter.grad is not None for parameter in peer.module.parameters())
