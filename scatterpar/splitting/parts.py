"""Cut the rows of a batch into parts, so that a wrong weight of a part shows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.batch.markers import Marker

Part = list[int]  # the numbers of its rows
Split = list[list[Part]]  # the parts of each rank

_IGNORED = (-100, 255, -1)  # labels that losses leave out, the most usual first


def tensors_with_rows(batch: Any) -> list[Tensor]:
    """The tensors of a batch, rows first; for ``Rows`` the size of each entry.

    Tensors that may hold labels come first.
    """
    labels: list[Tensor] = []
    numbers: list[Tensor] = []
    for atom in nested.atoms(batch):
        if isinstance(atom, Marker) and atom.num_rows is not None:
            numbers.append(_sizes_of_entries(atom))
        elif isinstance(atom, Tensor) and atom.ndim and not atom.is_complex():
            tensor = atom.detach()
            is_ignored = any(bool((tensor == value).any()) for value in _IGNORED)
            if tensor.is_floating_point():
                numbers.append(tensor)
            elif is_ignored:
                labels.insert(0, tensor)
            else:
                labels.append(tensor)
    return labels + numbers


def _sizes_of_entries(rows: Marker) -> Tensor:
    """The number of elements in each entry of ``Rows``."""
    sizes = []
    for row in range(rows.num_rows or 0):
        atoms = rows.select([row]).atoms()
        sizes.append(sum(atom.numel() for atom in atoms if isinstance(atom, Tensor)))
    return torch.tensor(sizes)


def order_rows(tensors: Sequence[Tensor], num_rows: int) -> list[int]:
    """The numbers of all rows: those with the most labels first, then the largest.

    So the first of several parts has the most labels per row, and other classes than
    the last one.
    """
    features = []
    for tensor in tensors:
        if not tensor.is_floating_point():
            features.append(_count_labels(tensor, _IGNORED[0]))
    for tensor in tensors:
        flat = tensor.reshape(num_rows, -1)
        features.append(flat.double().nan_to_num().mean(1))
    columns = [feature.tolist() for feature in features]
    return sorted(
        range(num_rows),
        key=lambda row: [column[row] for column in columns],
        reverse=True,
    )


def cut(rows: Sequence[int], count: int, *, equal: bool) -> list[Part]:
    """Cut rows into ``count`` parts, none of them empty.

    Unless they are equal, sizes fall from the first to the last:

    >>> [len(part) for part in cut(range(16), 4, equal=False)]
    [6, 4, 4, 2]

    Raises ``ValueError`` if equal parts would leave rows over.
    """
    if equal and len(rows) % count:
        raise ValueError(
            f"{len(rows)} rows cannot be cut into {count} equal parts; pass a batch "
            f"with a multiple of {count} rows, or equal=False"
        )
    shares = [1] * count if equal else list(range(count, 0, -1))
    spare = len(rows) - count  # after each part has one row
    stops = [0]
    for number in range(1, count + 1):
        stops.append(number + round(spare * sum(shares[:number]) / sum(shares)))
    sizes = [stop - start for start, stop in pairwise(stops)]
    parts = []
    start = 0
    for size in sorted(sizes, reverse=True):
        parts.append(list(rows[start : start + size]))
        start += size
    return parts


def counts_of_rows(
    tensors: Sequence[Tensor], num_rows: int
) -> list[tuple[str, list[float]]]:
    """Numbers that a loss may divide by, for each row, with what they count."""
    counts = [("rows", torch.ones(num_rows))]
    for tensor in tensors:
        for value in _IGNORED:
            name = f"labels that are not {value}"
            counts.append((name, _count_labels(tensor, value)))
            if tensor.ndim > 1:
                later = _count_labels(tensor[:, 1:], value)
                counts.append((f"{name}, without the first of a row", later))
        counts.append(("entries that are not 0", _count_labels(tensor, 0)))
    return [(name, count.tolist()) for name, count in counts]


def hides_counts(tensors: Sequence[Tensor], num_rows: int) -> bool:
    """Whether all rows have equally many labels, though labels could be left out."""
    has_sequences = any(
        tensor.ndim > 1 and not tensor.is_floating_point() for tensor in tensors
    )
    counts = counts_of_rows(tensors, num_rows)
    return has_sequences and all(len(set(count)) == 1 for _, count in counts)


def _count_labels(tensor: Tensor, ignored: int) -> Tensor:
    """The number of entries of each row that are not ``ignored``."""
    return (tensor != ignored).reshape(len(tensor), -1).sum(1)
