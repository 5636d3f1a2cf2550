"""Which two micro-batches tell most about how losses combine: those that differ most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor

from scatterpar.verify.kinds import is_integer, left_out

__all__ = ["choose"]


def choose(
    pieces: Sequence[Sequence[Tensor]], ignored: set[int], weights: Sequence[float], dim: int
) -> tuple[int, int]:
    """The positions of two micro-batches that can be joined, in order.

    They differ most in how many labels are left out; else in NaN, in zeros or in negative numbers,
    as masks have them; else in the mean of labels or values. Micro-batches that add nothing, or
    hold nothing but labels that are left out, are taken only where the others are alike in these.

    Args:
        pieces: the targets of each micro-batch, or whatever may hold labels and masks.
        ignored: labels that may be left out.
        weights: the factor of each micro-batch's loss.
        dim: the dimension that holds the rows.
    """
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for k, tensors in enumerate(pieces):
        alike[tuple(_shape_of_a_row(t, dim) for t in tensors)].append(k)
    candidates = max(alike.values(), key=len)
    if len(candidates) < 2:
        candidates = list(range(len(pieces)))
    labels = _numbers([pieces[k] for k in candidates], is_integer, lambda t: left_out(t, ignored))
    empty = {candidates[i] for shares in labels for i, share in enumerate(shares) if share == 1}
    full = [k for k in candidates if weights[k] and k not in empty]
    if len(full) >= 2:
        taken = {tuple(share[candidates.index(k)] for share in labels) for k in full}
        doubtful = [k for k in candidates if 0 < weights[k] < 1 and k in empty]  # 1: of a sum
        if doubtful and len(taken) == 1:
            return min(doubtful[0], full[0]), max(doubtful[0], full[0])
        candidates = full
    for numbers in _features([pieces[k] for k in candidates], ignored):
        low, high = numbers.index(min(numbers)), numbers.index(max(numbers))
        if numbers[high] - numbers[low] > 1e-9 * abs(numbers[high]):
            return candidates[min(low, high)], candidates[max(low, high)]
    return candidates[0], candidates[-1]


def _shape_of_a_row(tensor: Tensor, dim: int) -> Hashable:
    shape = list(tensor.shape)
    if shape:
        del shape[dim]
    return (tensor.dtype, *shape)


def _features(pieces: Sequence[Sequence[Tensor]], ignored: set[int]) -> Iterator[list[float]]:
    """A number for each piece, the most telling feature first."""
    yield from _numbers(pieces, is_integer, lambda t: left_out(t, ignored))
    yield from _numbers(pieces, torch.is_floating_point, torch.isnan)
    yield from _numbers(pieces, lambda _: True, lambda t: t == 0)
    yield from _numbers(pieces, torch.is_floating_point, lambda t: t < 0)
    yield from _numbers(pieces, lambda t: not t.is_complex(), torch.nan_to_num)


def _numbers(
    pieces: Sequence[Sequence[Tensor]],
    wanted: Callable[[Tensor], bool],
    function: Callable[[Tensor], Tensor],
) -> list[list[float]]:
    """The mean of ``function`` of each piece's tensors, tensor by tensor."""
    return [
        torch.stack(
            [(function(t).sum(dtype=torch.float64) / max(1, t.numel())).cpu() for t in tensors]
        ).tolist()
        for tensors in zip(*pieces, strict=True)
        if wanted(tensors[0])
    ]
