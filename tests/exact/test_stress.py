"""Many steps, many replicas, many threads: what a race would break once in a thousand steps.

The interpreter's lock hides most races between threads that run Python. A free-threaded
interpreter (docs/gpus.md) has none, and this is where they would show. Each test
takes some steps in every run of the tests, and thousands with ``--steps``:

    python -m pytest tests/exact/test_stress.py --steps 2000
"""

from __future__ import annotations

import contextlib
import contextvars
import threading

import pytest
import torch
from harness.models import CLASSES, FEATURES
from harness.notes import beginning_of_note
from harness.oracle import assert_close, assert_gradients, build, randint, randn, whole_batch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

pytestmark = pytest.mark.core

REPLICAS = 8
CALLERS = 4
SECONDS = 300
LOSS = nn.CrossEntropyLoss()
caller = contextvars.ContextVar("caller")


@pytest.fixture
def steps(request):
    return request.config.getoption("--steps")


class Block(nn.Module):
    """Something of everything that the threads share: buffers, checkpoints, plain attributes."""

    def __init__(self, p):
        super().__init__()
        self.first = nn.Linear(FEATURES, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(p)
        self.head = nn.Linear(6, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.seen = []

    def forward(self, inputs):
        self.calls += 1
        self.seen.append(len(inputs))
        # Plain threads that rewind the process's one generator would disturb each other.
        draws = self.dropout.p > 0
        hidden = checkpoint(self._inner, inputs, use_reentrant=False, preserve_rng_state=draws)
        return self.head(hidden)

    def _inner(self, inputs):
        return self.dropout(self.norm(self.first(inputs)).tanh())


def batch(kind):
    """Ragged: another number of rows for every kind."""
    rows = 6 * REPLICAS + 2 * kind + 1
    return randn(rows, FEATURES, seed=kind), randint(CLASSES, rows, seed=kind)


def in_threads(work):
    """``work(number)`` in several threads at once; what they raise is raised here."""
    errors = []

    def run(number):
        try:
            caller.set(number)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "stuck"
    if errors:
        raise errors[0]


def test_closed_from_another_thread_at_any_moment(devices, steps):
    """A step that is about to start once waited for workers that had just been told to end."""
    inputs, targets = batch(0)
    for number in range(steps):
        engine = ScatterOnceParallel(build(lambda: nn.Linear(FEATURES, CLASSES)), 1, devices(3))
        engine.forward_backward(inputs, targets, LOSS)
        closer = threading.Timer(1e-5 * (number % 100), engine.close)
        closer.start()
        with contextlib.suppress(RuntimeError):
            while True:
                engine.forward_backward(inputs, targets, LOSS)
        closer.join()
        with pytest.raises(RuntimeError, match="is closed; make another to go on"):
            engine.forward_backward(inputs, targets, LOSS)


def test_engines_and_pairs_of_several_threads_do_not_meet(devices, steps):
    """Each caller's steps are exact, in its own context, and its faults are its own."""
    models = [build(lambda: Block(0.0), seed).eval() for seed in range(CALLERS)]

    def work(number):
        model = models[number]
        expected = {kind: whole_batch(model, *batch(kind), LOSS) for kind in range(3)}

        def criterion(output, targets):
            assert caller.get() == number
            return LOSS(output, targets)

        def fails(output, targets):
            raise ArithmeticError(f"of caller {number}")

        pair, pair_criterion = DataParallelModel(model, devices(3)), DataParallelCriterion(LOSS)

        def by_pair(inputs, targets):
            loss = pair_criterion(pair(inputs), targets)
            loss.backward()
            return loss.detach()

        with ScatterOnceParallel(model, 2, devices(3)) as engine:
            for step in range(steps):
                kind = step % 3
                loss, oracle = expected[kind]
                if step % 4 == 3:
                    with pytest.raises(ArithmeticError, match=f"of caller {number}") as caught:
                        engine.forward_backward(*batch(kind), fails)
                    where, *others = caught.value.__notes__
                    assert where.startswith(beginning_of_note(0, devices(3)[0]))
                    assert all(f"of caller {number}" in other for other in others)
                for step_of in (lambda *given: engine.forward_backward(*given, criterion), by_pair):
                    model.zero_grad()
                    assert_close(step_of(*batch(kind)), loss, "loss")
                    assert_gradients(model, oracle)

    in_threads(work)


def test_threads_that_share_an_engine_are_exact_or_refused(devices, steps):
    """Whoever comes while another steps is refused; no step is lost, none is counted twice."""
    model = build(lambda: Block(0.0)).eval()
    _, expected = whole_batch(model, *batch(0), LOSS)
    done, refused, counting = 0, [], threading.Lock()
    with ScatterOnceParallel(model, 1, devices(3)) as engine:

        def work(_):
            nonlocal done
            for _ in range(steps):
                try:
                    engine.forward_backward(*batch(0), LOSS)
                except RuntimeError as error:
                    refused.append(str(error))
                    continue
                with counting:
                    done += 1

        in_threads(work)
    assert done
    assert all("is in the middle of a step" in words for words in refused)
    assert_gradients(model, {name: done * gradient for name, gradient in expected.items()})


def test_pairs_on_one_module_lose_no_gradient(devices, steps):
    model = build(lambda: Block(0.0)).eval()
    _, expected = whole_batch(model, *batch(0), LOSS)

    def work(_):
        pair, criterion = DataParallelModel(model, devices(2)), DataParallelCriterion(LOSS)
        for _ in range(steps):
            criterion(pair(batch(0)[0]), batch(0)[1]).backward()

    in_threads(work)
    assert_gradients(model, {name: CALLERS * steps * g for name, g in expected.items()})
