"""The batches of a Trainer's step: how they are made of rows, and how their losses
combine.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from scatterpar.integrations.loop import num_rows
from scatterpar.options.costs import plan_by_cost

# How losses of batches combine into that of all: as means over these numbers, or as a
# sum.
LABELS, SHIFTED, ROWS, SUM = (
    "labels",
    "labels without the first of each row",
    "rows",
    "sum",
)
FIRST = operator.itemgetter(0)  # collates a batch that is a micro-batch: it is not cut
_LOOKS = 8  # in steps that are not 1, 2, 4, 8, …


class Step(list[Any]):
    """The batches of a step: each is a micro-batch of one replica. Others are cut by
    rows.
    """


def batches_of(step: Any) -> Sequence[Any]:
    """The batches of a ``Step``; any other batch is the only one."""
    return step if isinstance(step, Step) else [step]


def by_number(collate: Any, size: int, rows: Any) -> Step:
    """Batches of ``size`` rows."""
    return Step(
        collate(rows[start : start + size]) for start in range(0, len(rows), size)
    )


def by_cost(
    collate: Any, name: str, budget: float, devices: Sequence[Any], rows: Any
) -> Step:
    """Batches of rows whose entries ``name`` have similar lengths,
    replica by replica.
    """
    try:
        costs = [len(row[name]) for row in rows]
    except (KeyError, TypeError):
        needed = (
            f"micro_batch_cost needs the length of each row's {name!r}, the "
            "model's main input"
        )
        raise ValueError(
            f"{needed}; got {rows[0]!r:.80}; leave micro_batch_cost out"
        ) from None
    plan = plan_by_cost(len(rows), costs, devices, budget, [1.0] * len(devices))
    numbers = chain.from_iterable(share.row_numbers for share in plan.shares)
    return Step(collate([rows[row] for row in part]) for part in numbers)


def terms(how: str, batch: Mapping[str, Any]) -> Tensor:
    """The number of terms in each row's loss; in that of the batch, if labels have
    other rows.
    """
    labels, terms = (
        batch.get("shift_labels", batch.get("labels")),
        torch.ones(num_rows(batch)),
    )
    if not isinstance(labels, Tensor) or not labels.ndim:
        return terms
    is_alike = len(labels) == len(terms)
    if how in (LABELS, SHIFTED):
        skips = how == SHIFTED and "shift_labels" not in batch and labels.ndim > 1
        labels = labels[..., 1:] if skips else labels
        terms = labels.ne(-100).reshape(len(labels), -1).sum(1)
    return terms if is_alike else terms.sum()[None]


def weights(how: str, step: Any) -> list[float]:
    """The weights of the losses of a ``Step``'s batches, or of any other
    batch's rows.
    """
    each = (
        [terms(how, b).sum() for b in step]
        if isinstance(step, Step)
        else terms(how, step)
    )
    counts = [*map(float, each)]
    total = sum(counts) or 1.0
    return [1.0 if how == SUM else count / total for count in counts]


def options(how: str) -> dict[str, Any]:
    """The engine's options for losses that combine like this."""
    count = lambda inputs, _: terms(how, inputs["batch"]).sum()  # noqa: E731
    return {"reduction": "sum"} if how == SUM else {"count": count}


class Combination:
    """How the losses of a Trainer's batches combine: the first candidate that fits a
    few rows.
    """

    def __init__(self, *, shifts_labels: bool) -> None:
        labels = [SHIFTED, LABELS] if shifts_labels else [LABELS, SHIFTED]
        self._candidates: Sequence[str] = [*labels, ROWS, SUM]
        self._asked: list[int] = []  # numbers of steps

    def of(
        self, step: Any, number: int, fit: Callable[[str, Any], bool | None]
    ) -> str | None:
        """How losses of a step's batches, or of parts of its only batch, combine, if
        anything fits.

        ``fit(how, batch)`` tries a candidate: in steps 1, 2, 4, 8, …, and eight times
        in steps in which it matters which of them fits.
        """
        is_due = not number & (number - 1) and number not in self._asked
        is_due |= len(self._asked) < _LOOKS and self._matters(step)
        if is_due and len(weights(ROWS, step)) > 1:
            self._asked.append(number)
            telling = next(filter(self._matters, batches_of(step)), batches_of(step)[0])
            self._candidates = self._fitting(dict(telling), fit)
            if self._matters(step):
                warnings.warn(
                    "this step's rows do not show how the losses of batches combine "
                    "(a batch of "
                    "one row does not); they are averaged, weighted by labels, or "
                    "else by rows",
                    stacklevel=4,
                )
        return next(iter(self._candidates), None)

    def _matters(self, step: Any) -> bool:
        """Whether candidates give the losses of this step's batches
        different weights.
        """
        found = {
            tuple(round(w, 9) for w in weights(how, step)) for how in self._candidates
        }
        return len(found) > 1

    def _fitting(
        self, batch: Any, fit: Callable[[str, Any], bool | None]
    ) -> Sequence[str]:
        """The candidates that fit a few rows of ``batch``; all if none is refuted or
        confirmed.
        """
        is_single = num_rows(batch) == 1
        answers = {
            how: fit(how, batch) for how in ([SUM] if is_single else self._candidates)
        }
        # a loss that divides by the items of all batches is exactly this sum
        if answers.get(SUM):
            return [SUM]
        if is_single:
            return self._candidates
        confirmed = [how for how, answer in answers.items() if answer]
        return confirmed or [how for how, answer in answers.items() if answer is None]
