"""Candidates for the number of terms that a loss averages over, per row of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.batch.markers import Marker
from scatterpar.devices.copies import to_numbers

IGNORED = (-100, 255, -1)  # labels that losses leave out, the most usual first


class NamedTensor(NamedTuple):
    """A tensor of a batch, and the expression that leads to it: ``batch["mask"]``."""

    path: str
    tensor: Tensor


@dataclass(frozen=True)
class Count:
    """A number of terms per row, such as its labels that are not -100.

    Attributes:
        words: the terms that count.
        path: the expression of the tensor whose entries count; empty for rows.
        per_row: the number of terms of each row.
        ignored: the value of entries that do not count; ``None`` for rows and sums.
        without: ``first`` or ``last`` if this entry of each row does not count either.
        is_selective: whether some entries seem to be left out: ignored labels, padding,
            or what a mask excludes.
    """

    words: str
    path: str
    per_row: tuple[float, ...]
    ignored: int | None = None
    without: str = ""
    is_selective: bool = False

    def of(self, rows: Iterable[int]) -> float:
        """The number of terms of some rows together."""
        return sum(self.per_row[row] for row in rows)

    @property
    def is_sum(self) -> bool:
        """Whether weights or lengths are added up, and not entries counted."""
        return self.ignored is None and bool(self.path)

    @property
    def is_constant(self) -> bool:
        """Whether all rows have equally many terms."""
        return len(set(self.per_row)) <= 1


def named_tensors(batch: Any, path: str = "batch") -> list[NamedTensor]:
    """The tensors of a batch, rows first; for ``Rows`` the size of each entry."""
    tensors = []
    if type(batch) in (tuple, list):
        batch = dict(enumerate(batch))
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            # With the quotes of this package's pages, which tell the path.
            tensors += named_tensors(value, f"{path}[{key!r}]".replace("'", '"'))
        return tensors
    for atom in nested.atoms(batch):
        if isinstance(atom, Marker) and atom.num_rows is not None:
            tensors.append(NamedTensor(path, sizes_of_entries(atom)))
        elif isinstance(atom, Tensor) and atom.ndim and not atom.is_complex():
            tensors.append(NamedTensor(path, atom.detach()))
    return tensors


def sizes_of_entries(rows: Marker, every: int = 1) -> Tensor:
    """The number of elements in each entry of ``Rows``, or in every third, fourth, …"""
    sizes = []
    for row in range(0, rows.num_rows or 0, every):
        atoms = rows.select([row]).atoms()
        sizes.append(sum(atom.numel() for atom in atoms if isinstance(atom, Tensor)))
    return torch.tensor(sizes)


def counts_of(
    tensors: Sequence[NamedTensor], num_rows: int, labels: Sequence[int] = IGNORED
) -> list[Count]:
    """All candidates, the most usual first. A loss may leave out these ``labels``."""
    counts = [Count("rows", "", (1.0,) * num_rows)]
    for path, tensor in sorted(tensors, key=rank_of_labels):
        kinds = {value: f"labels that are not {value}" for value in labels}
        # 0 is the padding of most tokenizers, and what a mask leaves out.
        kinds.setdefault(0, "entries that are not 0")
        # Some libraries mark padding with 1, as torch's key_padding_mask does.
        if is_mask(tensor):
            kinds.setdefault(1, "entries that are 0")
        for ignored, words in kinds.items():
            counts += _with_edges(words, path, tensor, ignored)
        if _may_be_weights(tensor):
            sums = tensor.double().nan_to_num().reshape(num_rows, -1).sum(1)
            counts.append(Count(f"sum of {path}", path, tuple(to_numbers(sums))))
    return counts


def _with_edges(words: str, path: str, tensor: Tensor, ignored: int) -> list[Count]:
    """Counts of entries that are not ``ignored``: all, or without a row's edge."""
    counts = []
    is_counted = tensor != ignored
    without_edge = {"": is_counted}
    # A language model predicts the next token: one edge of a row has no target.
    if tensor.ndim > 1 and tensor.shape[1] > 1:
        without_edge |= {"first": is_counted[:, 1:], "last": is_counted[:, :-1]}
    for edge, entries in without_edge.items():
        text = f"{words}, without the {edge} of a row" if edge else words
        per_row = to_numbers(entries.reshape(len(entries), -1).sum(1))
        # If all entries count, no loss can count them wrong.
        is_selective = not bool(entries.all())
        if ignored == 0:
            is_selective = is_mask(tensor) or (is_selective and _is_padding(is_counted))
        counts.append(Count(text, path, tuple(per_row), ignored, edge, is_selective))
    return counts


def is_mask(tensor: Tensor) -> bool:
    """Whether a tensor has no entries but 0 and 1."""
    return bool(((tensor == 0) | (tensor == 1)).all())


def _is_padding(is_counted: Tensor) -> bool:
    """Whether the entries that do not count are at one end of each row."""
    if is_counted.ndim < 2:
        return False
    # Zeros between other entries are numbers that happen to be 0.
    changes = is_counted.long().diff(dim=1)
    return bool((changes <= 0).all()) or bool((changes >= 0).all())


def has_ignored_label(tensor: Tensor) -> bool:
    """Whether a tensor has a label that losses leave out."""
    if tensor.is_floating_point():
        return False
    return any(bool((tensor == value).any()) for value in IGNORED)


def rank_of_labels(named: NamedTensor) -> int:
    """Tensors that may be labels come first, then masks; floating-point numbers last.

    Padding of tokens is 0, too, as in a mask of them, which is what a loss reads.
    """
    if has_ignored_label(named.tensor):
        return 0
    if is_mask(named.tensor):
        return 1
    return 3 if named.tensor.is_floating_point() else 2


def _may_be_weights(tensor: Tensor) -> bool:
    """Whether entries may be weights of terms, or the lengths of rows."""
    # Neither weights nor lengths are negative; a mask is counted as labels are.
    if tensor.dtype == torch.bool or bool((tensor < 0).any()):
        return False
    return tensor.ndim == 1 or (tensor.ndim == 2 and tensor.is_floating_point())
