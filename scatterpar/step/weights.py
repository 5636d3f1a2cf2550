"""How the losses of micro-batches combine into the loss of the whole batch.

A mean over the batch is the mean of the micro-batches' means, weighted by the number of
terms that each of them averages over; a sum is their sum. Counting rows is right for most
losses, but not where terms are left out (``ignore_index``) or weighted (class weights), nor
where a row holds a varying number of terms (padded tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.readout import Readout
from scatterpar.plan import Plan
from scatterpar.replicas.compiled import unwrapped
from scatterpar.replicas.mirror import owner_of

__all__ = ["Count", "is_counted", "normalise", "resolve_reduction", "weigh"]

Count = Callable[[Any, Any], "float | Tensor"]


def resolve_reduction(criterion: Any, reduction: str | None) -> str:
    """``"mean"`` or ``"sum"``: as given, else as the criterion says of itself, else a mean.

    Raises:
        ValueError: anything else, ``"none"`` in particular.
    """
    own = _option(criterion, "reduction", None)
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


def weigh(
    plan: Plan,
    reduction: str | None,
    criterion: Any,
    targets: Any,
    dim: int,
    count: Count | None,
    pieces: Iterable[tuple[Any, Any]],
    readout: Readout,
) -> tuple[list[list[float]], float]:
    """The factor of each micro-batch's loss in the loss of the whole batch, share by share.

    And how many terms the whole batch's loss is a mean of; one for a sum.

    Args:
        plan: how the batch is cut.
        reduction: ``"mean"`` or ``"sum"``.
        criterion: tells by its type what it averages over.
        targets: the whole batch's.
        dim: the dimension that holds the rows.
        count: the user's own count of the terms of a piece.
        pieces: the inputs and targets of each micro-batch in order, for ``count``.
        readout: brings counts to the host.
    """
    spans = [span for share in plan.shares for span in share.micro_batches]
    if reduction == "sum":
        weights, total = [1.0] * len(spans), 1.0
    elif count is not None:
        weights, total = normalise(_fetched([count(*piece) for piece in pieces], readout))
    elif _averages_classes(criterion):
        counts: Sequence[float | Tensor]
        if isinstance(targets, Tensor) and spans == sorted(spans):
            counts = _count_classes(criterion, targets, dim, spans, readout)
        else:
            own = [_count_piece(criterion, piece) for _, piece in pieces]
            counts = _fetched(own, readout)
        weights, total = normalise(counts)
    else:
        weights, total = normalise([stop - start for start, stop in spans])
    remaining = iter(weights)
    return [[next(remaining) for _ in share.micro_batches] for share in plan.shares], total


def _averages_classes(criterion: Any) -> bool:
    """Whether ``criterion`` is one of torch's that leave targets out, or weight them."""
    function = criterion.func if isinstance(criterion, partial) else criterion
    owner, _ = unwrapped(owner_of(function))
    return isinstance(owner, (nn.CrossEntropyLoss, nn.NLLLoss)) or function in (
        nn.functional.cross_entropy,
        nn.functional.nll_loss,
    )


def is_counted(criterion: Any, reduction: str | None) -> bool:
    """Whether ``weigh`` is right by what ``criterion`` is: torch's own cross entropy, as it is."""
    owner = owner_of(criterion)
    forward = type(owner).forward if owner is not None else None
    return (
        _averages_classes(criterion)
        and forward in (None, nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
        and reduction == resolve_reduction(criterion, None)
    )


def _option(criterion: Any, name: str, default: Any) -> Any:
    """An option of a criterion: a module's attribute, or a keyword of a partial function."""
    if isinstance(criterion, partial):
        return criterion.keywords.get(name, _option(criterion.func, name, default))
    owner = owner_of(criterion)
    return getattr(criterion if owner is None else owner, name, default)


def _count_classes(
    criterion: Any, targets: Any, dim: int, spans: Sequence[tuple[int, int]], readout: Readout
) -> list[float]:
    """The divisors of mean cross entropies: targets that are not ignored, by class weight."""
    if targets.is_floating_point():
        # Probabilities of classes: every position is a term, whatever its weight.
        return [stop - start for start, stop in spans]
    terms = _class_terms(criterion, targets)
    if terms.ndim > 1:
        terms = terms.movedim(dim, 0).flatten(1).sum(1)
    (rows,) = readout.ask([terms])()
    sizes = torch.tensor([stop - start for start, stop in spans], device="cpu")
    counts: list[float] = torch.segment_reduce(rows.double(), "sum", lengths=sizes).tolist()
    return counts


def _count_piece(criterion: Any, targets: Any) -> float | Tensor:
    """The divisor of a mean cross entropy of one micro-batch."""
    if not isinstance(targets, Tensor):
        raise TypeError(f"cross entropy takes a tensor of targets, got {type(targets).__name__}")
    if targets.is_floating_point():
        return targets.numel() / max(1, targets.size(min(1, targets.ndim - 1)))
    return _class_terms(criterion, targets).sum()


def _class_terms(criterion: Any, targets: Tensor) -> Tensor:
    """How much each class index counts: nothing if ignored, else its class's weight.

    Where the targets are, and with what every accelerator knows: not in float64.
    """
    counted: Tensor = targets != _option(criterion, "ignore_index", -100)
    class_weight = _option(criterion, "weight", None)
    if class_weight is None:
        return counted
    wide = torch.promote_types(class_weight.dtype, torch.float32)
    weight = class_weight.detach().to(targets.device, wide)
    terms: Tensor = weight[targets.masked_fill(~counted, 0)] * counted
    return terms


def normalise(counts: Sequence[float | Tensor]) -> tuple[list[float], float]:
    """Each micro-batch's weight in a mean, its count over all counts; and their total.

    A micro-batch without terms has weight zero, and so have all when nothing counts.

    Raises:
        TypeError: a count that is neither a number nor a 0-dim tensor.
        ValueError: a count below zero, infinite or NaN.

    >>> normalise([3, 1, 0])
    ([0.75, 0.25, 0.0], 4.0)
    """
    numbers = [_as_number(count) for count in counts]
    total = sum(numbers)
    return [number / total if number else 0.0 for number in numbers], total


def _fetched(counts: Sequence[float | Tensor], readout: Readout) -> Sequence[float | Tensor]:
    """Those that are 0-dim tensors on the host; anything else as it is."""
    positions = [
        i for i, count in enumerate(counts) if isinstance(count, Tensor) and not count.ndim
    ]
    arrived = readout.ask([counts[i] for i in positions])()  # type: ignore[misc]
    fetched = list(counts)
    for i, count in zip(positions, arrived, strict=True):
        fetched[i] = count
    return fetched


def _as_number(count: Any) -> float:
    number = count.item() if isinstance(count, Tensor) and count.ndim == 0 else count
    try:
        if isinstance(number, (bool, str, Tensor)):
            raise TypeError
        value = float(number)
    except (TypeError, ValueError):
        raise TypeError(f"count must return a number or a 0-dim tensor, got {count!r}") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"count must return a finite number that is not negative, got {value!r}")
    return value
