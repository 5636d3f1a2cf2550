"""``engine.batch_calls``: whole batches of a loop, each computed by one replica."""

from __future__ import annotations

import _thread
import threading

import pytest
import torch
from harness.models import FEATURES
from harness.oracle import randn
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = [pytest.mark.core, pytest.mark.draws]

BATCHES = [randn(rows, FEATURES, seed=rows) for rows in (4, 3, 1, 5, 2)]
VIRTUAL = ["cpu:0", "cpu:1"]
SECONDS = 20  # after which a test that waits fails


def model():
    torch.manual_seed(3)
    return nn.Linear(FEATURES, 2).double().eval()


def forward(replica, batch):
    return replica(batch)


def results_of(calls, batches=BATCHES, numbers=None):
    """What a loop takes that reads all batches ahead: all, or those of these numbers."""
    results = []
    for number in range(len(batches)) if numbers is None else numbers:
        results.append(calls.result(batches[number:]))
        calls.go_on()
    return results


def test_each_batch_as_the_function_alone_gives(devices):
    """Whatever the function returns: nothing is joined."""

    def describes(replica, batch):
        return {"mean": replica(batch).mean(), "rows": len(batch), "text": "x"}

    module = model()
    with ScatterOnceParallel(module, 1, devices(3)) as engine, torch.no_grad():
        results = results_of(engine.batch_calls(describes))
        for result, batch in zip(results, BATCHES, strict=True):
            expected = describes(module, batch)
            assert torch.equal(result.pop("mean"), expected.pop("mean"))
            assert result == expected


def test_replicas_compute_while_the_loop_works():
    """A replica begins with its next batch before the loop asks for that result."""
    has_begun = [threading.Event() for _ in BATCHES]

    def tells(replica, batch):
        has_begun[[len(other) for other in BATCHES].index(len(batch))].set()
        return replica(batch)

    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        calls = engine.batch_calls(tells)
        results_of(calls, numbers=(0, 1))  # computed while the loop waits
        assert not has_begun[2].is_set()
        calls.result(BATCHES[2:])
        assert not has_begun[4].is_set()  # the result may still be copied
        calls.go_on()
        assert has_begun[4].wait(SECONDS)
        calls.close()


def in_training(module):
    module.train()


def as_it_is(module):
    pass


GROUPS = {
    "a module in training mode": (in_training, forward),
    "random numbers": (as_it_is, lambda *_: torch.rand(2)),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_in_groups_nothing_runs_between_two_results(kind):
    change, function = GROUPS[kind]
    ends = []

    def counts(replica, batch):
        output = function(replica, batch)
        ends.append(len(batch))
        return output

    module = model()
    change(module)
    with ScatterOnceParallel(module, 1, VIRTUAL) as engine:
        calls = engine.batch_calls(counts)
        numbers = []
        for number in range(len(BATCHES)):
            results_of(calls, numbers=[number])
            numbers.append(len(ends))
    assert numbers == [2, 2, 4, 4, 5]


def test_turns_are_in_the_order_of_the_batches():
    rows = []

    def notes(replica, batch):
        rows.append(len(batch))
        return replica(batch)

    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        engine.loop.takes_turns = True
        results_of(engine.batch_calls(notes))
    assert rows == [len(batch) for batch in BATCHES]


@pytest.mark.parametrize("devices", [VIRTUAL, ["cpu"] * 2], ids=["virtual", "shared"])
def test_weights_that_the_loop_writes_count(devices):
    """For all batches with which no replica has begun. That is told, since the stock
    loop computes no batch ahead.
    """
    ends = threading.Semaphore(0)

    def computes(replica, batch):
        output = replica(batch)
        ends.release()
        return output

    module = model()
    batches = BATCHES + BATCHES
    with ScatterOnceParallel(module, 1, devices) as engine, torch.no_grad():
        calls = engine.batch_calls(computes)
        expected = [module(batch) for batch in BATCHES]
        results = results_of(calls, batches, (0, 1, 2))
        for _ in range(5):  # the last call has begun before the loop writes
            assert ends.acquire(timeout=SECONDS)
        module.weight.mul_(2)
        expected += [module(batch) for batch in BATCHES]
        results += results_of(calls, batches, (3, 4))
        with pytest.warns(UserWarning, match="in the middle of an evaluation"):
            results += results_of(calls, batches, [5])
        results += results_of(calls, batches, (6, 7, 8, 9))
    for result, value in zip(results, expected, strict=True):
        assert torch.equal(result, value)


@pytest.mark.filterwarnings("ignore:the module has changed")
def test_step_in_the_middle_of_a_loop():
    module = model()
    with ScatterOnceParallel(module, 1, VIRTUAL) as engine:
        calls = engine.batch_calls(forward)
        with torch.no_grad():
            expected = [module(batch) for batch in BATCHES]
        results = [calls.result(BATCHES)]
        engine.forward_backward(BATCHES[0], BATCHES[0][:, :2], nn.MSELoss())
        with torch.no_grad():
            module.weight.sub_(module.weight.grad)
            results += results_of(calls, numbers=(1, 2, 3, 4))
            expected[2:] = [module(batch) for batch in BATCHES[2:]]
    for result, value in zip(results, expected, strict=True):
        assert torch.equal(result, value)


@pytest.mark.parametrize("takes_turns", [False, True])
def test_error_comes_with_its_batch(takes_turns):
    """After the results of the earlier ones; random numbers are as before."""

    def fails(replica, batch):
        torch.rand(3)
        if len(batch) == 3:
            raise ZeroDivisionError("mine")
        return replica(batch)

    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        engine.loop.takes_turns = takes_turns
        before = torch.get_rng_state()
        calls = engine.batch_calls(fails)
        assert calls.result(BATCHES).shape == (4, 2)
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            calls.result(BATCHES[1:])
        assert "replica 1 on cpu:1" in caught.value.__notes__[0]
        assert torch.equal(torch.get_rng_state(), before)
        calls.close()
        assert len(results_of(engine.batch_calls(forward))) == len(BATCHES)


def test_writing_a_parameter_is_refused():
    def writes(replica, batch):
        replica.bias.add_(1)
        return replica(batch)

    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        calls = engine.batch_calls(writes)
        with pytest.raises(RuntimeError, match="bias"):
            results_of(calls)


def test_interrupt_ends_the_loop():
    def interrupts(replica, batch):
        if len(batch) == 1:
            _thread.interrupt_main()
        return replica(batch)

    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        calls = engine.batch_calls(interrupts)
        with pytest.raises(KeyboardInterrupt):
            results_of(calls)
        calls.close()
        assert len(results_of(engine.batch_calls(forward))) == len(BATCHES)


def test_numbers_that_the_loop_draws_stay_drawn():
    """Calls that draw nothing leave the generators to the loop."""
    with ScatterOnceParallel(model(), 1, VIRTUAL) as engine:
        calls = engine.batch_calls(forward)
        torch.manual_seed(5)
        drawn = []
        for number in range(len(BATCHES)):
            results_of(calls, numbers=[number])
            drawn.append(torch.rand(1))
        torch.manual_seed(5)
        assert drawn == [torch.rand(1) for _ in BATCHES]
