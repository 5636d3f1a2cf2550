"""Many steps, many replicas, many threads: what a race would break once in a thousand
steps.

The interpreter's lock hides most races between threads that run Python. A free-threaded
interpreter (docs/gpus.md) has none, and this is where they would show. Each test
takes some steps in every run of the tests, and thousands with ``--steps``:

    python -m pytest tests/exact/test_stress.py --steps 2000
"""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.models import CLASSES, FEATURES
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    randint,
    randn,
    whole_batch,
)
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

pytestmark = pytest.mark.core

REPLICAS = 8
CALLERS = 4
LOSS = nn.CrossEntropyLoss()


@pytest.fixture
def steps(request):
    return request.config.getoption("--steps")


def block(seed=0):
    def make():
        first, norm = nn.Linear(FEATURES, 6), nn.BatchNorm1d(6)
        return nn.Sequential(first, norm, nn.Tanh(), nn.Linear(6, CLASSES))

    return build(make, seed).eval()


def batch(kind):
    """Ragged: another number of rows for every kind."""
    rows = 6 * REPLICAS + 2 * kind + 1
    return randn(rows, FEATURES, seed=kind), randint(CLASSES, rows, seed=kind)


def test_close_from_another_thread(devices, steps):
    """A step that is about to start once waited for workers that had just been told to
    end.
    """
    inputs, targets = batch(0)
    for number in range(steps):
        engine = ScatterOnceParallel(
            build(lambda: nn.Linear(FEATURES, CLASSES)), 1, devices(3)
        )
        engine.forward_backward(inputs, targets, LOSS)
        closer = threading.Timer(1e-5 * (number % 100), engine.close)
        closer.start()
        with contextlib.suppress(RuntimeError):
            while True:
                engine.forward_backward(inputs, targets, LOSS)
        closer.join()
        with pytest.raises(RuntimeError, match="is closed; make another to go on"):
            engine.forward_backward(inputs, targets, LOSS)


@pytest.mark.slow
def test_engines_of_threads_do_not_interfere(devices, steps):
    models = [block(seed) for seed in range(CALLERS)]

    def work(number):
        model = models[number]
        expected = {kind: whole_batch(model, *batch(kind), LOSS) for kind in range(3)}
        pair, pair_criterion = (
            DataParallelModel(model, devices(3)),
            DataParallelCriterion(LOSS),
        )
        with ScatterOnceParallel(model, 2, devices(3)) as engine:
            for step in range(steps):
                inputs, targets = batch(step % 3)
                for loss_of in (
                    lambda *given: engine.loss(*given, LOSS),
                    lambda inputs, targets: pair_criterion(pair(inputs), targets),
                ):
                    model.zero_grad()
                    loss = loss_of(inputs, targets)
                    loss.backward()
                    assert_close(loss.detach(), expected[step % 3][0], "loss")
                    assert_gradients(model, expected[step % 3][1])

    with ThreadPoolExecutor(CALLERS) as pool:
        # what they raise is raised here
        list(pool.map(work, range(CALLERS), timeout=300))
