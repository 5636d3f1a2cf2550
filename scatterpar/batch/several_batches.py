"""The batches of a step: one, or several of ``Rows.from_batches``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from scatterpar.batch.batch import Batch, batch_of
from scatterpar.batch.markers import Batches, count_rows


def batches_of(inputs: Any, targets: Any, dim: int) -> list[Batch]:
    """The batches of a step: one, or those of ``Rows.from_batches``.

    ::

        inputs          targets              rows of the batches
        8 rows          8 rows               8
        5 + 3 rows      5 + 3 rows           5, 3
        5 + 3 rows      8 rows               5, 3
        5 + 3 rows      None, or a number    5, 3
        5 + 3 rows      4 + 4 rows           an error

    Raises ``ValueError`` for what cannot be split into rows, and ``TypeError`` for a
    marker inside a marker.
    """
    if not (isinstance(inputs, Batches) or isinstance(targets, Batches)):
        rows = count_rows({"inputs": inputs, "targets": targets}, dim)
        return [batch_of(inputs, targets, rows, dim)]
    # Each batch begins at the row at which the one before it ends.
    sizes = _sizes_of_batches(inputs, targets, dim)
    spans = list(pairwise(accumulate(sizes, initial=0)))
    inputs_by_batch = _parts_of_batches(inputs, spans, dim)
    targets_by_batch = _parts_of_batches(targets, spans, dim)
    batches: list[Batch] = []
    for number, (start, stop) in enumerate(spans):
        batch = batch_of(
            inputs_by_batch[number], targets_by_batch[number], stop - start, dim, start
        )
        batches.append(batch)
    return batches


def _sizes_of_batches(inputs: Any, targets: Any, dim: int) -> list[int]:
    """The number of rows of each of several batches.

    Raises ``ValueError`` if inputs and targets disagree.
    """
    sizes_by_part: dict[str, list[int]] = {}
    single_parts: dict[str, Any] = {}
    for name, part in (("inputs", inputs), ("targets", targets)):
        if isinstance(part, Batches):
            sizes_by_part[name] = [
                count_rows({f"{name}, batch {number}": batch}, dim)
                for number, batch in enumerate(part.entries)
            ]
        else:
            single_parts[name] = part
    sizes = next(iter(sizes_by_part.values()))
    total = sum(sizes)
    for name, part in single_parts.items():
        # A part that has no rows at all counts as one with those of all batches.
        rows = count_rows({name: part}, dim, known=total)
        sizes_by_part[name] = sizes if rows == total else [rows]
    if all(sizes_of_part == sizes for sizes_of_part in sizes_by_part.values()):
        return sizes
    shown: list[str] = []
    for name, sizes_of_part in sizes_by_part.items():
        shown.append(f"{name} with {' + '.join(map(str, sizes_of_part))}")
    raise ValueError(
        f"Rows.from_batches: inputs and targets have different numbers of rows along "
        f"dim={dim}: {', '.join(shown)}; pass inputs and targets with the same number "
        f"of rows in each batch"
    )


def _parts_of_batches(
    part: Any, spans: Sequence[tuple[int, int]], dim: int
) -> Sequence[Any]:
    """The inputs or targets of each batch, which have these rows."""
    if isinstance(part, Batches):
        return part.entries
    _, rows = spans[-1]
    # Alone, so that its own markers and tensors are sliced, and nothing else.
    whole = batch_of(part, None, rows, dim)
    return [whole.select(range(*span)).inputs for span in spans]
