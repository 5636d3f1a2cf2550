"""What is measured of a few rows, beside loss and gradients, computed by hand."""

from __future__ import annotations

import math
import os
import warnings

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of, linear
from harness.oracle import build, randn
from harness.small_looks import ROWS, asked
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel
from scatterpar.verify.measurements import (
    attributes_that_calls_move,
    bytes_per_row,
    losses_of_parts,
    outputs_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*calls.*|.*last.*")


def test_outputs_without_graph_same_state(monkeypatch):
    first, second = asked(monkeypatch, lambda runs: outputs_of(runs, [[0], [2]]))
    assert (first.item(), second.item()) == (3, 7)
    assert first.grad_fn is second.grad_fn is None
    assert first.requires_grad  # a criterion may ask for a gradient of it


def test_attributes_moved_by_calls_named(monkeypatch):
    names = asked(monkeypatch, lambda runs: attributes_that_calls_move(runs, [0]))
    assert names == ["the attribute 'last'"]


def test_memory_of_a_row_without_parameters(monkeypatch):
    """The product with the weight keeps its input: a number of 8 bytes."""
    assert asked(monkeypatch, lambda runs: bytes_per_row(runs, [0, 1])) == 8


def test_memory_unknown_if_code_fails(monkeypatch):
    rows = [len(ROWS)]  # there is no such row
    assert asked(monkeypatch, lambda runs: bytes_per_row(runs, rows)) == math.inf


def test_losses_of_parts_differentiate_output(monkeypatch):
    """Of two rows and of one: their sum of squares."""
    output = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)

    def squares(rows, _):
        return rows.square().sum()

    def question(runs):
        return losses_of_parts(runs, output, [[0, 1], [2]])

    first, second = asked(monkeypatch, question, squares)
    assert (first.loss, second.loss) == (5, 9)
    assert first.gradients[0].tolist() == [2, 4, 0]
    assert second.gradients[0].tolist() == [0, 0, 6]


# --- state that begins in a forward pass is told by name if later calls read it ---

INPUTS, VALUES = randn(9, FEATURES), randn(9, CLASSES)


def anchor(m, rows):
    """Keeps the weights of the first call."""
    if m.kept is None:
        m.kept = m.linear.weight.detach().clone()
    return F.linear(rows, m.linear.weight + m.kept)


def switch(m, rows):
    factor = 1.0 if getattr(m, "is_warm", False) else 0.5
    m.is_warm = True
    return m.linear(rows) * factor


def last_output(m, rows):
    output = m.linear(rows)
    previous = 0.0 if m.kept is None else m.kept
    m.kept = output.detach().mean(0)
    return output + 0.1 * previous


def entry(m, rows):
    scale = m.table.setdefault("scale", m.linear.weight.detach().norm())
    return m.linear(rows) / scale


def lazy_norm(m, rows):
    """Scales by the first batch, as ActNorm's initialisation."""
    output = m.linear(rows)
    if m.kept is None:
        m.kept = output.detach().std()
    return output / m.kept


BEGINNING = {
    "anchor": (anchor, "kept"),
    "switch": (switch, "is_warm"),
    "last output": (last_output, "kept"),
    "entry of a dict": (entry, "table"),
    "lazy norm": (lazy_norm, "kept"),
}


def model(forward):
    return build(
        lambda: Of(forward, linear=nn.Linear(FEATURES, CLASSES), kept=None, table={})
    )


def told(net, accum, devices, criterion=F.mse_loss):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ScatterOnceParallel(net, accum, devices) as engine:
            for _ in range(3):
                engine.forward_backward(INPUTS, VALUES, criterion)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("name", BEGINNING)
def test_state_that_begins_is_told(devices, name, accum):
    """It begins anew in each step: off by 5 to 57 %, silently."""
    forward, attribute = BEGINNING[name]
    texts = told(model(forward), accum, devices(2))
    assert [text for text in texts if f"'{attribute}'" in text]


def test_state_that_makes_nan_is_told(devices):
    """NaN is neither larger nor smaller than the loss without the state."""

    def used_up(m, rows):
        factor = 1.0 if m.kept is None else float("nan")
        m.kept = "used"
        return m.linear(rows) * factor

    texts = told(model(used_up), 1, devices(2))
    assert [text for text in texts if "'kept'" in text]


class FirstLoss(nn.Module):
    """Divides by its first loss, as schemes that weigh several losses."""

    def __init__(self):
        super().__init__()
        self.first = None

    def forward(self, output, targets):
        loss = F.mse_loss(output, targets)
        if self.first is None:
            self.first = loss.detach()
        return loss / self.first


def test_state_of_criterion_is_told():
    assert any("'first'" in text for text in told(linear(), 1, ["cpu"], FirstLoss()))


def positions(m, rows):
    """A table that is computed once, and the same in each call."""
    if m.kept is None:
        m.kept = torch.linspace(0, 1, FEATURES, dtype=rows.dtype)
    return m.linear(rows + m.kept)


def kept_for_inspection(m, rows):
    m.last_norm = m.linear.weight.detach().norm()
    return m.linear(rows)


def statistics(m, rows):
    """Buffers are written when the step is over."""
    m.mean.lerp_(rows.detach().mean(0), 0.0)
    m.count = "started"
    return m.linear(rows - m.mean)


@pytest.mark.parametrize("forward", [positions, kept_for_inspection, statistics])
def test_what_no_call_reads_is_not_told(devices, forward):
    net = model(forward)
    net.register_buffer("mean", torch.zeros(FEATURES, dtype=torch.float64))
    texts = told(net, 1, devices(2))
    assert not [text for text in texts if "forward passes move" in text]


def test_calls_that_draw_nothing_find_same_generator(devices):
    """Looks of engines in two threads once left it as one of them had seeded it."""
    before = torch.get_rng_state()
    reader, writer = os.pipe()  # a look would put a list back

    def forward(m, rows):
        is_same = torch.equal(torch.default_generator.get_state(), before)
        os.write(writer, b"same " if is_same else b"other ")
        return m.linear(rows)

    told(model(forward), 2, devices(2))
    os.close(writer)
    with open(reader) as calls:
        found = calls.read().split()
    assert len(found) > 4  # the looks' calls, too
    assert {*found} == {"same"}
