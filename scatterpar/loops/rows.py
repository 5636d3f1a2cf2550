"""The rows of a library's batch: how many, and lists with an entry per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from scatterpar.batch import nested
from scatterpar.batch.markers import Marker, Rows


def num_rows(batch: Any) -> int:
    """The number of rows: that of the outermost tensor or marker with rows.

    Without one, the length of the longest list at the outermost level that has lists.
    One if nothing has rows.
    """
    # Level by level: the outermost tensor is the least likely to be one row's own.
    level = [batch]
    longest = 0
    while level:
        for value in level:
            size = size_of(value)
            if size is not None:
                return size
        if not longest:  # no level further out had lists
            lengths = [len(value) for value in level if _is_list(value)]
            longest = max(lengths, default=0)
        level = list(chain.from_iterable(map(nested.children_of, level)))
    return longest or 1


def check_rows(batch: Any, remedy: str) -> None:
    """Raise ``ValueError`` if entries of ``batch`` have different numbers of rows."""
    entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    sizes: dict[Any, int] = {}
    for name, value in entries:
        size = size_of(value)
        if size is not None:
            sizes[name] = size
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the rows of a batch cannot be divided: its tensors have {sizes} of them; "
            f"{remedy}"
        )


def as_rows(batch: Any) -> Any:
    """``batch`` with lists that have one entry per row, such as texts, as ``Rows``.

    A list of columns is not marked: all tensors and lists in it have as many rows as
    the batch.
    """
    rows = num_rows(batch)

    def is_rows(values: Sequence[Any]) -> bool:
        (value,) = values
        return _is_list(value) and len(value) == rows and not _are_columns(value)

    def marked(values: list[Any]) -> Any:
        (value,) = values
        return Rows(value) if is_rows(values) else value

    return nested.merge(marked, [batch], is_rows)


def _are_columns(entries: Sequence[Any]) -> bool:
    """Whether all tensors and lists in ``entries`` have as many rows as there are
    entries, and there are some.
    """
    sizes: set[int] = set()
    for entry in entries:
        is_mapping = isinstance(entry, Mapping)
        values = nested.with_contents(entry) if is_mapping else [entry]
        for value in values:
            size = len(value) if _is_list(value) else size_of(value)
            if size is not None:
                sizes.add(size)
    return sizes == {len(entries)}


def _is_list(value: Any) -> bool:
    """Whether ``value`` is a list or tuple that may have an entry per row."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def size_of(value: Any) -> int | None:
    """The number of rows of a tensor or marker; ``None`` if there are none."""
    if isinstance(value, Marker):
        return value.num_rows
    return len(value) if isinstance(value, Tensor) and value.ndim else None
