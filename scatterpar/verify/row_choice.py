"""Choose the rows of a batch that show best how losses combine; find ranges of labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from scatterpar.devices.runtime import HOST
from scatterpar.devices.transfers import to_device, to_host, to_numbers
from scatterpar.step import nested
from scatterpar.step.markers import Marker, all_tensors
from scatterpar.step.request import Request

_LARGEST = 2**22  # tensors of more elements are not searched
_WORDS = 1000  # labels above this are token ids, of which only the power of two counts

Parts = Sequence[Sequence[int]]


def may_be_labels(tensor: Tensor) -> bool:
    """Whether the tensor may hold labels."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def informative_tensors(request: Request) -> list[Tensor]:
    """Tensors that may hold labels, masks, lengths or weights of each row; rows are in dimension 0.

    Of ``Rows``: the number of elements in each row. Without targets also floating-point inputs of
    at most two dimensions.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Marker) and leaf.num_rows is not None:
            rows = [leaf.select([row]) for row in range(leaf.num_rows)]
            return torch.tensor([sum(t.numel() for t in all_tensors(row)) for row in rows])
        return leaf.detach().movedim(request.dim, 0) if _is_dense(leaf) else None

    targets, inputs = (
        [*nested.tensors(nested.map_leaves(one, value))]
        for value in (request.targets, request.inputs)
    )
    few = [t for t in inputs if sum(n > 1 for n in t.shape[1:]) <= (2 if may_be_labels(t) else 1)]
    found = targets + [t for t in few if not (targets and t.is_floating_point())]
    found.sort(key=may_be_labels, reverse=True)
    return [t for t in found if not t.is_complex() and 0 < t.numel() <= _LARGEST]


def _is_dense(leaf: Any) -> bool:
    return type(leaf) in (Tensor, Parameter) and leaf.layout == torch.strided and leaf.ndim > 0


def value_ranges(tensors: Iterable[Tensor]) -> list[float]:
    """How far the numbers of each tensor go. A tensor is beyond a range if any number is larger.

    For each tensor: minus the lowest number, the highest, and whether any row of labels begins, or
    ends, with two equal values (padding). Numbers of large ranges, and all that are not integers,
    count by their sign and power of two.
    """
    asked: list[Tensor] = []
    labels: list[bool] = []
    for tensor in tensors:
        low, high = tensor.aminmax()
        ends = [torch.zeros((), device=tensor.device)] * 2
        if may_be_labels(tensor) and tensor.ndim == 2 and tensor.size(1) > 1:
            ends = [(tensor[:, k] == tensor[:, k + 1]).any() for k in (0, -2)]
        asked += [low, high, *ends]
        labels.append(may_be_labels(tensor))
    numbers = [float(value) for value in to_host(asked)]
    reach: list[float] = []
    by_kind = (numbers[k::4] for k in range(4))
    for whole, lowest, highest, *repeats in zip(labels, *by_kind, strict=True):
        is_exact = whole and highest <= _WORDS
        reach += (-lowest, highest) if is_exact else map(_roughly, (-lowest, highest))
        reach += repeats
    return reach


def _roughly(value: float) -> float:
    if math.isnan(value):
        return math.inf
    if not value or math.isinf(value):
        return value
    return math.copysign(math.frexp(value)[1] + 1100, value)


def choose_rows(
    tensors: Sequence[Tensor],
    num_rows: int,
    max_rows: int,
    ignored_labels: Iterable[int] = (),
    variant: int = 0,
) -> Iterator[Parts]:
    """Yield two choices of rows, each divided into parts that differ as much as possible.

    The second choice has other rows if others are as informative. Each ``variant`` starts from
    another feature of rows. ``ignored_labels`` are labels that the loss may ignore.
    """
    if num_rows == 1:  # the row twice: its mean stays the same, its sum does not
        yield from [[[0], [0]]] * 2
        return
    each = [[n for n in _features(t, ignored_labels) if n.max() > n.min()] for t in tensors]
    # The first feature of every tensor, then the second, …
    numbers = [n for those in zip_longest(*each) for n in those if n is not None]
    first = variant % max(1, len(numbers))
    numbers = [(n - n.min()) / (n.max() - n.min()) for n in numbers[first:] + numbers[:first]]
    wanted = min(max_rows, num_rows)
    for again in range(2):
        yield _chosen(numbers, num_rows, wanted, 2 * variant + again)


def _chosen(numbers: Sequence[Tensor], rows: int, wanted: int, seed: int) -> Parts:
    """The rows with the lowest and highest value of each feature, then those between.

    In three parts, of about 4/9, 1/3 and 2/9.
    """
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(rows, generator=generator, dtype=torch.float64) * 1e-9
    for position, n in enumerate(numbers[:8]):
        score += n / 10**position
    order = to_numbers(score.argsort())
    sorted_rows = [to_numbers((n + score * 1e-6).argsort()) for n in numbers]
    ends = chain(*((by_this[-1], by_this[0]) for by_this in sorted_rows))
    taken = list(dict.fromkeys(ends))[: max(2, wanted - 1)]
    spread = [order[round(k * (rows - 1) / (wanted - 1))] for k in range(wanted)]
    taken = list(dict.fromkeys([*taken, order[-1], order[0], *spread, *order]))[:wanted]
    taken.sort(key=to_numbers(score).__getitem__, reverse=bool(seed % 2))
    some, more = wanted * 4 // 9, wanted * 4 // 9 - (-wanted // 3)
    return [part for part in (taken[:some], taken[some:more], taken[more:]) if part]


def halves(parts: Parts) -> Parts:
    """Two parts of equal size, a multiple of four if there are eight rows."""
    rows = [*chain(*parts)]
    half = len(rows) // 2 if len(rows) < 8 else len(rows) // 8 * 4
    return [rows[:half], rows[half : 2 * half]]


def _features(tensor: Tensor, ignored: Iterable[int]) -> Iterator[Tensor]:
    """Numbers that distinguish rows, one tensor per feature, the most informative first."""
    own = tensor.reshape(len(tensor), -1)

    def share(mask: Tensor) -> Tensor:
        return to_device(mask, HOST).double().mean(1)

    if may_be_labels(tensor):
        yield share((own < 0) | (own == 255))
        yield from (share(own == value) for value in ignored)
    elif tensor.is_floating_point():
        yield share(own.isnan())
    yield to_device(own, HOST).double().nan_to_num().mean(1)
    if may_be_labels(tensor):  # the share of padding on the right, and on the left
        yield share(own == own[:, -1:])
        yield share(own == own[:, :1])
    elif tensor.is_floating_point():
        yield share(own < 0)
    yield share(own == 0)
