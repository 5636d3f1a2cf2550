"""whole_batch=True: the gradient of a loss that sees the outputs of all
rows at once.
"""

from __future__ import annotations

import collections
import gc
import itertools
import threading
import types

import pytest
import torch
from faults.state import nothing_changes
from harness.contrastive import FEATURES, clip, nt_xent, two_views, views
from harness.models import Returns, linear
from harness.notes import beginning_of_note
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    gradients,
    randint,
    randn,
    whole_batch,
)
from harness.whole_batches import Versions, pairs
from torch import nn

from scatterpar import ScatterOnceParallel


class Recorder(nn.Linear):
    """Writes down the first row of what it sees, by thread: forward, and backward."""

    calls: list  # shared by the replicas

    def forward(self, numbers):
        first = int(numbers[0, 0])
        Recorder.calls.append(("forward", first))
        outputs = super().forward(numbers)
        outputs.register_hook(lambda _: Recorder.calls.append(("backward", first)))
        return outputs


def recorded(accum, devices):
    Recorder.calls = []
    numbers = torch.arange(6, dtype=torch.float64)[:, None]
    with ScatterOnceParallel(build(lambda: Recorder(1, 2)), accum, devices) as engine:
        engine.forward_backward(numbers, None, pairs, whole_batch=True)
    return Recorder.calls


def test_rows_kept_for_second_pass_only():
    """Under ``no_grad``, too, they once stayed until the criterion had ended."""
    on_device = []

    def criterion(outputs, _):
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        on_device.append(sum(tensor.shape == (3, 77) for tensor in tensors))
        return outputs.square().mean()

    devices = ["cpu:0", "cpu:1"]
    with ScatterOnceParallel(build(lambda: nn.Linear(77, 2)), 4, devices) as engine:
        engine.loss(randn(24, 77), None, criterion, whole_batch=True)
        with torch.no_grad():
            engine.loss(randn(24, 77), None, criterion, whole_batch=True)
    assert on_device[-1] == 0 < on_device[-2]


def test_last_graph_kept_others_recomputed(devices):
    once = [(what, first) for what in ("backward", "forward") for first in (0, 2, 4)]
    assert sorted(recorded(1, devices(3))) == once
    assert recorded(3, ["cpu"]) == [
        *(("forward", first) for first in (0, 2, 4)),
        ("backward", 4),
        *((what, first) for first in (0, 2) for what in ("forward", "backward")),
    ]


def noisy():
    return build(
        lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    )


@pytest.mark.contract
@pytest.mark.draws
def test_same_seed_same_bits_and_random_state(devices):
    found, states = [], []
    with ScatterOnceParallel(noisy(), 3, devices(3), verify=False) as engine:
        for whole in (True, True, False):
            torch.manual_seed(7)
            engine.module.zero_grad()
            engine.forward_backward(randn(20, 5), None, pairs, whole_batch=whole)
            found.append(gradients(engine.module))
            states.append(torch.get_rng_state())
    assert all(map(torch.equal, found[0].values(), found[1].values()))
    assert all(torch.equal(states[0], state) for state in states)


SECOND = {
    "gave other outputs.*random numbers of Python or NumPy": lambda out, n: (
        out * (n + 1)
    ),
    "outputs of a different shape or dtype": lambda out, n: out[:, n // 4 :],
}


@pytest.mark.parametrize("words", SECOND)
def test_differing_second_pass_refused(devices, words):
    """By a count of its own, which nothing puts back."""
    calls = itertools.count()
    model = build(
        lambda: Returns(lambda outputs, _: SECOND[words](outputs, next(calls)))
    )
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    with ScatterOnceParallel(model, 2, devices(2), verify=False) as engine:
        with nothing_changes(model), pytest.raises(RuntimeError, match=words) as error:
            engine.forward_backward(randn(8, FEATURES), None, pairs, whole_batch=True)
        begins = tuple(
            beginning_of_note(i, devices(2)[i], 0, sub_steps=2) for i in (0, 1)
        )
        assert error.value.__notes__[0].startswith(begins)
    # its way out
    with ScatterOnceParallel(model, 1, devices(1), verify=False) as engine:
        engine.forward_backward(randn(8, FEATURES), None, pairs, whole_batch=True)


@pytest.mark.contract
def test_outputs_returned_criterion_runs_once(
    devices,
):
    model, seen = two_views(), []
    both, labels = views(11)

    def criterion(outputs, labels):
        seen.append(threading.current_thread())
        loss = clip(outputs, labels)
        outputs["one"].data.zero_()
        return loss

    options = {"whole_batch": True}
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        _, outputs = engine.forward_backward(
            both, labels, criterion, return_outputs=True, **options
        )
        assert seen == [threading.current_thread()], "the caller's"
        joined = torch.cat([output["one"] for output in outputs])
        assert_close(joined, model(*both)["one"].detach(), "outputs")
        assert all(output["scale"].shape == () for output in outputs)
        _, norms = engine.forward_backward(
            both,
            labels,
            clip,
            return_outputs=lambda output: output["one"].norm(dim=1),
            **options,
        )
        assert_close(torch.cat(norms), joined.norm(dim=1), "norms")


class Shift(nn.Module):
    """Adds a parameter whose gradient is a view of that of the outputs of one row.

    The second forward pass of row 0 waits for that of row 4.
    """

    visits: collections.Counter[int]  # shared by the replicas
    row_4_again: threading.Event

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES, bias=False)
        self.shift = nn.Parameter(randn(FEATURES))

    def forward(self, inputs, number):
        row = int(number)
        Shift.visits[row] += 1
        if Shift.visits[row] == 2 and row == 4:
            Shift.row_4_again.set()
        if Shift.visits[row] == 2 and row == 0:
            assert Shift.row_4_again.wait(timeout=20)
        return self.linear(inputs) + self.shift.unsqueeze(0)


def test_other_replica_adds_gradient():
    """Gradients of two replicas were views of one tensor: what one replica added
    looked like a backward pass inside the other's forward.
    """
    Shift.visits = collections.Counter()
    Shift.row_4_again = threading.Event()
    batch = (randn(6, FEATURES), torch.arange(6))
    model = build(Shift)
    with ScatterOnceParallel(model, 3, ["cpu", "cpu"], verify=False) as engine:
        engine.forward_backward(batch, None, pairs, whole_batch=True)
    expected = build(Shift)
    outputs = expected.linear(batch[0]) + expected.shift
    pairs(outputs, None).backward()
    assert_gradients(model, gradients(expected))


@pytest.mark.parametrize("owner", ["criterion", "module"])
def test_criterion_adds_a_table(devices, owner):
    """Its gradient shares memory with that of the outputs, where later micro-batches
    are added.
    """

    class Table(Shift):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(randn(6 * FEATURES, seed=3))

        def forward(self, inputs):
            return self.linear(inputs) + self.shift.unsqueeze(0)

    def criterion_of(model):
        def criterion(outputs, targets):
            table = model.table.view(6, FEATURES)
            return (outputs + table - targets).square().sum()

        return criterion

    inputs, targets = randn(6, FEATURES), randn(6, FEATURES, seed=1)
    model, expected = build(Table), build(Table)
    other, expected_other = build(Table), build(Table)
    has_table = {"criterion": other, "module": model}[owner]
    of_expected = {"criterion": expected_other, "module": expected}[owner]
    with ScatterOnceParallel(model, 3, devices(2), verify=False) as engine:
        engine.forward_backward(
            inputs, targets, criterion_of(has_table), whole_batch=True
        )
    criterion_of(of_expected)(expected(inputs), targets).backward()
    assert_gradients(model, gradients(expected))
    assert_gradients(other, gradients(expected_other))


def test_scaler_scales_the_gradients(devices):
    model = two_views()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected, plain = whole_batch(model, *views(9), nt_xent)
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        loss = engine.forward_backward(
            *views(9), nt_xent, scaler=scaler, whole_batch=True
        )
    assert_close(loss, expected, "loss")
    assert_gradients(
        model, {k: None if g is None else 1024 * g for k, g in plain.items()}
    )


def test_loss_of_versions_needs_whole_batch():
    """Micro-batches of a number that three divides were cut into other versions, in
    silence.
    """
    with ScatterOnceParallel(linear(), 2, ["cpu:0", "cpu:1"]) as engine:
        words = "Versions expects 3 versions of each image.*pass whole_batch=True"
        with pytest.raises(ValueError, match=words):
            engine.forward_backward(randn(24, FEATURES), randint(3, 24), Versions())


def in_object(logits, _):
    return types.SimpleNamespace(logits=logits)


def logits_of(output):
    """Of all rows, as a criterion may join the objects itself."""
    if isinstance(output, list):
        return torch.cat([piece.logits for piece in output])
    return output.logits


UNJOINED = {
    "object": (in_object, logits_of, "not among the outputs.*tuple, dict or dataclass"),
    "object that is read": (in_object, lambda o: o.logits, "no attribute 'logits'"),
    "sparse": (lambda o, _: o.to_sparse(), lambda o: o.to_dense(), r"sparse.*to_dense"),
}


@pytest.mark.parametrize("case", UNJOINED)
def test_outputs_not_joined_refused(devices, case):
    wrap, read, words = UNJOINED[case]
    model = build(lambda: Returns(wrap))
    inputs = randn(8, model.linear.in_features)
    with (
        ScatterOnceParallel(model, 1, devices(2)) as engine,
        nothing_changes(model),
        pytest.raises((TypeError, AttributeError), match=words) as raised,
    ):
        engine.forward_backward(
            inputs, None, lambda o, _: read(o).square().mean(), whole_batch=True
        )
    if case == "object that is read":
        assert "gets a list with the SimpleNamespace" in raised.value.__notes__[-1]
