"""Choose the rows of a batch that show best how losses combine; find ranges of labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from scatterpar.devices.fingerprints import to_host
from scatterpar.step import nested
from scatterpar.step.markers import Marker, all_tensors
from scatterpar.step.request import Request

# Of parts, by the number of rows.
_SIZES = [*[()] * 2, (1, 1), (1, 1, 1), (3, 1), (3, 2), (3, 2, 1), (4, 2, 1), (3, 3, 2), (4, 3, 2)]
_LARGEST = 2**22  # tensors of more elements are not searched

Parts = Sequence[Sequence[int]]


def is_label(tensor: Tensor) -> bool:
    """Whether the tensor may hold labels."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def informative_tensors(request: Request) -> list[Tensor]:
    """Tensors that may hold labels, masks, lengths or weights of each row; rows are in dimension 0.

    Floating-point inputs are included if there are no targets.
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
    few = [t for t in inputs if t.ndim <= (3 if is_label(t) else 2)]
    found = targets + [t for t in few if not (targets and t.is_floating_point())]
    found.sort(key=is_label, reverse=True)
    return [t for t in found if not t.is_complex() and 0 < t.numel() <= _LARGEST]


def _is_dense(leaf: Any) -> bool:
    return type(leaf) in (Tensor, Parameter) and leaf.layout == torch.strided and leaf.ndim > 0


def value_ranges(tensors: Iterable[Tensor]) -> list[float]:
    """The lowest and highest numbers of each tensor, and whether rows of labels end in padding.

    Padding is a repeated value. Numbers that are not integers count by their sign and power of two.
    """
    asked: list[Tensor] = []
    labels: list[bool] = []
    for tensor in tensors:
        low, high = tensor.aminmax()
        ends = [torch.zeros((), device=tensor.device)] * 2
        if is_label(tensor) and tensor.ndim == 2 and tensor.size(1) > 1:
            ends = [(tensor[:, k] == tensor[:, k + 1]).any() for k in (0, -2)]
        asked += [low, high, *ends]
        labels.append(is_label(tensor))
    numbers = [float(value) for value in to_host(asked)]
    reach: list[float] = []
    for k, whole in enumerate(labels):
        lowest, highest, *repeats = numbers[4 * k : 4 * k + 4]
        reach += [-lowest, highest] if whole else [_roughly(-lowest), _roughly(highest)]
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
) -> list[Parts]:
    """Two choices of rows, each in parts of different sizes, which differ as much as possible.

    The second choice has other rows if others are as informative. Each ``variant`` starts from
    another feature of rows. ``ignored_labels`` are labels that the loss may ignore.
    """
    if num_rows == 1:  # a mean over the row twice equals that over it once; a sum does not
        return [[[0], [0]]] * 2
    each = [[n for n in _features(t, ignored_labels) if n.max() > n.min()] for t in tensors]
    numbers = [n for those in zip_longest(*each) for n in those if n is not None]  # in turn
    first = variant % max(1, len(numbers))
    numbers = [(n - n.min()) / (n.max() - n.min()) for n in numbers[first:] + numbers[:first]]
    wanted = min(max_rows, num_rows)
    return [_chosen(numbers, num_rows, wanted, 2 * variant + again) for again in range(2)]


def _sizes(rows: int) -> tuple[int, ...]:
    many, some = rows * 4 // 9, rows // 3
    return _SIZES[rows] if rows < len(_SIZES) else (many, some, rows - many - some)


def _chosen(numbers: Sequence[Tensor], rows: int, wanted: int, seed: int) -> Parts:
    """The rows with the lowest and highest value of each feature, then those between."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(rows, generator=generator, dtype=torch.float64) * 1e-9
    for position, n in enumerate(numbers[:8]):
        score += n / 10**position
    order = score.argsort().tolist()
    taken: list[int] = []
    for n in numbers:
        by_this = (n + score * 1e-6).argsort().tolist()
        taken += [by_this[-1], by_this[0]]
    taken = list(dict.fromkeys(taken))[: max(2, wanted - 1)]
    spread = [order[round(k * (rows - 1) / (wanted - 1))] for k in range(wanted)]
    taken = list(dict.fromkeys([*taken, order[-1], order[0], *spread, *order]))[:wanted]
    place = {row: k for k, row in enumerate(order)}
    taken.sort(key=place.__getitem__, reverse=bool(seed % 2))
    remaining = iter(taken)
    return [[next(remaining) for _ in range(size)] for size in _sizes(wanted)]


def _features(tensor: Tensor, ignored: Iterable[int]) -> Iterator[Tensor]:
    """Numbers that distinguish rows, one tensor per feature, the most informative first."""
    own = tensor.reshape(len(tensor), -1)

    def share(mask: Tensor) -> Tensor:
        return mask.cpu().double().mean(1)

    if is_label(tensor):
        yield share((own < 0) | (own == 255))
        yield from (share(own == value) for value in ignored)
    elif tensor.is_floating_point():
        yield share(own.isnan())
    yield own.cpu().double().nan_to_num().mean(1)
    if is_label(tensor):  # as padding is, on the right and on the left
        yield share(own == own[:, -1:])
        yield share(own == own[:, :1])
    elif tensor.is_floating_point():
        yield share(own < 0)
    yield share(own == 0)
