"""The batches of a Trainer's step: how they are made of rows, and how their losses
combine.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch.markers import Rows
from scatterpar.loops.rows import num_rows
from scatterpar.step.request import LossCandidate

# How losses of batches combine into that of all: as means over these numbers, or as a
# sum. A function of a batch is a user's ``count=``.
LABELS = "labels"
SHIFTED = "labels without the first of each row"
ROWS = "rows"
SUM = "a sum, divided by the items of all batches"
How = str | Callable[[Any], Any]

FIRST = operator.itemgetter(0)  # collates a batch that is a micro-batch: it is not cut


class Step(list[Any]):
    """The batches of a step: each is a micro-batch of one replica. Others are cut by
    rows.

    An entry of all batches is read and set by its name: ``step["labels"]`` has the rows
    of the whole step.
    """

    def __getitem__(self, key: Any) -> Any:
        """The batch of this number; or the entry of this name, of all rows."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        return _joined([batch[key] for batch in self])

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set the batch of this number; or the entry of this name, in each batch.

        A tensor or list with all rows of the step is divided among the batches.
        """
        if not isinstance(key, str):
            super().__setitem__(key, value)
            return
        # The user sees the step as one batch, and sets entries of all rows.
        sizes = [num_rows(batch) for batch in self]
        has_rows = isinstance(value, list) or (isinstance(value, Tensor) and value.ndim)
        has_all_rows = has_rows and len(value) == sum(sizes)
        start = 0
        for batch, size in zip(self, sizes, strict=True):
            batch[key] = value[start : start + size] if has_all_rows else value
            start += size

    def keys(self) -> Sequence[str]:
        """The names of the entries that all batches have."""
        return [name for name in self[0] if all(name in batch for batch in self)]

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    get = Mapping.get

    def pop(self, key: Any = -1, *default: Any) -> Any:
        """Remove and return the batch of this number. Refuses names of entries."""
        if isinstance(key, str):
            raise _no_mapping(f"pop({key!r})")
        return super().pop(key)

    def __getattr__(self, name: str) -> Any:
        # Of a mapping, such as a BatchEncoding.
        if name.startswith("_"):
            raise AttributeError(name)
        raise _no_mapping(name)


def _no_mapping(name: str) -> AttributeError:
    return AttributeError(
        f"the inputs of a training_step are the list of all its batches, without "
        f"{name}, where replicas are trained; write into compute_loss, which gets one "
        "batch at a time, or into each batch of the list"
    )


def _joined(entries: list[Any]) -> Any:
    """The entry of all rows, from that of each batch."""
    first = entries[0]
    if isinstance(first, list):
        return list(chain.from_iterable(entries))
    if not isinstance(first, Tensor) or not first.ndim:
        return first
    return torch.cat(entries)


def rows_of_batches(batches: Sequence[Any]) -> Rows:
    """Each batch as a row: batches are joined as rows are.

    Raises:
        ValueError: they cannot be joined, such as texts of other widths.
    """
    try:
        _joined_batches(batches)  # replicas join them later
    except (AttributeError, RuntimeError) as error:
        raise ValueError(f"batches cannot be joined: {error}") from None
    return Rows(batches, _joined_batches)


def _joined_batches(batches: Sequence[Any]) -> Any:
    """All rows of batches in one, of the class of the first."""
    whole = copy.copy(batches[0])
    whole.update(Step(batches))
    return whole


def entry_of(batch: Any, name: str) -> Any:
    """The entry of this name; ``None`` if there is none, or if the batch is a tuple."""
    return batch.get(name) if isinstance(batch, Mapping) else None


def batches_of(step: Any) -> Sequence[Any]:
    """The batches of a ``Step``; any other batch is the only one."""
    return step if isinstance(step, Step) else [step]


def by_number(collate: Any, size: int, rows: Any) -> Step:
    """Batches of ``size`` rows."""
    return Step(
        collate(rows[start : start + size]) for start in range(0, len(rows), size)
    )


def terms(how: How, batch: Any) -> Tensor:
    """The number of terms in each row's loss; in that of the batch, if it cannot be
    said row by row.
    """
    if callable(how):
        count = torch.as_tensor(how(batch))
        return count.detach().reshape(1)
    # What a loss is averaged over if there are no labels.
    one_per_row = torch.ones(num_rows(batch))
    shifted_labels = entry_of(batch, "shift_labels")  # by the user's collator
    labels = shifted_labels
    if labels is None:
        labels = entry_of(batch, "labels")
    if not isinstance(labels, Tensor) or not labels.ndim:
        return one_per_row
    counts = one_per_row
    if how in (LABELS, SHIFTED):
        if how == SHIFTED and labels.ndim > 1 and shifted_labels is None:
            labels = labels[..., 1:]
        is_counted = labels.ne(-100).reshape(len(labels), -1)
        counts = is_counted.sum(1)
    # Labels of packed rows are those of the batch.
    is_by_row = len(labels) == len(one_per_row)
    return counts if is_by_row else counts.sum()[None]


def candidate(how: How, items: Any) -> LossCandidate:
    """What an engine tries: losses of batches combine like this.

    ``items`` are those that calls get: of all batches, by which a loss that is a sum is
    divided. Without them a call counts those of its own batch.
    """
    is_added = how == SUM
    entries = {"items": items, "is_added": is_added}
    if is_added:
        return LossCandidate(SUM, "sum", entries=entries)

    def count(inputs: Mapping[str, Any], _: Any) -> Tensor:
        return terms(how, inputs["batch"]).sum()

    words = "what count= says" if callable(how) else f"a mean over {how}"
    return LossCandidate(words, "mean", count, entries)


def telling_batch(step: Sequence[Any]) -> Any:
    """The batch of a step whose rows tell most of how losses combine."""

    def variety(batch: Any) -> tuple[int, int]:
        counts = terms(LABELS, batch).tolist()
        return len(set(counts)), len(counts)

    return max(step, key=variety)
