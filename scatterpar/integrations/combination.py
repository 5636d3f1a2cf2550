"""How a Trainer's losses combine: found out with a few rows, never guessed in silence.

What a model's signature says of ``num_items_in_batch`` is no proof: BERT for regression accepts it
and ignores it. So the loss of a few rows is looked at. With twice the number it is half of it if it
divides by the number. And the losses of each row alone make up that of all in one way, or in none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = [
    "LABELS",
    "PARTS",
    "ROWS",
    "SHIFTED",
    "SUM",
    "Combination",
    "rows_of",
    "terms_of",
    "try_out",
]

PARTS = "sum of parts, each divided by num_items_in_batch"
LABELS = "mean over labels"
SHIFTED = "mean over labels without the first of each row"
ROWS = "mean over rows"
SUM = "sum"

_IGNORED = -100


@dataclass(frozen=True)
class Combination:
    """How losses combine.

    Attributes:
        kind: ``PARTS``, ``LABELS``, ``SHIFTED``, ``ROWS`` or ``SUM``.
        deviation: how far that was from the loss of these rows, relative to it; infinite where the
            loss of one row alone is none, as a mean of no terms is.
        tolerance: what rounding explains.
        decisive: no other kind fits.
    """

    kind: str
    deviation: float = 0.0
    tolerance: float = 0.0
    decisive: bool = False

    @property
    def exact(self) -> bool:
        """Whether the losses combine so, up to rounding."""
        return self.deviation <= self.tolerance

    @property
    def adds_up(self) -> bool:
        """Whether losses are added as they are, each given the whole number of items."""
        return self.kind in (PARTS, SUM)


def rows_of(batch: Mapping[str, Any]) -> int:
    """The rows of a Trainer's batch: the first tensor's size, or the longest list's."""
    tensors = (len(v) for v in batch.values() if isinstance(v, Tensor) and v.ndim)
    lists = (len(v) for v in batch.values() if isinstance(v, list))
    return next(tensors, None) or max(lists, default=1)


def terms_of(batch: Mapping[str, Any], *, shifted: bool) -> Tensor | int:
    """How many labels count, as the Trainer counts them; the rows where there are no labels.

    Args:
        batch: what the model takes.
        shifted: the loss leaves out the first label of each row.
    """
    labels = batch.get("shift_labels")
    if not isinstance(labels, Tensor):
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or not labels.ndim:
            return rows_of(batch)
        labels = labels[..., 1:] if shifted else labels
    return labels.ne(_IGNORED).sum()


def try_out(
    loss_of: Callable[[Mapping[str, Any], Any], Tensor],
    batch: Mapping[str, Any],
    terms: Callable[[Mapping[str, Any]], Any],
    tolerance: float,
) -> Combination | None:
    """The kind by which the losses of a few rows make up that of all; ``None`` if they do not tell.

    One row tells whether its loss divides by the number of items, and no more.

    Args:
        loss_of: the loss of a batch, given its number of items; without side effects.
        batch: a Trainer's batch.
        terms: the number of items of a batch.
        tolerance: relative differences that rounding explains.
    """
    few = _telling_rows(batch, terms)
    if not few:
        return None
    pieces = [_select(batch, [i]) for i in few]
    every = _select(batch, few)
    items, own = terms(every), [terms(piece) for piece in pieces]

    def loss(rows: Mapping[str, Any], number: Any) -> float:
        return float(loss_of(rows, number))

    whole = loss(every, items)
    if not math.isfinite(whole):
        return None
    size = abs(whole) or 1.0

    def off_by(made: float) -> float:
        return math.inf if math.isnan(made) else abs(made - whole) / size

    if abs(2 * loss(every, 2 * items) - whole) <= tolerance * size:
        parts = sum(loss(piece, items) for piece in pieces)
        return Combination(PARTS, off_by(parts), tolerance, decisive=True)
    if len(few) == 1:
        return None
    losses = [loss(piece, number) for piece, number in zip(pieces, own, strict=True)]

    def mean(counts: Sequence[float]) -> float:  # weight zero takes out even NaN, as in a step
        counted = zip(counts, losses, strict=True)
        return sum(count * value for count, value in counted if count) / (sum(counts) or 1.0)

    counts = [float(number) for number in own]
    off = {
        LABELS: off_by(mean(counts)),
        SHIFTED: off_by(mean([float(terms_of(piece, shifted=True)) for piece in pieces])),
        ROWS: off_by(mean([1.0] * len(pieces))),
        SUM: off_by(sum(losses)),
    }
    fitting = [kind for kind in off if off[kind] <= tolerance]
    # Where nothing fits it is taken for a mean: that is right up to what compares rows.
    kind = fitting[0] if fitting else min((LABELS, SHIFTED, ROWS), key=lambda kind: off[kind])
    return Combination(kind, off[kind], tolerance, len(set(counts)) > 1 and len(fitting) == 1)


def _telling_rows(batch: Mapping[str, Any], terms: Callable[[Mapping[str, Any]], Any]) -> list[int]:
    """The rows with the fewest, the most and a middle number of terms, but not without any."""
    counts = {i: float(terms(_select(batch, [i]))) for i in range(rows_of(batch))}
    counted = [i for count, i in sorted((count, i) for i, count in counts.items() if count)]
    return list(dict.fromkeys(counted[i] for i in (0, len(counted) // 2, -1) if counted))


def _select(batch: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    """Some rows of a batch; its lists with one entry per row, too."""
    count = rows_of(batch)

    def one(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and len(value) == count:
            return value[rows]
        if isinstance(value, list) and len(value) == count:
            return [value[i] for i in rows]
        return value

    return {key: one(value) for key, value in batch.items()}
