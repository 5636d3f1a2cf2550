"""How the replicas' losses become the whole batch's: what ancestors got wrong, and its edges."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness.models import CLASSES, FEATURES, Classifier, Returns, mlp
from harness.oracle import assert_close, build, randint, randn
from torch import nn
from torch.nn.functional import cross_entropy

from pair.common import Pair, assert_pair
from scatterpar import DataParallelCriterion, DataParallelModel

pytestmark = pytest.mark.core

INPUTS, TARGETS = randn(9, FEATURES), randint(CLASSES, 9)


def test_the_criterion_gets_each_output_with_its_own_targets(devices):
    seen = []

    def criterion(output, targets):
        seen.append((output[:, 0].tolist(), targets.tolist()))
        return output.mean()

    outputs = DataParallelModel(nn.Identity(), devices(4))(torch.arange(9.0)[:, None])
    DataParallelCriterion(criterion, devices(4))(outputs, torch.arange(9))
    assert sorted(seen) == [(list(map(float, rows)), rows) for _, rows in sorted(seen)]
    assert sorted(rows for _, rows in seen) == [[0, 1, 2], [3, 4], [5, 6], [7, 8]]


@pytest.mark.parametrize("share", [slice(0, 3), slice(3, 5), slice(7, 9)])
def test_a_share_that_is_all_ignored_adds_nothing(devices, share):
    """Its own mean is 0 / 0: weight zero takes out even NaN, from the gradients too."""
    targets = TARGETS.clone()
    targets[share] = -100
    loss = assert_pair(mlp(), INPUTS, targets, nn.CrossEntropyLoss(), devices(4))
    assert torch.isfinite(loss)
    counted = assert_pair(
        mlp(), INPUTS, targets, cross_entropy, devices(4), count=lambda _, t: (t != -100).sum()
    )
    assert_close(counted, loss, "loss")


def test_a_batch_that_is_all_ignored_is_no_nan(devices):
    model = mlp()
    pair = Pair(model, nn.CrossEntropyLoss(), devices(4))
    loss = pair.loss(INPUTS, torch.full((9,), -100))
    assert loss.item() == 0
    loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        assert not pair.loss(INPUTS, torch.full((9,), -100)).requires_grad


def nested(output, targets):
    classes, (soft,) = targets["classes"], targets["soft"]
    return cross_entropy(output, classes) + targets["factor"] * cross_entropy(output, soft)


def without_rows(output, target):
    return (output - (1.0 if target is None else target)).square().mean()


def of_two_heads(outputs, targets):
    side = cross_entropy(outputs["side"][0], targets)
    return cross_entropy(outputs["main"], targets) + 0.4 * side


class Lossy(Classifier):
    def forward(self, inputs, labels):
        return {"loss": cross_entropy(self.linear(inputs), labels)}


NESTED = {
    "classes": TARGETS,
    "soft": (randn(9, CLASSES).softmax(1),),
    "factor": torch.tensor(0.5).double(),
    "names": "not a tensor",
}
HEADS = partial(Returns, lambda out, _: {"main": out, "side": [out * 2]})
CASES = {
    "nested targets": (mlp, INPUTS, NESTED, nested),
    # One label for all, as a discriminator gets: the rows are those of the outputs.
    "a number for all": (mlp, INPUTS, 1.0, without_rows),
    "a 0-dim tensor for all": (mlp, INPUTS, torch.tensor(1.0).double(), without_rows),
    "no targets": (mlp, INPUTS, None, without_rows),
    "several outputs": (HEADS, INPUTS, TARGETS, of_two_heads),
    "the module's own losses": (Lossy, (INPUTS, TARGETS), TARGETS, lambda out, _: out["loss"]),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_targets_of_any_kind(devices, case):
    make, *given = CASES[case]
    assert_pair(build(make), *given, devices(4))


def test_the_loss_has_the_criterion_s_dtype(devices):
    outputs = (torch.ones(3, 2).half(), torch.zeros(2, 2).half())
    loss = DataParallelCriterion(nn.MSELoss(), devices(2))(outputs, torch.zeros(5, 2).half())
    assert loss.dtype == torch.half
    assert loss.item() == pytest.approx(0.6, abs=1e-3)
