"""Turns: the user's function is entered in the order of the rows, whatever happens."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from harness.pairwise import few_of, pairwise
from torch import nn

from scatterpar import Rows, ScatterOnceParallel
from scatterpar.step.turns import Scope

pytestmark = [pytest.mark.core, pytest.mark.draws]

LAYOUTS = {
    "shared": lambda number: ["cpu"] * number,
    "virtual": lambda number: [f"cpu:{i}" for i in range(number)],
}


class SlowBackward(torch.autograd.Function):
    """The identity; its backward pass calls a function with the rows."""

    @staticmethod
    def forward(context, rows, call):
        context.rows = numbers(rows)
        context.call = call
        return rows.clone()

    @staticmethod
    def backward(context, gradient):
        context.call(context.rows)
        return gradient, None


class Model(nn.Module):
    """One weight; records the rows of each call, and those of each backward pass."""

    def __init__(self, on_call=lambda rows: None, on_backward=lambda rows: None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
        self.on_call = on_call
        self.on_backward = on_backward

    def forward(self, rows):
        self.on_call(numbers(rows))
        rows = rows.clone().requires_grad_()
        rows = SlowBackward.apply(rows, self.on_backward)
        return (rows * self.weight).square().mean()


def numbers(rows):
    return [int(row) for row in rows.detach().flatten()]


def column(rows):
    return torch.arange(float(rows), dtype=torch.float64).view(-1, 1)


class Finds:
    """Looks that find what a turn has to include."""

    def __init__(self, scope):
        self.scope = scope

    def look_if_due(self, attempt, task):
        return self.scope

    def tell(self):
        """There is nothing to tell."""


def engine_in_turns(model, devices, accum=2, turn=Scope.FUNCTION, **options):
    engine = ScatterOnceParallel(model, accum, devices, **options)
    engine._verifier = Finds(turn)
    return engine


def gradient_of_plain(rows):
    model = Model()
    model(rows).backward()
    return model.weight.grad


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("replicas", "accum", "rows"),
    [(1, 3, 7), (2, 2, 9), (2, 4, 5), (3, 3, 10), (4, 2, 3), (4, 3, 29), (2, 1, 2)],
)
def test_calls_in_order_of_rows(replicas, accum, rows, layout):
    seen = []

    def on_call(numbers_of_rows):
        time.sleep(0.001 * (rows % 3))
        seen.extend(numbers_of_rows)

    devices = LAYOUTS[layout](replicas)
    engine = engine_in_turns(Model(on_call), devices, accum)
    engine.forward_backward(column(rows))
    assert seen == list(range(rows))
    gradient = engine.module.weight.grad
    torch.testing.assert_close(gradient, gradient_of_plain(column(rows)))


CUTS = {
    "shares": {"shares": [3, 1], "accum": 2},
    "unequal limits": {"micro_batch_size": [3, 2]},
    "one limit": {"micro_batch_size": 3},
    "auto": {"accum": "auto"},
}


@pytest.mark.parametrize("cut", CUTS)
def test_order_with_every_cut(cut):
    seen = []
    options = {"accum": 1, **CUTS[cut]}
    engine = engine_in_turns(Model(seen.extend), LAYOUTS["virtual"](2), **options)
    engine.forward_backward(column(13))
    assert seen == list(range(13))
    torch.testing.assert_close(engine.module.weight.grad, gradient_of_plain(column(13)))


@pytest.mark.parametrize("sizes", [[4, 3], [1, 1, 4], [2, 9, 1]])
def test_order_of_several_batches(sizes):
    seen = []
    engine = engine_in_turns(Model(seen.extend), LAYOUTS["shared"](2))
    batches = column(sum(sizes)).split(sizes)
    engine.forward_backward(Rows.from_batches(batches))
    assert seen[-sum(sizes) :] == list(range(sum(sizes)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_batch_in_order_of_rows(layout):
    """The second pass calls the function again, in the same order."""
    seen = []

    class Rowwise(Model):
        def forward(self, rows):
            self.on_call(numbers(rows))
            return rows * self.weight

    def criterion(output, targets):
        return (output.softmax(0) * targets).sum()

    engine = engine_in_turns(Rowwise(seen.extend), LAYOUTS[layout](2), 3)
    targets = column(11).flip(0)
    engine.forward_backward(column(11) / 11, targets, criterion, whole_batch=True)
    # Those of the last sub-steps have their graph, and are not called again.
    assert len(seen) > 11
    plain = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
    criterion(column(11) / 11 * plain, targets).backward()
    torch.testing.assert_close(engine.module.weight.grad, plain.grad)


@pairwise(layout=LAYOUTS, turn=[Scope.FUNCTION, Scope.SUBSTEP], rows=[32, 33])
def test_turns_run_without_graphs(layout, turn, rows):
    """A replay would not call the user's function."""
    seen = []
    engine = engine_in_turns(Model(seen.extend), LAYOUTS[layout](2), 8, graphs=True)
    engine._verifier = Finds(turn)
    with pytest.warns(match="replicas take turns in calling a function of yours"):
        engine.forward_backward(column(rows))
    for _ in range(2):
        seen.clear()
        engine.module.zero_grad()
        engine.forward_backward(column(rows))
        assert seen == list(range(rows))
        assert engine.last_step.graphs.startswith("eager: replicas take turns")
    gradient = gradient_of_plain(column(rows))
    torch.testing.assert_close(engine.module.weight.grad, gradient)


# --- what fails ---


class Failure(Exception):
    pass


def fails_at(row):
    def function(rows):
        if row in rows:
            raise Failure
        seen.extend(rows)

    seen = []
    function.seen = seen
    return function


@pytest.mark.parametrize("layout", few_of(LAYOUTS, ["virtual"]))
@pytest.mark.parametrize("row", range(9))
def test_no_call_after_one_that_fails(row, layout):
    on_call = fails_at(row)
    engine = engine_in_turns(Model(on_call), LAYOUTS[layout](3), 3)
    with pytest.raises(Failure) as caught:
        engine.forward_backward(column(9))
    assert on_call.seen == list(range(row))
    assert engine.module.weight.grad is None
    assert f"row {row} (numbers begin at 0)" in caught.value.__notes__[0]
    assert len(caught.value.__notes__) == 1  # no other replica failed
    engine.module.on_call = lambda rows: None
    engine.forward_backward(column(9))


@pytest.mark.parametrize("row", range(9))
def test_backward_that_fails_ends_the_step(row):
    on_backward = fails_at(row)
    seen = []
    engine = engine_in_turns(Model(seen.extend, on_backward), LAYOUTS["virtual"](3), 3)
    with pytest.raises(Failure):
        engine.forward_backward(column(9))
    assert seen == list(range(len(seen)))
    assert row in seen
    assert engine.module.weight.grad is None


@pytest.mark.parametrize("row", range(6))
def test_rows_that_cannot_be_loaded_end_the_step(row):
    """Rows are loaded before the turn."""
    seen = []

    def collate(entries):
        if row in entries:
            raise Failure
        return torch.tensor(entries, dtype=torch.float64).view(-1, 1)

    engine = engine_in_turns(Model(seen.extend), LAYOUTS["virtual"](3), 2)
    with pytest.raises(Failure):
        engine.forward_backward(Rows(list(range(6)), collate))
    assert seen == list(range(len(seen)))
    assert row not in seen
    assert engine.module.weight.grad is None


def test_criterion_in_the_turn_of_its_function():
    """It reads what the forward pass of the same rows has written."""
    written = []

    class Writes(nn.Linear):
        def forward(self, rows):
            written.append(numbers(rows))
            return super().forward(rows)

    read = []

    def criterion(output, _):
        time.sleep(0.001)
        read.append(written[-1])
        return output.square().mean()

    model = Writes(1, 1, dtype=torch.float64)
    engine = engine_in_turns(model, LAYOUTS["shared"](3), 2)
    engine.forward_backward(column(12), criterion=criterion)
    assert read == written
    assert read == [[i, i + 1] for i in range(0, 12, 2)]


SCOPES = [Scope.CRITERION, Scope.FUNCTION, Scope.SUBSTEP]


@pairwise(
    turn=SCOPES,
    where=["forward", "criterion", "backward"],
    graphs=[False, True],
    quick={"graphs": [False]},
)
@pytest.mark.filterwarnings('ignore:accum="auto"')
def test_retries_after_memory_ran_out_in_a_turn(turn, where, graphs):
    """What a failed try has cancelled, the next one does not inherit."""
    seen = []

    def fails(place):
        def function(rows):
            if place == where and len(rows) > 2:
                raise torch.OutOfMemoryError
            if place == "forward":
                seen.append(rows)

        return function

    class Scores(Model):
        def forward(self, rows):
            self.on_call(numbers(rows))
            rows = SlowBackward.apply(rows.clone().requires_grad_(), self.on_backward)
            return rows * self.weight, rows

    def criterion(output, _):
        scores, of_batch = output
        fails("criterion")(numbers(of_batch))
        return scores.square().mean()

    model = Scores(fails("forward"), fails("backward"))
    engine = engine_in_turns(model, LAYOUTS["virtual"](2), "auto", graphs=graphs)
    engine._verifier = Finds(turn)
    engine.forward_backward(column(12), None, criterion)
    assert engine.last_step.retries
    gradient = gradient_of_plain(column(12))
    torch.testing.assert_close(model.weight.grad, gradient)
    engine.module.zero_grad()
    seen.clear()
    engine.forward_backward(column(12), None, criterion)
    torch.testing.assert_close(model.weight.grad, gradient)
    if turn >= Scope.FUNCTION:
        assert seen == [[i, i + 1] for i in range(0, 12, 2)]


# --- what overlaps ---


def test_backward_passes_overlap_calls():
    """The call of the next rows begins while a backward pass runs."""
    in_backward = threading.Event()
    called = threading.Event()
    met = []

    def on_call(rows):
        if rows == [1]:
            met.append(in_backward.wait(60))
            called.set()

    def on_backward(rows):
        if rows == [0]:
            in_backward.set()
            met.append(called.wait(60))

    engine = engine_in_turns(Model(on_call, on_backward), LAYOUTS["shared"](2), 1)
    engine.forward_backward(column(2))
    assert met == [True, True]


def test_calls_of_plain_engine_overlap():
    """Without turns the forward passes of two replicas meet."""
    barrier = threading.Barrier(2, timeout=60)
    engine = ScatterOnceParallel(
        Model(lambda rows: barrier.wait()), 1, ["cpu"] * 2, verify=False
    )
    engine.forward_backward(column(2))


# --- what is refused ---


def test_synchronised_batch_norm_refused():
    model = nn.Sequential(nn.SyncBatchNorm(1), nn.Linear(1, 1))
    engine = engine_in_turns(model, LAYOUTS["shared"](2))
    with pytest.raises(ValueError, match=r"take turns.*BatchNorm2d"):
        engine.forward_backward(column(8).float(), column(8).float(), nn.MSELoss())
    assert all(parameter.grad is None for parameter in model.parameters())
