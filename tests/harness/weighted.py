"""Losses whose terms do not all count alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.models import CLASSES
from harness.oracle import randint, randn

CLASS_WEIGHTS = torch.tensor([0.5, 3.0, 1.0, 0.125], dtype=torch.float64)
IGNORED = 2


@dataclass(frozen=True)
class Case:
    """A criterion, and targets for a batch of some rows (with ``length`` terms in each)."""

    criterion: Callable[[], Any]
    targets: Callable[[int], Tensor]


def classes(rows: int) -> Tensor:
    return randint(CLASSES, rows, seed=rows)


def padded(rows: int) -> Tensor:
    """Classes, of which some are torch's default ``ignore_index``, in uneven runs."""
    targets = classes(rows)
    targets[randn(rows, seed=rows + 1) > 0.2] = -100
    targets[: rows // 4] = -100
    if (targets == -100).all():
        targets[-1] = 1
    return targets


def probabilities(rows: int) -> Tensor:
    return randn(rows, CLASSES, seed=rows).softmax(1)


def values(rows: int) -> Tensor:
    return randn(rows, CLASSES, seed=rows)


def signs(rows: int) -> Tensor:
    return (values(rows) > 0).double()


class LogSoftmaxNLL(nn.NLLLoss):
    """``nn.NLLLoss`` wants log-probabilities: take them inside, so that every case eats logits."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.log_softmax(1), target)


class LogSoftmaxKL(nn.KLDivLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.log_softmax(1), target)


def _ce(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.CrossEntropyLoss(**options)


CASES = {
    "mean": Case(_ce(), classes),
    "sum": Case(_ce(reduction="sum"), classes),
    "padded": Case(_ce(), padded),
    "ignore_index": Case(_ce(ignore_index=IGNORED), classes),
    "class weights": Case(_ce(weight=CLASS_WEIGHTS), classes),
    "class weights, ignore_index": Case(_ce(weight=CLASS_WEIGHTS, ignore_index=IGNORED), classes),
    "class weights, padded": Case(_ce(weight=CLASS_WEIGHTS), padded),
    "smoothing, class weights": Case(_ce(label_smoothing=0.2, weight=CLASS_WEIGHTS), classes),
    "probabilities": Case(_ce(), probabilities),
    "probabilities, class weights": Case(_ce(weight=CLASS_WEIGHTS), probabilities),
    "nll, padded": Case(LogSoftmaxNLL, padded),
    "nll, class weights": Case(lambda: LogSoftmaxNLL(weight=CLASS_WEIGHTS), classes),
    "mse": Case(nn.MSELoss, values),
    "mse, sum": Case(lambda: nn.MSELoss(reduction="sum"), values),
    "bce, positive weights": Case(lambda: nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHTS), signs),
    "kl, batchmean": Case(lambda: LogSoftmaxKL(reduction="batchmean"), probabilities),
    "kl, sum": Case(lambda: LogSoftmaxKL(reduction="sum"), probabilities),
}
