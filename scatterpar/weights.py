"""How the losses of micro-batches combine into the loss of the whole batch.

A mean over the batch is the mean of the micro-batches' means, weighted by the number of
terms that each of them averages over; a sum is their sum. Counting rows is right for most
losses, but not where terms are left out (``ignore_index``) or weighted (class weights), nor
where a row holds a varying number of terms (padded tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from scatterpar.plan import Plan
from scatterpar.scatter import take

__all__ = ["Count", "counter_for", "normalise", "resolve_reduction", "weigh"]

Count = Callable[[Any, Any], "float | Tensor"]


def resolve_reduction(criterion: Any, reduction: str | None) -> str:
    """``"mean"`` or ``"sum"``: as given, else as the criterion says of itself, else a mean.

    Raises:
        ValueError: anything else, ``"none"`` in particular.

    """
    own = getattr(criterion, "reduction", None)
    if reduction is None and isinstance(own, str):
        reduction = "mean" if own == "batchmean" else own
    if reduction is None:
        return "mean"
    if reduction == "none":
        raise ValueError(
            'reduction="none" gives one loss per term, and a backward pass needs a single one; '
            'use a criterion with reduction="mean" or "sum"'
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    return reduction


def counter_for(criterion: Any, count: Count | None) -> Count | None:
    """What counts a micro-batch's terms; ``None`` when its rows are the count."""
    if count is not None:
        return count
    if isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return lambda _, targets: _count_classes(criterion, targets)
    return None


def _count_classes(criterion: nn.CrossEntropyLoss | nn.NLLLoss, targets: Any) -> float | Tensor:
    """The divisor of a mean cross entropy: targets that are not ignored, by class weight."""
    if not isinstance(targets, Tensor):
        raise TypeError(
            f"{type(criterion).__name__} takes a tensor of targets, got {type(targets).__name__}"
        )
    if targets.is_floating_point():
        # Probabilities of classes: every position is a term, ignored ones and weights do not count.
        return targets.numel() / targets.size(1 if targets.ndim > 1 else 0)
    counted = targets[targets != criterion.ignore_index]
    if criterion.weight is None:
        return counted.numel()
    return criterion.weight.to(counted.device, torch.float64)[counted].sum()


def normalise(counts: Sequence[float | Tensor]) -> list[float]:
    """Each micro-batch's weight in a mean: its count over all counts.

    A micro-batch without terms has weight zero, and so have all when nothing counts.

    Raises:
        TypeError: a count that is neither a number nor a 0-dim tensor.
        ValueError: a count below zero, infinite or NaN.

    >>> normalise([3, 1, 0])
    [0.75, 0.25, 0.0]

    """
    numbers = [_as_number(count) for count in counts]
    total = sum(numbers)
    return [number / total if number else 0.0 for number in numbers]


def _as_number(count: Any) -> float:
    number = count.item() if isinstance(count, Tensor) and count.ndim == 0 else count
    if isinstance(number, (bool, Tensor)) or not isinstance(number, SupportsFloat):
        raise TypeError(f"count must return a number or a 0-dim tensor, got {count!r}")
    number = float(number)
    if not 0 <= number < float("inf"):
        raise ValueError(f"count must return a finite number that is not negative, got {number!r}")
    return number


def weigh(
    plan: Plan, reduction: str, counter: Count | None, inputs: Any, targets: Any, dim: int
) -> list[list[float]]:
    """The factor of each micro-batch's loss in the loss of the whole batch, share by share."""
    spans = [span for share in plan.shares for span in share.micro_batches]
    if reduction == "sum":
        weights = [1.0] * len(spans)
    elif counter is None:
        weights = normalise([stop - start for start, stop in spans])
    else:
        weights = normalise(
            [counter(*take((inputs, targets), start, stop, dim)) for start, stop in spans]
        )
    remaining = iter(weights)
    return [[next(remaining) for _ in share.micro_batches] for share in plan.shares]
