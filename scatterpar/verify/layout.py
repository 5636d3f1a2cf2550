"""Measure how many entries of an output belong to a row, from a few rows and two parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.fingerprints import same_bits
from scatterpar.step import nested
from scatterpar.verify.gradient_check import relative_difference

_TOLERANCE = 1e-2  # the number of rows changes how kernels round


def measure_layout(outputs: Sequence[Any], sizes: Sequence[int], dim: int) -> tuple[Any, bool]:
    """Measure how many entries along ``dim`` each row has in each tensor of an output.

    Args:
        outputs: the outputs for a few rows, for all of these except the last, and for the last.
        sizes: the numbers of rows of the three.
        dim: the dimension that holds the rows.

    Returns:
        A pair. The numbers of entries per row are nested like an output; 0 means that a tensor has
        no rows. The bool is false if the parts joined in the wrong order would have the same
        values.

    Raises:
        ValueError: the outputs of the parts, joined, are not the output for all these rows.
    """
    shows = True

    def entries(leaves: list[Any]) -> int | None:
        nonlocal shows
        if not all(isinstance(leaf, Tensor) and -leaf.ndim <= dim < leaf.ndim for leaf in leaves):
            return None
        lengths = [leaf.size(dim) for leaf in leaves]
        if lengths == [lengths[0]] * 3 or lengths == [*sizes]:
            return 1 if lengths == [*sizes] else 0
        whole, first, second = leaves
        joined = torch.cat([first, second], dim)
        if [n * sizes[0] for n in lengths] != [lengths[0] * n for n in sizes]:
            raise ValueError(_refusal(lengths, sizes, "which is no number of entries per row"))
        if not _is_close(joined, whole):
            raise ValueError(_refusal(lengths, sizes, "and not in the order of the rows"))
        shows = shows and not same_bits(torch.cat([second, first], dim), whole)
        return int(lengths[0] // sizes[0])

    return nested.merge(entries, outputs), shows


def _is_close(joined: Tensor, whole: Tensor) -> bool:
    if same_bits(joined, whole) or not (whole.is_floating_point() or whole.is_complex()):
        return same_bits(joined, whole)
    return relative_difference([joined], [whole])[0] <= _TOLERANCE


def _refusal(lengths: Sequence[int], sizes: Sequence[int], problem: str) -> str:
    entries = " and ".join(map(str, lengths))
    rows = " and ".join(map(str, sizes))
    return (
        f"the module's output has {entries} entries for {rows} rows, {problem}: the outputs of "
        f"micro-batches cannot be joined to what one call gives. Return one entry per row, such "
        f"as torch.stack([a, b], 1) in the place of torch.cat([a, b]). Nothing was changed; an "
        f"engine made with verify=False does not check."
    )
