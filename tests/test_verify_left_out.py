"""A micro-batch whose labels are all left out: a mean of the other one alone is also its sum.

The first look at such a pair said "It seems to be a sum". Who believed that, and passed
``reduction="sum"``, was not contradicted, and got the gradient times the number of micro-batches.
"""

from __future__ import annotations

import re

import pytest
import torch
from helpers.models import CLASSES, mlp
from helpers.oracle import assert_step, randn
from helpers.weighted import classes
from test_verify import INPUTS, ROWS, step
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel, count_labels

SUB_STEPS = 8  # of one or two rows each, on two replicas
LEFT_OUT = 7  # a class that there is not: no label of this kind is known to be left out

PICTURES = nn.CrossEntropyLoss(ignore_index=255)


def of_pictures(output, targets):
    return PICTURES(output, targets)


def masked_mean(output, targets):
    counts = targets != LEFT_OUT
    losses = F.cross_entropy(output, targets.where(counts, 0), reduction="none")
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def labels(value):
    """Those of one row are left out, and no others: it may be a part of its own."""
    targets = classes(ROWS)
    targets[0] = value
    return targets


class WithLoss(nn.Module):
    """A model that computes its loss itself."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, inputs, targets):
        return masked_mean(self.net(inputs), targets)


of_each_kind = pytest.mark.parametrize(
    ("criterion", "value"), [(of_pictures, 255), (F.cross_entropy, -100), (masked_mean, LEFT_OUT)]
)


@of_each_kind
def test_it_is_not_taken_for_a_sum(devices, criterion, value):
    def in_a_def(output, targets):
        return criterion(output, targets)

    with ScatterOnceParallel(mlp(), SUB_STEPS, devices(2)) as engine:
        with pytest.raises(
            ValueError, match=r"loss weights them with (0 and 1|1 and 0):"
        ) as caught:
            step(engine, in_a_def, labels(value))
        assert "It seems to be a sum" not in str(caught.value)
        if value != LEFT_OUT:
            hint = "" if value == -100 else value
            words = rf"not {value}, of which these rows have (0 and 3|3 and 0): count=.*\({hint}\)"
            assert re.search(words, str(caught.value))
        assert_step(engine, INPUTS, labels(value), in_a_def, count=count_labels(value))


@of_each_kind
def test_a_mean_that_is_called_a_sum_is_never_taken_for_one(devices, criterion, value):
    """Where one part alone counts, other rows tell."""

    def in_a_def(output, targets):
        return criterion(output, targets)

    with (
        ScatterOnceParallel(mlp(), SUB_STEPS, devices(2)) as engine,
        pytest.raises(ValueError, match='reduction="mean" and count='),
    ):
        step(engine, in_a_def, labels(value), reduction="sum")


def test_losses_alone_do_not_make_it_a_sum_either(devices):
    model = WithLoss()
    batch = (INPUTS, labels(LEFT_OUT))
    with ScatterOnceParallel(model, SUB_STEPS, devices(2)) as engine:
        with pytest.raises(ValueError, match="loss weights them with") as caught:
            engine.forward_backward(batch)
        assert "It seems to be a sum" not in str(caught.value)
        with pytest.raises(ValueError, match='reduction="mean" and count='):
            engine.forward_backward(batch, reduction="sum")
        engine.forward_backward(batch, count=lambda inputs, _: (inputs[1] != LEFT_OUT).sum())


def test_a_loss_in_a_module_says_which_labels_it_leaves_out():
    """Found in what a function names, and among the children of a criterion."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.of_pixels = nn.CrossEntropyLoss(ignore_index=3)

        def forward(self, output, targets):
            return self.of_pixels(output, targets)

    targets = torch.arange(ROWS) % (CLASSES - 1)
    targets[: ROWS // 8] = 3
    engine = ScatterOnceParallel(mlp(), SUB_STEPS, ["cpu"] * 2)
    with engine, pytest.raises(ValueError, match=r"count_labels\(3\)"):
        step(engine, Both(), targets)


def masked_by(which):
    """A mean over the targets that ``which`` keeps."""

    def loss(output, targets):
        kept = which(targets)
        return (output[:, 0] - targets)[kept].square().mean()

    return loss


MASKS = {
    "NaN": (lambda t: ~t.isnan(), float("nan")),
    "negative": (lambda t: t >= 0, -1.0),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_later_batch_is_the_first_with_numbers_left_out(devices, kind):
    """What the first batch had agreed on once stood for all."""
    which, missing = MASKS[kind]
    values = randn(ROWS).abs() + 0.5
    fewer = values.clone()
    fewer[:2] = missing
    with ScatterOnceParallel(mlp(), SUB_STEPS, devices(2)) as engine:
        step(engine, masked_by(which), values)
        with pytest.raises(ValueError, match="pass count="):
            step(engine, masked_by(which), fewer)


class Leaves:
    """A criterion that has the label it leaves out as an attribute."""

    def __init__(self, label):
        self.label = label

    def __call__(self, output, targets):
        return F.cross_entropy(output, targets, ignore_index=self.label)


def leaves(label):
    return lambda output, targets: F.cross_entropy(output, targets, ignore_index=label)


@pytest.mark.parametrize("make", [Leaves, leaves], ids=["attribute", "closure"])
def test_a_label_that_the_criterion_brings_along(make):
    """Two micro-batches that held as many of it once agreed, and stood for all others."""
    targets = torch.tensor([1, 1, 1, 2, 2, 3] * 3 + [3, 3, 3, 2, 1, 2])
    with (
        ScatterOnceParallel(mlp(), SUB_STEPS, ["cpu"] * 2) as engine,
        pytest.raises(ValueError, match="count="),
    ):
        step(engine, make(2), targets)
