"""Which replicas compute at once when there are more of them than cores.

Four replicas of a tiny model once took four times as long on two cores as one thread
would: in every operator they took the GIL from each other. So those that a core is
there for go first.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
from harness.models import Of
from harness.notes import beginning_of_note
from harness.oracle import assert_step, build, randn
from torch import nn
from torch._ops import HigherOrderOperator

import scatterpar.threads.workers
from scatterpar import DataParallelModel, ScatterOnceParallel

pytestmark = pytest.mark.core

REPLICAS, SECONDS = 4, 120
NUMBERED = (
    torch.arange(float(REPLICAS), dtype=torch.float64).repeat(2, 1).T.contiguous()
)


@pytest.fixture(params=[1, 2, 3])
def cores(request, monkeypatch):
    monkeypatch.setattr(
        scatterpar.threads.workers,
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


class Watch:
    """Counts the threads that dwell at once; one for all replicas, as an object with a
    lock is.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.inside = self.most = 0
        self.threads = []

    def dwell(self):
        with self.lock:
            self.threads.append(threading.current_thread().name)
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(0.005)
        with self.lock:
            self.inside -= 1


def mean(output, _):
    return output.mean()


def test_short_work_keeps_to_the_cores(devices, cores, patience):
    watch = Watch()
    model = calls(lambda _: watch.dwell())
    with ScatterOnceParallel(model, 1, devices(REPLICAS), verify=False) as engine:
        engine.forward_backward(NUMBERED, criterion=mean)
    assert watch.most <= cores
    names = [
        f"scatterpar replica {i}, {device}"
        for i, device in enumerate(devices(REPLICAS))
    ]
    assert sorted(watch.threads) == names


@pytest.mark.contract
def test_shared_function_runs_one_at_a_time(devices):
    """It may keep numbers of its own, such as a running mean."""
    watch = Watch()

    def criterion(output, _):
        watch.dwell()
        return output.mean()

    with ScatterOnceParallel(build(lambda: nn.Linear(2, 1)), 2, devices(3)) as engine:
        engine.forward_backward(randn(6, 2), criterion=criterion)
    assert watch.most == 1


def test_replicas_that_meet_all_start(devices, cores):
    barrier = threading.Barrier(REPLICAS)
    model = calls(lambda _: barrier.wait(SECONDS))
    with ScatterOnceParallel(model, 3, devices(REPLICAS), verify=False) as engine:
        engine.forward_backward(randn(3 * REPLICAS, 2), criterion=mean)
    DataParallelModel(model, devices(REPLICAS))(NUMBERED)
    assert not barrier.broken


def test_first_replicas_error_is_raised(devices, cores):
    """The fastest to fail once kept replica 0 from failing, now and then."""

    def fail(_):
        raise ValueError("boom")

    with ScatterOnceParallel(calls(fail), 1, devices(REPLICAS), verify=False) as engine:
        for _ in range(30):
            with pytest.raises(ValueError, match="boom") as caught:
                engine.forward_backward(NUMBERED, criterion=mean)
            first = beginning_of_note(0, devices(REPLICAS)[0])
            assert caught.value.__notes__[0].startswith(first)


def test_close_ends_waiting_replicas(devices, cores, monkeypatch):
    """The threads' end once overtook the calls that were still to come: nobody ever
    ended.
    """
    monkeypatch.setattr(scatterpar.threads.workers, "_EXIT_SECONDS", 0.5)
    watch = Watch()
    model = calls(lambda _: watch.dwell())
    engine = ScatterOnceParallel(model, 1, devices(REPLICAS), verify=False)

    def criterion(output, _):
        engine.close()
        return output.mean()

    engine.forward_backward(randn(REPLICAS, 2), criterion=criterion)
    assert len(watch.threads) == REPLICAS


# --- higher-order operators in workers ---


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


def branching(layer, rows):
    rows = layer.linear(rows)
    shifted = rows + 100  # the same branch for every micro-batch
    return torch.cond(shifted.sum() > 0, torch.sin, torch.cos, (rows,))


def of(function):
    return build(lambda: Of(function, linear=nn.Linear(4, 3)))


def take_a_step(function, device_ids=("cpu", "cpu")):
    with ScatterOnceParallel(of(function), 2, device_ids) as engine:
        assert_step(engine, randn(11, 4), criterion=mean)


def test_custom_function_works_under_vmap(devices):
    take_a_step(
        lambda layer, rows: torch.vmap(Doubled.apply)(layer.linear(rows)), devices(3)
    )


@pytest.mark.slow
def test_control_flow_refused_on_replicas():
    model = of(branching)
    with ScatterOnceParallel(model, 2, ["cpu"] * 2, verify=False) as engine:
        with pytest.raises(
            RuntimeError, match=r"^cond: .* use one replica, or .* torch.where"
        ):
            engine.forward_backward(randn(11, 4), criterion=mean)
        assert model.linear.weight.grad is None
    take_a_step(branching, ["cpu"])


def test_later_registered_operator_works():
    class Later(HigherOrderOperator):
        def __init__(self):
            super().__init__("registered_by_a_test")

        def __call__(self, rows):
            return super().__call__(rows)

    take_a_step(lambda layer, rows: layer.linear(rows))  # the key is routed by now
    later = Later()
    later.py_impl(torch._C.DispatchKey.Autograd)(lambda rows: rows * 3)
    take_a_step(lambda layer, rows: later(layer.linear(rows)))


@pytest.mark.draws
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_dropout_works_under_vmap(randomness):
    dropped = torch.vmap(nn.functional.dropout, randomness=randomness)
    model, rows = (
        of(lambda layer, rows: dropped(layer.linear(rows))),
        torch.ones(12, 4).double(),
    )
    with ScatterOnceParallel(model, 1, ["cpu"] * 2) as engine:
        found = []
        for _ in range(2):
            torch.manual_seed(7)
            found.append(
                engine.forward_backward(rows, criterion=mean, return_outputs=True)[1]
            )
    assert all(map(torch.equal, *found)), "the same seed, the same masks"
    rows_differ = [len(output.ne(0).unique(dim=0)) > 1 for output in found[0]]
    assert rows_differ == [randomness == "different"] * 2
    assert not torch.equal(*found[0])
