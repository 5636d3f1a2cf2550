"""Losses whose terms do not all count alike: ``LOSSES``, and with a batch ``CASES``, by
name.
"""

import torch
from torch import nn
from torch.nn import functional as F

from harness.agree import EVERY_WAY, Case
from harness.models import CLASSES, FEATURES, mlp, token_classifier
from harness.oracle import randint, randn

CLASS_WEIGHTS = torch.tensor([0.5, 3.0, 1.0, 0.125], dtype=torch.float64)
IGNORED = 2


def classes(rows):
    return randint(CLASSES, rows, seed=rows)


def padded(rows):
    """Classes, of which some are torch's default ``ignore_index``, in uneven runs."""
    targets = classes(rows)
    is_ignored = randn(rows, seed=rows + 1) > 0.2
    targets[is_ignored] = -100
    targets[: rows // 4] = -100
    if (targets == -100).all():
        targets[-1] = 1
    return targets


def half_padded(rows):
    """The first half is ignored: the mean of a share in it is 0 / 0, and its weight
    zero.
    """
    targets = classes(rows)
    half = (rows + 1) // 2
    targets[:half] = -100
    return targets


def probabilities(rows):
    logits = randn(rows, CLASSES, seed=rows)
    return logits.softmax(1)


class LogSoftmaxNLL(nn.NLLLoss):
    """``nn.NLLLoss`` wants log-probabilities: take them inside, so that every case eats
    logits.
    """

    def forward(self, input, target):
        return super().forward(input.log_softmax(1), target)


def smoothed():
    return nn.CrossEntropyLoss(label_smoothing=0.2, weight=CLASS_WEIGHTS)


def weighted():
    return nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)


def ignoring():
    return nn.CrossEntropyLoss(ignore_index=IGNORED)


def summed():
    return nn.CrossEntropyLoss(reduction="sum")


def function_of_torch():
    return F.cross_entropy


# What makes the criterion, and the targets of so many rows.
LOSSES = {
    "mean": (nn.CrossEntropyLoss, classes),
    "sum": (summed, classes),
    "padded": (nn.CrossEntropyLoss, padded),
    "ignore_index": (ignoring, classes),
    "class weights": (weighted, classes),
    "class weights, padded": (weighted, padded),
    "smoothing, class weights": (smoothed, classes),
    "probabilities": (nn.CrossEntropyLoss, probabilities),
    "a share without labels": (nn.CrossEntropyLoss, half_padded),
    "nll, padded": (LogSoftmaxNLL, padded),
    "function of torch": (function_of_torch, classes),
}


class Summed(nn.Module):
    """Says that it is a mean, and is a sum."""

    reduction = "mean"

    def forward(self, output, targets):
        return (output - targets).pow(2).sum()


def masked_mean(output, targets):
    """A mean over real tokens, in a plain function that nobody can look into."""
    mask = targets["mask"]
    losses = F.cross_entropy(output, targets["ids"], reduction="none")
    return (losses * mask).sum() / mask.sum()


def count_of_mask(ids, targets):
    # The ids take part: on their device.
    return targets["mask"].sum() + 0 * ids.sum()


# A criterion that gets all rows has no weights: "whole batch" is slow.
TRAINING = ("engine", "pair")


def case(name, rows, default_run=TRAINING):
    make_criterion, targets_of = LOSSES[name]
    batch = randn(rows, FEATURES), targets_of(rows)
    return Case(
        mlp, batch, lambda _: make_criterion(), accum=3, default_run=default_run
    )


def of_many_terms(name, rows=11, length=6):
    """Targets of shape (rows, length): a row holds several terms, or padding in their
    place.
    """
    make_criterion, targets_of = LOSSES[name]
    targets = targets_of(rows * length)
    targets = targets.unflatten(0, (rows, length))
    if name == "probabilities":
        targets = targets.movedim(-1, 1)  # (rows, classes, length)
    ids = randint(11, rows, length, seed=5)
    return Case(
        token_classifier,
        (ids, targets),
        lambda _: make_criterion(),
        accum=3,
        default_run=["engine"],
    )


TERMS = [
    "mean",
    "padded",
    "class weights",
    "sum",
    "smoothing, class weights",
    "probabilities",
]
LENGTHS = randint(6, 13, seed=9) + 1
MASK = (torch.arange(6) < LENGTHS[:, None]).double()
IDS = randint(11, 13, 6)
MASKED = {"ids": randint(CLASSES, 13, 6, seed=3), "mask": MASK}

EVERY_TRAINING = tuple(
    runner for runner in EVERY_WAY if runner not in ("inference", "guarded pair")
)

CASES = {
    **{name: case(name, 37) for name in LOSSES},
    "mean": case("mean", 37, (*TRAINING, "one", "whole batch", "2 ranks")),
    "sum": case("sum", 37, (*TRAINING, "2 ranks")),
    "padded": case("padded", 37, (*TRAINING, "2 ranks")),
    "class weights, padded": case(
        "class weights, padded", 37, (*TRAINING, "loss", "graphs", "2 ranks")
    ),
    **{f"{name}, two rows": case(name, 2, []) for name in LOSSES},
    "mean, two rows": case("mean", 2, (*TRAINING, "2 ranks")),
    "padded, two rows": case("padded", 2, ["engine"]),
    **{f"{name}, many terms": of_many_terms(name) for name in TERMS},
    "reduction= wins": Case(
        mlp,
        (randn(9, FEATURES), randn(9, CLASSES)),
        lambda _: Summed(),
        options={"reduction": "sum"},
        default_run=TRAINING,
    ),
    "count=": Case(
        token_classifier,
        (IDS, MASKED),
        lambda _: masked_mean,
        options={"count": count_of_mask},
        default_run=(*EVERY_TRAINING, "2 ranks"),
    ),
}
