"""The batches of a Trainer's step: how they are made of rows, and how their losses
combine.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from scatterpar.integrations.loop import num_rows
from scatterpar.options.costs import plan_by_cost

# How losses of batches combine into that of all: as means over these numbers, or as a
# sum. A function of a batch is a user's ``count=``.
LABELS = "labels"
SHIFTED = "labels without the first of each row"
ROWS = "rows"
SUM = "sum"
How = str | Callable[[Any], Any]

FIRST = operator.itemgetter(0)  # collates a batch that is a micro-batch: it is not cut
_LOOKS = 8  # in steps that are not 1, 2, 4, 8, …


class Step(list[Any]):
    """The batches of a step: each is a micro-batch of one replica. Others are cut by
    rows.

    An entry of all batches is read by its name: ``step["labels"]`` has the rows of the
    whole step.
    """

    def __getitem__(self, key: Any) -> Any:
        """The batch of this number; or the entry of this name, of all rows."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        return _joined(key, [batch[key] for batch in self])

    def keys(self) -> Sequence[str]:
        """The names of the entries that all batches have."""
        names = list(self[0])
        for batch in self[1:]:
            names = [name for name in names if name in batch]
        return names

    def values(self) -> Iterator[Any]:
        """The entries of all rows."""
        return (self[name] for name in self.keys())

    def items(self) -> Iterator[tuple[str, Any]]:
        """The names and entries of all rows."""
        return ((name, self[name]) for name in self.keys())

    def get(self, key: str, default: Any = None) -> Any:
        """The entry of this name, of all rows."""
        return self[key] if key in self.keys() else default


def _joined(name: str, entries: Sequence[Any]) -> Any:
    """The entry of all rows, from that of each batch."""
    first = entries[0]
    if isinstance(first, list):
        return list(chain.from_iterable(entries))
    if not isinstance(first, Tensor) or not first.ndim:
        return first
    shapes = [tuple(entry.shape) for entry in entries]
    if len({shape[1:] for shape in shapes}) > 1:
        raise ValueError(
            f"{name!r} of the batches of this step has the shapes {shapes}, which "
            f"cannot be joined; read it batch by batch, such as step[0][{name!r}]"
        )
    return torch.cat(list(entries))


def batches_of(step: Any) -> Sequence[Any]:
    """The batches of a ``Step``; any other batch is the only one."""
    return step if isinstance(step, Step) else [step]


def by_number(collate: Any, size: int, rows: Any) -> Step:
    """Batches of ``size`` rows."""
    starts = range(0, len(rows), size)
    return Step(collate(rows[start : start + size]) for start in starts)


def by_cost(
    collate: Any, name: str, budget: float, devices: Sequence[Any], rows: Any
) -> Step:
    """Batches of rows whose entries ``name`` have similar lengths, replica by
    replica.
    """
    try:
        costs = [len(row[name]) for row in rows]
    except (KeyError, TypeError):
        raise ValueError(
            f"micro_batch_cost needs the length of each row's {name!r}, the model's "
            f"main input; got {rows[0]!r:.80}; leave micro_batch_cost out"
        ) from None
    return by_lengths(collate, costs, budget, devices, rows)


def by_lengths(
    collate: Any,
    costs: Sequence[float],
    budget: float,
    devices: Sequence[Any],
    rows: Any,
) -> Step:
    """Batches of rows with similar ``costs``, replica by replica."""
    shares = [1.0] * len(devices)  # equal ones
    plan = plan_by_cost(len(rows), costs, devices, budget, shares)
    batches = Step()
    for share in plan.shares:
        for row_numbers in share.row_numbers:
            batch = collate([rows[number] for number in row_numbers])
            batches.append(batch)
    return batches


def terms(how: How, batch: Mapping[str, Any]) -> Tensor:
    """The number of terms in each row's loss; in that of the batch, if it cannot be
    said row by row.
    """
    if callable(how):
        count = torch.as_tensor(how(batch))
        return count.detach().reshape(1)
    one_per_row = torch.ones(num_rows(batch))
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, Tensor) or not labels.ndim:
        return one_per_row
    counts = one_per_row
    if how in (LABELS, SHIFTED):
        is_shifted = "shift_labels" in batch  # by the user's collator
        if how == SHIFTED and labels.ndim > 1 and not is_shifted:
            labels = labels[..., 1:]
        is_counted = labels.ne(-100).reshape(len(labels), -1)
        counts = is_counted.sum(1)
    # Labels of packed rows are those of the batch.
    is_by_row = len(labels) == len(one_per_row)
    return counts if is_by_row else counts.sum()[None]


def weights(how: How, step: Any) -> list[float]:
    """The weights of the losses of a ``Step``'s batches, or of any other batch's
    rows.
    """
    if isinstance(step, Step):
        counts = [float(terms(how, batch).sum()) for batch in step]
    else:
        counts = [float(count) for count in terms(how, step)]
    if how == SUM:
        return [1.0] * len(counts)
    total = sum(counts) or 1.0  # no terms: all weights are zero
    return [count / total for count in counts]


def weights_of_parts(
    how: How, batch: Any, parts: Sequence[tuple[int, int]]
) -> list[float]:
    """The weights of the losses of parts of a batch: each from one row to another."""
    by_row = weights(how, batch)
    rows = num_rows(batch)
    if len(by_row) != rows:  # such as a user's ``count=``, of the whole batch
        by_row = [1 / rows] * rows
    return [sum(by_row[start:stop]) for start, stop in parts]


def options(how: How) -> dict[str, Any]:
    """The engine's options for losses that combine like this."""
    if how == SUM:
        return {"reduction": "sum"}

    def count(inputs: Mapping[str, Any], _: Any) -> Tensor:
        return terms(how, inputs["batch"]).sum()

    return {"count": count}


class Combination:
    """How the losses of a Trainer's batches combine: the first candidate that fits a
    few rows.

    Args:
        candidates: what is tried, the most likely first.
    """

    def __init__(self, candidates: Sequence[How]) -> None:
        self._candidates = candidates
        self._looked_at: list[int] = []  # numbers of steps
        self._is_told = False

    def of(
        self, step: Any, number: int, fit: Callable[[How, Any], bool | None]
    ) -> How | None:
        """How losses of a step's batches, or of parts of its only batch, combine, if
        anything fits.

        ``fit(how, batch)`` tries a candidate: in steps 1, 2, 4, 8, …, and eight times
        in steps in which it matters which of them fits.
        """
        if self._is_due(step, number) and len(weights(ROWS, step)) > 1:
            self._looked_at.append(number)
            batches = batches_of(step)
            batch = next(filter(self._matters, batches), batches[0])
            self._look(dict(batch), step, fit)
        return next(iter(self._candidates), None)

    def _is_due(self, step: Any, number: int) -> bool:
        """Whether to look at this step."""
        is_power_of_two = not number & (number - 1)
        if is_power_of_two and number not in self._looked_at:
            return True
        return len(self._looked_at) < _LOOKS and self._matters(step)

    def _look(
        self, batch: Any, step: Any, fit: Callable[[How, Any], bool | None]
    ) -> None:
        """Keep the candidates that fit a few rows of ``batch``; all if none is refuted
        or confirmed. Warns if that leaves open how the losses of ``step`` combine.
        """
        is_single = num_rows(batch) == 1
        candidates = self._candidates
        if is_single:  # its loss is that of all, whatever it is a mean over
            candidates = [how for how in candidates if how == SUM]
        answers = {how: fit(how, batch) for how in candidates}
        confirmed = [how for how, answer in answers.items() if answer]
        unanswered = [how for how, answer in answers.items() if answer is None]
        is_unanswered = bool(candidates) and len(unanswered) == len(candidates)
        if SUM in confirmed:
            # a loss that divides by the items of all batches is exactly this sum
            self._candidates = [SUM]
        elif not is_single:
            self._candidates = confirmed or unanswered
        if is_unanswered or self._matters(step):
            self._tell()

    def _tell(self) -> None:
        if self._is_told:
            return
        self._is_told = True
        warnings.warn(
            "this step's rows do not show how the losses of batches combine (a batch "
            "of one row does not, nor does a loss that fails for a few rows); they are "
            "averaged, weighted by labels, or else by rows. That is wrong for a loss "
            "that compares rows, such as one with in-batch negatives: pass count= or "
            "reduction= if it combines, or use the stock class on one device",
            stacklevel=5,
        )

    def _matters(self, step: Any) -> bool:
        """Whether candidates give the losses of this step's batches different
        weights.
        """
        weights_of_candidates = set()
        for how in self._candidates:
            rounded = [round(weight, 9) for weight in weights(how, step)]
            weights_of_candidates.add(tuple(rounded))
        return len(weights_of_candidates) > 1
