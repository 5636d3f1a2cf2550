"""Torch's own losses, with their options: each is the loss of the whole batch."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of, linear
from harness.oracle import assert_step, build, randint, randn
from harness.pairwise import few_of
from torch import nn
from torch.nn import functional as F

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    Plan,
    ScatterOnceParallel,
    Share,
    count_labels,
)
from scatterpar.batch.batch import batch_of
from scatterpar.step.loss_weights import compute_loss_weights, counts_as_torch
from scatterpar.step.request import Request

pytestmark = pytest.mark.core

ROWS = randn(13, FEATURES)
LABELS = randint(CLASSES, 13)
VALUES = randn(13, CLASSES, seed=3)
SIGNS = VALUES.sign()
BITS = (VALUES > 0).double()
PROBABILITIES = VALUES.softmax(1)
SORTED = LABELS.sort().values  # a micro-batch has one class, or two
IGNORED = SORTED.where(torch.arange(13) > 4, -100)
WEIGHTS = torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=torch.float64)

# By name: the loss, and its targets.
LOSSES = {
    "L1": (nn.L1Loss(), VALUES),
    "MSE": (nn.MSELoss(), VALUES),
    "Huber": (nn.HuberLoss(delta=0.3), VALUES),
    "smooth L1": (nn.SmoothL1Loss(beta=0.3), VALUES),
    "BCE with logits": (
        nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS + 1),
        BITS,
    ),
    "Poisson": (nn.PoissonNLLLoss(full=True), VALUES.abs()),
    "Poisson, no log": (
        lambda output, targets: F.poisson_nll_loss(output.exp(), targets, False),
        VALUES.abs(),
    ),
    "KL": (nn.KLDivLoss(), PROBABILITIES),
    "KL, batchmean": (nn.KLDivLoss("batchmean"), PROBABILITIES),
    "KL, log": (nn.KLDivLoss("batchmean", log_target=True), PROBABILITIES.log()),
    "soft margin": (nn.SoftMarginLoss(), SIGNS),
    "hinge": (nn.HingeEmbeddingLoss(), SIGNS),
    "multi-label margin": (nn.MultiLabelMarginLoss(), VALUES.argsort(1)),
    "multi-label soft margin": (nn.MultiLabelSoftMarginLoss(WEIGHTS), BITS),
    "multi-margin": (nn.MultiMarginLoss(2, 0.5, WEIGHTS), LABELS),
    "bytes": (nn.CrossEntropyLoss(), LABELS.byte()),
    "weights, bytes": (nn.CrossEntropyLoss(WEIGHTS), LABELS.byte()),
    "functional": (
        partial(F.cross_entropy, weight=WEIGHTS, label_smoothing=0.1),
        SORTED,
    ),
}
for options in product((None, WEIGHTS), (0.0, 0.2), ("mean", "sum")):
    weight, smoothing, reduction = options
    criterion = nn.CrossEntropyLoss(
        weight, reduction=reduction, label_smoothing=smoothing
    )
    name = f"{reduction}, {weight is not None} weights, smoothing {smoothing}"
    LOSSES[f"probabilities, {name}"] = criterion, PROBABILITIES
    LOSSES[f"sorted, {name}"] = criterion, SORTED
    LOSSES[f"ignored, {name}"] = criterion, IGNORED
# Cross entropy without weights, or without smoothing.
VARIANT = re.compile("False weights|smoothing 0.0")


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(
    "name", few_of(LOSSES, [name for name in LOSSES if not VARIANT.search(name)])
)
def test_torch_losses_equal_whole_batch(devices, name):
    criterion, targets = LOSSES[name]
    for accum in (2, 13):  # of one row, too
        with ScatterOnceParallel(linear(), accum, devices(2)) as engine:
            assert_step(engine, ROWS, targets, criterion)


@pytest.mark.parametrize("length", few_of([1, 3], [3]))
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_of_several_positions(devices, length, smoothing):
    def forward(m, inputs):
        return torch.stack([m.linear(inputs * n) for n in range(1, 1 + length)], 2)

    targets = torch.stack([SORTED.roll(n) for n in range(length)], 1)
    targets[2:5] = -100
    criterion = nn.CrossEntropyLoss(WEIGHTS, label_smoothing=smoothing)
    model = build(lambda: Of(forward, linear=nn.Linear(FEATURES, CLASSES)))
    for accum in (2, 13):
        with ScatterOnceParallel(model, accum, devices(2)) as engine:
            assert_step(engine, ROWS, targets, criterion)


def test_uint8_labels_do_not_wrap(devices):
    model = build(lambda: nn.Linear(FEATURES, 200))
    targets = torch.full((13,), 156, dtype=torch.uint8)
    targets[4:] = 3
    with ScatterOnceParallel(model, 3, devices(2), verify=False) as engine:
        assert_step(engine, ROWS, targets, nn.CrossEntropyLoss())


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="an older torch")
@pytest.mark.parametrize("weight", [None, WEIGHTS])
def test_linear_cross_entropy_counts_labels(devices, weight):
    criterion = build(
        lambda: nn.LinearCrossEntropyLoss(CLASSES, CLASSES, weight=weight)
    )
    with ScatterOnceParallel(linear(), 3, devices(2)) as engine:
        assert_step(engine, ROWS, IGNORED, criterion)


class PerToken(nn.CrossEntropyLoss):
    """A subclass, which may count otherwise."""


COUNTED_AS_TORCH = [nn.CrossEntropyLoss(), nn.NLLLoss(), F.cross_entropy, F.nll_loss]
COUNTED_AS_TORCH.append(partial(F.cross_entropy, ignore_index=3))
if hasattr(nn, "LinearCrossEntropyLoss"):
    COUNTED_AS_TORCH.append(nn.LinearCrossEntropyLoss(FEATURES, CLASSES))


@pytest.mark.parametrize("criterion", COUNTED_AS_TORCH)
def test_cross_entropy_of_torch_counts_as_torch(criterion):
    request = Request([batch_of(None, LABELS, 13, 0)], 0, criterion)
    assert counts_as_torch(request)
    assert not counts_as_torch(replace(request, count=count_labels()))


@pytest.mark.parametrize("criterion", [None, PerToken(), nn.MSELoss(), F.l1_loss])
def test_other_loss_may_count_otherwise(criterion):
    assert not counts_as_torch(Request([batch_of(None, LABELS, 13, 0)], 0, criterion))


def test_pair_takes_share_of_zero_weight(devices):
    targets = torch.tensor([1] * 7 + [0, 2, 3, 2, 2, 0])
    criterion = nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2)
    model, plain = linear(), linear()
    criterion(plain(ROWS), targets).backward()
    ids = devices(2)
    outputs = DataParallelModel(model, ids)(ROWS)
    DataParallelCriterion(criterion, ids)(outputs, targets).backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad)


# --- weights of a ragged batch, by hand ---

# Five rows in micro-batches of 2, 2 and 1; labels that count: 1, 2 and 1.
HOST = torch.device("cpu")
RAGGED = [slice(0, 2), slice(2, 4), slice(4, 5)]
FIVE = torch.tensor([3, -100, 1, 0, 2])


def weights_of(criterion, targets=FIVE, **options):
    """The factors of the losses of three micro-batches, of which one replica has two."""
    request = Request([batch_of(None, targets, 5, 0)], 0, criterion, **options)
    shares = [Share(0, HOST, ((0, 2), (2, 4))), Share(1, HOST, ((4, 5),))]
    pieces = [(None, targets[rows]) for rows in RAGGED]
    weights = compute_loss_weights(request, Plan(5, tuple(shares)), pieces)
    return [float(weight) for share in weights.of_losses for weight in share]


@pytest.mark.parametrize(
    ("criterion", "options", "expected"),
    [
        (nn.MSELoss(), {}, [2 / 5, 2 / 5, 1 / 5]),
        (nn.MSELoss(), {"reduction": "sum"}, [1, 1, 1]),
        (nn.CrossEntropyLoss(), {}, [1 / 4, 2 / 4, 1 / 4]),
        # classes 3, 1, 0 and 2 weigh 1, 0, 0.5 and 2
        (nn.CrossEntropyLoss(WEIGHTS), {}, [1 / 3.5, 0.5 / 3.5, 2 / 3.5]),
        (
            nn.MSELoss(),
            {"count": lambda inputs, targets: targets.max()},
            [3 / 6, 1 / 6, 2 / 6],
        ),
    ],
)
def test_ragged_weights_are_parts_of_terms(criterion, options, expected):
    assert weights_of(criterion, **options) == pytest.approx(expected)


def test_ignored_labels_weigh_nothing():
    targets = FIVE.where(torch.arange(5) > 1, -100)
    assert weights_of(nn.CrossEntropyLoss(), targets) == pytest.approx(
        [0, 2 / 3, 1 / 3]
    )


def test_smoothed_unweighted_labels_add_sum():
    """The first micro-batch has class 1 alone, of weight zero: it counts by smoothing."""
    targets = torch.tensor([1, 1, 2, 2, 0])
    criterion = nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1)
    assert weights_of(criterion, targets) == pytest.approx([1 / 4.5] * 3)


def test_outputs_weigh_by_rows():
    shares = (Share(0, HOST, ((0, 2), (2, 3))), Share(1, HOST, ((3, 5),)))
    request = Request([batch_of(None, FIVE, 5, 0)], 0, nn.CrossEntropyLoss())
    weights = compute_loss_weights(request, Plan(5, shares), None)
    assert weights.by_share == [[2, 1], [2]]


def test_labels_in_a_tuple_by_their_number():
    labels = torch.tensor([[5, 6], [5, -100]])
    assert count_labels(key=1)((labels * 0, labels), None) == 3
    assert count_labels(key=-1)(None, [labels * 0, labels]) == 3
    with pytest.raises(TypeError, match="has a tensor 2"):
        count_labels(key=2)((labels, labels), None)


def zeroing(inputs, targets):
    number = (targets >= 0).sum()
    targets[targets < 0] = 0
    return number


def shifting(inputs, targets):
    inputs.add_(1)
    return len(targets)


@pytest.mark.parametrize("count", [zeroing, shifting])
def test_count_that_writes_its_rows_refused(devices, count):
    """The step went on with other rows than it was given, and so did later ones."""
    inputs, labels = randn(8, 3), torch.tensor([0, -1, 1, 1, -1, 0, 1, 0])

    def loss(output, targets):
        return nn.functional.cross_entropy(output, targets, ignore_index=-1)

    model = build(lambda: nn.Linear(3, 2))
    refused = pytest.raises(RuntimeError, match=r"count= wrote into .*\.clone\(\)")
    with ScatterOnceParallel(model, 2, devices(2)) as engine, refused:
        engine.forward_backward(inputs, labels, loss, count=count)
    assert model.weight.grad is None
