"""Which steps and rows are looked at, if switches, numbers and words of a program
change.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness.looks import INPUTS, VALUES, net
from harness.models import linear
from harness.oracle import build
from torch.nn import functional as F

from scatterpar import Rows, ScatterOnceParallel, count_labels
from scatterpar.batch.batch import batch_of
from scatterpar.devices.virtual_devices import HOST
from scatterpar.plan import make_plan
from scatterpar.step.request import Request
from scatterpar.verify.rows import RowChoice


def mean_or_std(net, rows, mode="plain"):
    compares = net.compares or mode == "std"
    return (
        net.linear(rows).std(0).sum() if compares else net.linear(rows).square().mean()
    )


def by_switch(engine, step):
    engine.module.compares = step >= 10
    return (INPUTS,)


def by_word(_, step):
    return ({"rows": INPUTS, "mode": "std" if step >= 10 else "plain"},)


def with_number(number):
    return (
        INPUTS,
        VALUES,
        lambda o, t: o.std(0).sum() if number >= 10 else F.mse_loss(o, t),
    )


@dataclass
class Loop:
    """The user's own training loop: its method is the criterion, and it holds the
    engine.
    """

    engine: Any
    weight: float

    def loss(self, output, targets):
        loss = F.mse_loss(output, targets)
        return loss + self.weight * output.std(0).sum() if self.weight else loss


def with_loop(engine, step):
    return INPUTS, VALUES, Loop(engine, 0.5 * (step >= 10)).loss


CHANGES = {  # the model, and what is passed in each step
    "a switch of the module": (net(mean_or_std, compares=False), by_switch),
    "a word in the batch": (net(mean_or_std, compares=False), by_word),
    # Unseen through step 63: a closure with another number was of the same kind.
    "a number": (linear, lambda _, n: with_number(n // 10 * 10)),
    "a number beside an engine": (linear, with_loop),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_step_is_looked_at(devices, name):
    """A term over the batch that began in step 10 was unseen for hundreds of steps."""
    make, batch_of = CHANGES[name]
    with ScatterOnceParallel(build(make), 2, devices(2)) as engine:
        for step in range(10):
            engine.forward_backward(*batch_of(engine, step))
        with pytest.raises(ValueError, match="the gradient would be"):
            engine.forward_backward(*batch_of(engine, 10))


def test_names_in_batches_keep_the_kind():
    model = build(net(lambda net, rows, path: net.linear(rows).square().mean()))
    calls, numbers = [], []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with ScatterOnceParallel(model, 2, ["cpu"]) as engine:
        for step in range(90):
            calls.clear()
            engine.forward_backward({"rows": INPUTS, "path": f"{step}.png"})
            numbers.append(len(calls))
    assert numbers[-10:].count(2) >= 8


def test_criterion_told_how_it_is_called(devices):
    engine = ScatterOnceParallel(build(linear), 2, devices(2))
    words = r"called as criterion\(output, targets\)"
    with engine, pytest.raises(TypeError, match=words):
        engine.forward_backward(INPUTS, VALUES, lambda output: output.mean())


def test_count_labels_counts_averaged_labels():
    labels = torch.tensor([[5, 6, 7], [5, -100, -100], [-100, 2, -100]])
    assert count_labels()(None, labels) == 5
    assert count_labels(shifted=True)(None, labels) == 3
    assert count_labels(5)(None, labels) == 7
    assert count_labels()({"labels": labels}, None) == 5
    assert count_labels(key="y")({"labels": labels}, {"y": labels[:1]}) == 3
    assert pickle.loads(pickle.dumps(count_labels(shifted=True)))(None, labels) == 3


class Counted(Rows):
    """Counts how often rows are selected."""

    calls = 0

    def select(self, rows):
        Counted.calls += 1
        return super().select(rows)


def test_unlooked_step_reads_sizes_of_few():
    """A step with 16,384 short rows took 2.5 times that of an engine with verify=False."""
    rows = Counted([*INPUTS.repeat(100, 1)], torch.stack)
    with ScatterOnceParallel(build(linear), 2, ["cpu"] * 2) as engine:
        for _ in range(3):
            Counted.calls = 0
            engine.forward_backward(rows, None, lambda o, t: o.square().mean())
        assert Counted.calls < 200


def choice_of(targets, *tensors):
    """How rows are chosen whose targets ``tensors`` tell apart."""
    num_rows = len(targets)
    request = Request([batch_of(targets, targets, num_rows, 0)], 0, None)
    plan = make_plan(num_rows, [HOST], accum=2)
    return RowChoice(request, tensors, plan, [-100, 3], 0, is_divided=True, most=9)


def test_row_without_a_term_is_a_part():
    """A mean over terms is NaN for it, also if all rows are alike otherwise."""
    rows = range(8)
    mask = torch.ones(8, 2, dtype=torch.bool)
    assert choice_of(mask, mask).divided(rows) == [[1, 2, 3], [4, 5, 6], [7], [0]]
    mask[4] = False
    assert choice_of(mask, mask).divided(rows) == [[1, 2, 3], [5, 6, 7], [4], [0]]
    labels = torch.zeros(8, 2, dtype=torch.long)
    labels[6] = 3  # a number of the criterion's
    labels[5] = -100
    assert choice_of(labels, labels).divided(rows)[2] == [5]
    # What a mask leaves out comes first.
    assert choice_of(mask, labels, mask).divided(rows)[2] == [4]


def test_single_row_without_a_term_stays_twice():
    mask = torch.zeros(1, 2, dtype=torch.bool)
    assert [*map(len, choice_of(mask, mask).parts(9))] == [1, 1]
