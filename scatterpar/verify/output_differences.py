"""Cut the output for some rows into parts, and compare it with outputs of the parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from scatterpar.batch import nested
from scatterpar.devices.fingerprints import same_bits
from scatterpar.numerics.comparison import difference_of_outputs
from scatterpar.verify.rows import Parts, positions_of

# Relative difference of entries that are in another order. The number of rows changes
# rounding, also of entries in the same order.
_ANOTHER_ORDER = 1e-2


def compare_outputs(
    whole: Any, pieces: Sequence[Any], parts: Parts, dim: int
) -> tuple[float, int]:
    """Compare the outputs ``pieces`` of ``parts`` with ``whole``, that of all rows.

    ::

        rows 0 1      a0 b0 a1 b1     in order       a0 a1 b0 b1     out of order
        row 0         a0 b0                          a0 b0

    Returns the largest relative difference of tensors with rows, and the number of
    entries of a tensor with several per row that are out of order, or depend on the
    other rows; 0 if there is none.
    """
    of_rows = 0.0
    misplaced = 0
    cuts = cut_by_parts(whole, parts, dim)
    for piece, cut, part in zip(pieces, cuts, parts, strict=True):
        tensors = zip(*map(nested.tensors, (piece, cut, whole)), strict=False)
        for computed, expected, uncut in tensors:
            has_rows = -computed.ndim <= dim < computed.ndim
            # A tensor without rows has the same bits for any number of rows.
            if not has_rows or same_bits(computed, uncut):
                continue
            if computed.shape == expected.shape:
                difference = difference_of_outputs(computed, expected)
                of_rows = max(of_rows, difference)
                has_several = entries_per_row(computed, len(part), dim) > 1
                if has_several and difference > _ANOTHER_ORDER:
                    misplaced = uncut.size(dim)
            elif computed.ndim == uncut.ndim and computed.size(dim) == uncut.size(dim):
                misplaced = uncut.size(dim)  # as many for fewer rows
    return of_rows, misplaced


def cut_by_parts(output: Any, parts: Parts, dim: int) -> Iterator[Any]:
    """Yield the output for each of ``parts``, cut from that for all of their rows."""
    num_rows = sum(map(len, parts))
    for positions in positions_of(parts):
        yield cut_rows(output, positions.start, len(positions), num_rows, dim)


def cut_rows(output: Any, start: int, size: int, num_rows: int, dim: int) -> Any:
    """The entries of ``size`` rows from ``start`` on, of an output for ``num_rows``."""

    def cut(tensor: Tensor) -> Tensor:
        entries = entries_per_row(tensor, num_rows, dim)
        if not entries:
            return tensor
        return tensor.narrow(dim, start * entries, size * entries).clone()

    return nested.map_tensors(cut, output)


def entries_per_row(tensor: Tensor, num_rows: int, dim: int) -> int:
    """The number of entries along ``dim`` per row; 0 if it is no integer."""
    if not -tensor.ndim <= dim < tensor.ndim:
        return 0
    entries, remainder = divmod(tensor.size(dim), num_rows)
    return 0 if remainder else entries
