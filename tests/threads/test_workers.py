"""Which replicas compute at once when there are more of them than cores.

Four replicas of a tiny model once took four times as long on two cores as one thread would: in
every operator they took the GIL from each other. So those that a core is there for go first.
"""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch
from faults.processes import run
from harness.models import Of
from harness.notes import beginning_of_note
from harness.oracle import assert_step, build, randn, seeded
from harness.watch import Watch
from torch import nn
from torch._ops import HigherOrderOperator

import scatterpar.devices.runtime
import scatterpar.threads.workers
from scatterpar import DataParallelModel, ScatterOnceParallel

pytestmark = pytest.mark.core

REPLICAS = 4
SECONDS = 120


@pytest.fixture(params=[1, 2, 3])
def cores(request, monkeypatch):
    monkeypatch.setattr(
        scatterpar.devices.runtime,
        "max_concurrency",
        lambda devices: min(len(devices), request.param),
    )
    return request.param


@pytest.fixture
def patience(monkeypatch):
    """Nobody starts before its turn, however busy the machine is."""
    monkeypatch.setattr(scatterpar.threads.workers, "_HEAD_START_SECONDS", SECONDS)


def calls(function):
    """A linear layer from 2 features to one, which calls a function first."""

    def forward(layer, inputs):
        layer.call(inputs)
        return layer.linear(inputs)

    return build(lambda: Of(forward, call=function, linear=nn.Linear(2, 1)))


def watched(watch):
    def look(_):
        with watch:
            time.sleep(0.002)

    return calls(look)


def mean(output, _):
    return output.mean()


def test_short_work_keeps_to_the_cores(devices, cores, patience):
    watch = Watch()
    with ScatterOnceParallel(watched(watch), 1, devices(REPLICAS), verify=False) as engine:
        engine.forward_backward(randn(REPLICAS, 2), criterion=mean)
    assert watch.most <= cores
    names = [f"scatterpar replica {i}, {device}" for i, device in enumerate(devices(REPLICAS))]
    assert sorted(watch.threads) == names


@pytest.mark.contract
def test_a_function_that_replicas_share_computes_one_loss_at_a_time(devices):
    """It may keep numbers of its own, such as a running mean."""
    watch = Watch()

    def criterion(output, _):
        with watch:
            time.sleep(0.01)
        return output.mean()

    with ScatterOnceParallel(build(lambda: nn.Linear(2, 1)), 2, devices(3)) as engine:
        engine.forward_backward(randn(6, 2), criterion=criterion)
    assert watch.most == 1


def test_replicas_that_wait_for_each_other_all_start(devices, cores):
    barrier = threading.Barrier(REPLICAS)
    model = calls(lambda _: barrier.wait(SECONDS))
    with ScatterOnceParallel(model, 3, devices(REPLICAS), verify=False) as engine:
        engine.forward_backward(randn(3 * REPLICAS, 2), criterion=mean)
    assert not barrier.broken


def failing(visits):
    def fail(inputs):
        visits.append(int(inputs[0, 0]))
        raise ValueError("boom")

    return calls(fail)


NUMBERED = torch.arange(float(REPLICAS), dtype=torch.float64).repeat(2, 1).T.contiguous()


def test_when_all_fail_the_first_replica_speaks(devices, cores):
    """The fastest to fail once kept replica 0 from failing, now and then."""
    model = failing([])
    pair = DataParallelModel(model, devices(REPLICAS))
    with ScatterOnceParallel(model, 1, devices(REPLICAS), verify=False) as engine:
        for step in [partial(engine.forward_backward, criterion=mean), pair] * 30:
            with pytest.raises(ValueError, match="boom") as caught:
                step(NUMBERED)
            first = beginning_of_note(0, devices(REPLICAS)[0])
            assert caught.value.__notes__[0].startswith(first)


def test_who_waits_while_another_fails_never_starts(devices, cores, patience):
    visits = []
    model = failing(visits)
    with pytest.raises(ValueError, match="boom"):
        DataParallelModel(model, devices(REPLICAS))(NUMBERED)
    with ScatterOnceParallel(model, 1, devices(REPLICAS), verify=False) as engine:
        with pytest.raises(ValueError, match="boom"):
            engine.forward_backward(NUMBERED, criterion=mean)
        assert {*visits} <= set(range(cores))
        model.call = lambda _: None
        engine.forward_backward(NUMBERED, criterion=mean)


def test_every_accelerator_starts_at_once():
    devices = [torch.device("cpu"), *[torch.device("cuda", i) for i in range(63)]]
    assert scatterpar.devices.runtime.max_concurrency(devices) == 64


def test_closed_while_some_wait_for_their_turn(devices, cores, monkeypatch):
    """The threads' end once overtook the calls that were still to come: nobody ever ended."""
    monkeypatch.setattr(scatterpar.threads.workers, "_EXIT_SECONDS", 0.5)
    watch = Watch()
    engine = ScatterOnceParallel(watched(watch), 1, devices(REPLICAS), verify=False)

    def criterion(output, _):
        engine.close()
        return output.mean()

    engine.forward_backward(randn(REPLICAS, 2), criterion=criterion)
    assert len(watch.threads) == REPLICAS


# --- higher-order operators in workers ---

DEVICES = [["cpu"] * 2, ["cpu:0", "cpu:1"], ["cpu"] * 3]


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rows):
        return rows * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def vmapped(layer, rows):
    return torch.vmap(Doubled.apply)(layer.linear(rows))


def differentiated(layer, rows):
    """The derivative of a row's energy, itself a function of the weights."""
    return torch.func.grad(lambda x: Doubled.apply(layer.linear(x).square()).sum())(rows)


def branching(layer, rows):
    rows = layer.linear(rows)
    shifted = rows + 100  # the same branch for every micro-batch
    return torch.cond(shifted.sum() > 0, torch.sin, torch.cos, (rows,))


def of(function):
    return build(lambda: Of(function, linear=nn.Linear(4, 3)))


@pytest.mark.parametrize("device_ids", DEVICES, ids=str)
@pytest.mark.parametrize("kind", [vmapped, differentiated])
def test_custom_functions_under_transforms(kind, device_ids):
    with ScatterOnceParallel(of(kind), 2, device_ids) as engine:
        assert_step(engine, randn(11, 4), criterion=mean)


CONTROL_FLOW = """
import pytest
from harness.oracle import assert_step, randn
from scatterpar import ScatterOnceParallel
from threads.test_workers import branching, mean, of

model = of(branching)
for device_ids in (["cpu"] * 2, ["cpu:0", "cpu:1"]):
    with ScatterOnceParallel(model, 2, device_ids, verify=False) as engine:
        with pytest.raises(RuntimeError, match=r"^cond: .* use one replica, or .* torch.where"):
            engine.forward_backward(randn(11, 4), criterion=mean)
        assert model.linear.weight.grad is None
with ScatterOnceParallel(model, 2, ["cpu"]) as engine:
    assert_step(engine, randn(11, 4), criterion=mean)
print("exact")
"""


@pytest.mark.slow
def test_control_flow_is_refused_unless_there_is_one_replica():
    """In a process of its own: what two threads' tracing once broke stayed broken."""
    outcome = run("-c", CONTROL_FLOW, silence=300.0)
    assert outcome.out == "exact\n", outcome.err


def test_an_operator_that_is_registered_later():
    class Later(HigherOrderOperator):
        def __init__(self):
            super().__init__("registered_by_a_test")

        def __call__(self, rows):
            return super().__call__(rows)

    def take_a_step(function):
        with ScatterOnceParallel(of(function), 1, ["cpu"] * 2) as engine:
            assert_step(engine, randn(4, 4), criterion=mean)

    take_a_step(lambda layer, rows: layer.linear(rows))  # the key is routed by now
    later = Later()
    later.py_impl(torch._C.DispatchKey.Autograd)(lambda rows: rows * 3)
    take_a_step(lambda layer, rows: later(layer.linear(rows)))


@pytest.mark.draws
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_dropout_under_vmap(randomness):
    dropped = torch.vmap(nn.functional.dropout, randomness=randomness)

    def gradient():
        model = of(lambda layer, rows: dropped(layer.linear(rows)))
        with seeded(7), ScatterOnceParallel(model, 1, ["cpu"] * 2) as engine:
            _, outputs = engine.forward_backward(
                torch.ones(12, 4).double(), criterion=mean, return_outputs=True
            )
        return model.linear.weight.grad, outputs

    (first, outputs), (second, _) = gradient(), gradient()
    assert torch.equal(first, second)  # the same seed, the same masks
    rows_differ = [len(set(map(tuple, (output != 0).tolist()))) > 1 for output in outputs]
    assert rows_differ == [randomness == "different"] * 2
    assert not torch.equal(outputs[0], outputs[1])
