"""Cut the output for some rows into parts, and compare it with outputs of the parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from scatterpar.batch import nested
from scatterpar.batch.joining import entries_per_row
from scatterpar.devices.bits import same_bits
from scatterpar.numerics.comparison import relative_difference
from scatterpar.verify.rows import Parts, positions_of


def difference_by_rows(
    whole: Any, pieces: Sequence[Any], parts: Parts, dim: int
) -> float:
    """Compare the outputs ``pieces`` of ``parts`` with ``whole``, that of all rows.

    Returns the largest relative difference of tensors with rows.
    """
    of_rows = 0.0
    cuts = cut_by_parts(whole, parts, dim)
    for piece, cut in zip(pieces, cuts, strict=True):
        tensors = zip(*map(nested.tensors, (piece, cut, whole)), strict=False)
        for computed, expected, uncut in tensors:
            has_rows = -computed.ndim <= dim < computed.ndim
            # A tensor without rows has the same bits for any number of rows.
            if not has_rows or same_bits(computed, uncut):
                continue
            if computed.shape == expected.shape:
                of_rows = max(of_rows, _difference_of_outputs(computed, expected))
    return of_rows


def _difference_of_outputs(actual: Tensor, expected: Tensor) -> float:
    """The largest relative difference between two outputs of one shape.

    It is infinite if outputs that are not floating-point differ, or if NaN and infinity
    are not in the same places.
    """
    if same_bits(actual, expected):
        return 0.0
    if not (actual.is_floating_point() or actual.is_complex()):
        return math.inf
    actual = actual.to_dense()
    expected = expected.to_dense()
    # NaN would be an infinite difference, also if both outputs have it.
    is_same = (actual == expected) | (actual.isnan() & expected.isnan())
    left_out = is_same & ~expected.isfinite()
    return relative_difference(
        [actual.masked_fill(left_out, 0)], [expected.masked_fill(left_out, 0)]
    )


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
