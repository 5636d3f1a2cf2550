"""How the losses of micro-batches combine into the loss of the whole batch.

A mean over the batch is the mean of the micro-batches' means, weighted by the number of
terms that each of them averages over; a sum is their sum. Counting rows is right for most
losses, but not where terms are left out (``ignore_index``) or weighted (class weights), nor
where a row holds a varying number of terms (padded tokens).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from scatterpar.devices.fingerprints import Readout
from scatterpar.plan import Plan
from scatterpar.step.criteria import class_counts
from scatterpar.step.request import Request

__all__ = ["counts_of", "weigh"]


def weigh(
    request: Request, plan: Plan, pieces: Iterable[tuple[Any, Any]], readout: Readout
) -> tuple[list[list[float]], float]:
    """The factor of each micro-batch's loss in the loss of the whole batch, share by share.

    And how many terms the whole batch's loss is a mean of; one for a sum.

    Args:
        request: says how the losses combine.
        plan: how the batch is cut.
        pieces: the inputs and targets of each micro-batch in order, for the user's ``count``.
        readout: brings counts to the host.

    Raises:
        TypeError: a count that is neither a number nor a 0-dim tensor.
        ValueError: a count below zero, infinite or NaN.
    """
    spans = [span for share in plan.shares for span in share.micro_batches]
    weights, total = [1.0] * len(spans), 1.0
    if request.is_mean:
        counts = counts_of(request, spans, pieces, readout)
        total = sum(counts)  # where nothing counts, all weights are zero
        weights = [count / total if count else 0.0 for count in counts]
    remaining = iter(weights)
    return [list(islice(remaining, len(share.micro_batches))) for share in plan.shares], total


def counts_of(
    request: Request,
    spans: Sequence[tuple[int, int]],
    pieces: Iterable[tuple[Any, Any]],
    readout: Readout,
) -> list[float]:
    """How many terms the loss of each micro-batch is a mean of."""
    if request.count is not None:
        asked = [request.count(*piece) for piece in pieces]
        return [_as_number(count) for count in _fetched(asked, readout)]
    targets, labels = request.targets, (piece for _, piece in pieces)
    counts = class_counts(request.criterion, targets, labels, spans, request.dim, readout)
    if counts is None:
        return [float(stop - start) for start, stop in spans]
    return [float(count) for count in _fetched(counts, readout)]


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
