"""What user code writes into a batch: the caller's tensors stay, and it is told."""

from __future__ import annotations

import warnings

import pytest
import torch
from harness.models import FEATURES
from harness.oracle import assert_close, assert_gradients, build, gradients, randn
from torch import nn
from torch.nn import functional as F

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    Replicated,
    Rows,
    ScatterOnceParallel,
    gather,
)

pytestmark = pytest.mark.core

ROWS, TARGETS = randn(13, FEATURES), randn(13, 3, seed=1)
LOSS = nn.MSELoss()


def net():
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3))


class Carries(nn.Module):
    """A recurrent cell whose state is a tensor of the caller's."""

    def __init__(self, returns_state=False):
        super().__init__()
        self.returns_state = returns_state
        self.cell, self.head = nn.GRUCell(FEATURES, 5), nn.Linear(5, 3)

    def forward(self, rows, state):
        new = self.cell(rows, state.clone())
        if self.returns_state:
            return self.head(new), new
        state.copy_(new.detach())
        return self.head(new)


class Remembers(nn.Module):
    """Writes the first entries of a cache, then reads all of it."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, rows, cache):
        cache["keys"][:, 0] = rows.mean(1)
        return self.net(rows) + cache["keys"][:, :3]


class Fills(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, rows, out):
        return torch.add(self.net(rows).detach(), 0, out=out)


class Scales(nn.Module):
    """Writes its rows, which nobody reads again."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, rows):
        return self.net(rows.div_(255))


def told_in(call):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    # The location is a line of the caller's.
    assert {warning.filename for warning in told} <= {__file__}
    return [str(warning.message) for warning in told]


def state():
    return torch.zeros(13, 5, dtype=ROWS.dtype)


def carried():
    return (ROWS, state())


def cached():
    return {"rows": ROWS.clone(), "cache": {"keys": torch.zeros(13, 4).double()}}


@pytest.mark.parametrize("whole_batch", [False, True])
@pytest.mark.parametrize(
    ("make", "inputs", "name"),
    [
        (Carries, carried, "inputs[1]"),
        (Remembers, cached, "inputs['cache']"),
        (Scales, ROWS.clone, "inputs"),
    ],
)
def test_input_written_in_forward_is_told_once(
    devices, make, inputs, name, whole_batch
):
    model, batch = build(make), inputs()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:

        def step():
            engine.forward_backward(batch, TARGETS, LOSS, whole_batch=whole_batch)

        # What forward itself reads may be of no other use: rows to scale.
        texts = told_in(step) if make is not Scales else told_in(step) + told_in(step)
        assert [text.split(".")[0] for text in texts] == [
            f"forward writes {name} in place"
        ]
        assert told_in(step) == []


@pytest.mark.parametrize("number", [1, 2])
def test_rows_written_in_place_give_the_plain_gradient(devices, number):
    model, plain = build(Scales), build(Scales)
    LOSS(plain(ROWS.clone()), TARGETS).backward()
    rows = ROWS.clone()
    with ScatterOnceParallel(model, 2, devices(number)) as engine:
        assert told_in(lambda: engine.forward_backward(rows, TARGETS, LOSS)) == []
        assert_gradients(model, gradients(plain))
        assert torch.equal(rows, ROWS)
        # Another batch, as a loader gives: nobody reads the first one again.
        again = told_in(lambda: engine.forward_backward(rows.clone(), TARGETS, LOSS))
    assert again == []


class Attends(nn.Module):
    """Writes a cache, and reads it by an operator that saves it."""

    def __init__(self):
        super().__init__()
        self.net, self.read = net(), nn.Linear(4, 3)

    def forward(self, rows, cache):
        cache.mul_(0.5)[:, 0] = rows.mean(1)
        return self.net(rows) + self.read(cache)


def test_cache_that_is_passed_again_is_told(devices):
    cache = torch.ones(13, 4).double()
    with ScatterOnceParallel(build(Attends), 2, devices(2)) as engine:

        def step():
            engine.forward_backward((ROWS, cache), TARGETS, LOSS)

        assert told_in(step) == []
        (text,) = told_in(step)
        assert text.startswith("forward writes inputs[1] in place.")
        assert told_in(step) == []


def test_labels_written_in_place_are_not_told(devices):
    """The criterion reads them: every step has other ones, or the same."""
    labels = torch.arange(13) % 3 - 1
    inputs = ROWS.clone()
    expected = F.cross_entropy(build(net)(inputs), labels.clamp(0))
    with ScatterOnceParallel(build(net), 2, devices(2)) as engine:

        def step():
            return engine.forward_backward(
                inputs,
                labels,
                lambda output, labels: F.cross_entropy(output, labels.clamp_(0)),
            )

        assert told_in(step) == []
        assert told_in(step) == []
        assert_close(step(), expected, "loss")
    assert labels.min() == -1


def test_state_that_forward_returns_may_be_carried(devices):
    """The remedy of the warning."""
    plain, model = build(Carries), build(lambda: Carries(returns_state=True))
    expected, carried_state = state(), state()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:

        def step():
            _, outputs = engine.forward_backward(
                (ROWS, carried_state),
                TARGETS,
                lambda output, targets: F.mse_loss(output[0], targets),
                return_outputs=True,
            )
            _, new = gather(outputs, "cpu")
            carried_state.copy_(new)

        for _ in range(3):
            LOSS(plain(ROWS, expected), TARGETS).backward()
            assert told_in(step) == []
    assert_close(carried_state, expected, "state")
    assert_gradients(model, gradients(plain))


@pytest.mark.parametrize(
    "grad_mode", [torch.no_grad, torch.inference_mode, torch.enable_grad]
)
def test_buffer_filled_in_inference_is_told(devices, grad_mode):
    model, out = build(Fills).eval(), torch.zeros(13, 3).double()
    with grad_mode(), ScatterOnceParallel(model, 2, devices(2)) as engine:
        (text,) = told_in(lambda: engine.eval()(ROWS, out))
        assert text.startswith("forward writes inputs[1] in place.")
        (text,) = told_in(
            lambda: engine.map(lambda replica, rows, out: replica(rows, out), ROWS, out)
        )
        assert text.startswith("the function writes inputs[1] in place.")


def test_inference_mode_gives_inference_tensors(devices):
    """Rows are none, since these do not count their writes."""
    with ScatterOnceParallel(build(net).eval(), 2, devices(2)) as engine:
        with torch.inference_mode():
            output = engine(ROWS)
            rows = ROWS.clone()
            assert torch.equal(engine(rows), output)
        assert output.is_inference()


def counted(output, targets):
    targets["seen"].add_(1)
    return F.mse_loss(output, targets["y"])


def taken_out(output, targets):
    targets.pop("seen").add_(1)
    return F.mse_loss(output, targets["y"])


@pytest.mark.parametrize("whole_batch", [False, True])
@pytest.mark.parametrize(
    ("criterion", "name"), [(counted, "targets['seen']"), (taken_out, "targets")]
)
def test_targets_written_by_a_criterion_are_told(devices, criterion, name, whole_batch):
    targets = {"y": TARGETS, "seen": torch.zeros(13)}
    with ScatterOnceParallel(build(net), 2, devices(2), verify=False) as engine:
        (text,) = told_in(
            lambda: engine.forward_backward(
                ROWS, targets, criterion, whole_batch=whole_batch
            )
        )
    assert text.startswith(f"the criterion writes {name} in place.")
    assert not targets["seen"].any()


def test_marked_values_that_are_written_are_told(devices):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, rows, table):
            table.mul_(0.9)
            return self.net(torch.stack(rows)) * table

    inputs = Rows(list(ROWS)), Replicated(torch.ones(3).double())
    with ScatterOnceParallel(build(Both), 2, devices(2)) as engine:

        def step():
            engine.forward_backward(inputs, TARGETS, LOSS)

        assert told_in(step) == []  # forward itself reads it
        (text,) = told_in(step)
    assert text.startswith("forward writes inputs[1] in place.")


class InPlaceInside(nn.Module):
    """In-place operators on tensors of its own."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 3), nn.ReLU(inplace=True))

    def forward(self, rows):
        rows = rows * 2
        rows += 1
        hidden = torch.empty_like(rows).copy_(rows)
        return self.net(hidden)


def test_own_tensors_written_in_place_are_no_writes(devices):
    def criterion(output, targets):
        loss = (output - targets).square().mean()
        return loss.mul_(2)

    model = build(InPlaceInside)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert told_in(lambda: engine.forward_backward(ROWS, TARGETS, criterion)) == []
        with torch.no_grad():
            assert told_in(lambda: engine.eval()(ROWS)) == []


def test_failed_step_tells_nothing(devices):
    class Fails(Scales):
        def forward(self, rows):
            super().forward(rows)
            raise RuntimeError("no")

    with ScatterOnceParallel(build(Fails), 2, devices(2), verify=False) as engine:

        def step():
            with pytest.raises(RuntimeError, match="no"):
                engine.forward_backward(ROWS, TARGETS, LOSS)

        assert told_in(step) == []


def test_warning_made_an_error_changes_nothing(devices):
    model = build(Carries)
    with (
        warnings.catch_warnings(),
        ScatterOnceParallel(model, 2, devices(2)) as engine,
    ):
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="in place"):
            engine.forward_backward(carried(), TARGETS, LOSS)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_pair_tells_what_is_written(devices):
    model = DataParallelModel(build(Carries), devices(2))
    criterion = DataParallelCriterion(counted)
    targets = {"y": TARGETS, "seen": torch.zeros(13)}
    inputs = carried()
    texts = told_in(lambda: criterion(model(*inputs), targets))
    assert [text.split(".")[0] for text in texts] == [
        "forward writes inputs[1] in place",
        "the criterion writes targets['seen'] in place",
    ]
    assert told_in(lambda: criterion(model(*inputs), targets)) == []
    assert not inputs[1].any()
    assert not targets["seen"].any()
