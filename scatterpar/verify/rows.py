"""Choose the rows of a batch that show best how losses combine; find
ranges of labels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from scatterpar.batch import nested
from scatterpar.batch.markers import Marker, all_tensors
from scatterpar.devices.device_ids import HOST
from scatterpar.devices.transfers import to_device, to_host, to_numbers
from scatterpar.step.criterion_closure import reachable
from scatterpar.step.request import Request

_LARGEST = 2**22  # tensors of more elements are not searched
_MAX_LABELS = 8  # integers that are taken for ignored labels
_WORDS = 1000  # labels above this are token ids, of which only the power of two counts

Parts = Sequence[Sequence[int]]


def may_be_labels(tensor: Tensor) -> bool:
    """Whether the tensor may hold labels."""
    return not (
        tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    )


def informative_tensors(request: Request) -> list[Tensor]:
    """Tensors that may hold labels, masks, lengths or weights of each row; rows are in
    dimension 0.

    Of ``Rows``: the number of elements in each row. Without targets also floating-point
    inputs of at most two dimensions.
    """
    inputs, targets = request.batches[0][1]
    found = [*_informative(targets, request.dim)]
    has_targets = bool(found)
    for tensor in _informative(inputs, request.dim):
        is_label, sizes = may_be_labels(tensor), [n for n in tensor.shape[1:] if n > 1]
        if len(sizes) <= 1 + is_label and not (
            has_targets and tensor.is_floating_point()
        ):
            found.append(tensor)
    return sorted(found, key=may_be_labels, reverse=True)


def _informative(value: Any, dim: int) -> Iterator[Tensor]:
    for leaf in nested.leaves(value):
        if isinstance(leaf, Marker) and leaf.num_rows is not None:
            rows = [leaf.select([row]) for row in range(leaf.num_rows)]
            yield torch.tensor(
                [sum(t.numel() for t in all_tensors(row)) for row in rows]
            )
            continue
        is_plain = type(leaf) in (Tensor, Parameter) and leaf.layout == torch.strided
        if (
            is_plain
            and leaf.ndim
            and 0 < leaf.numel() <= _LARGEST
            and not leaf.is_complex()
        ):
            yield leaf.detach().movedim(dim, 0)


def ranges_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """How far the numbers of each tensor go, on its device: three 0-dim tensors for
    each.

    The lowest number, the highest, and for labels whether rows begin or end with two
    equal values (padding).
    """
    found: list[Tensor] = []
    for tensor in tensors:
        low, high = tensor.aminmax()
        is_padded = torch.zeros((), device=tensor.device)
        if may_be_labels(tensor) and tensor.ndim == 2 and tensor.size(1) > 1:
            first, last = ((tensor[:, k] == tensor[:, k + 1]).any() for k in (0, -2))
            is_padded = first + 2 * last
        found += [low, high, is_padded]
    return found


def read_ranges(ranges: Sequence[Tensor]) -> list[float]:
    """``ranges_of`` tensors as numbers: a tensor is beyond a range if any number is
    larger.

    Large numbers, and all that are not integers, count by their sign and power of two.
    """
    numbers = map(float, to_host(ranges))
    return [_roughly(n if k % 3 else -n) for k, n in enumerate(numbers)]


def _roughly(value: float) -> float:
    if not math.isfinite(value):
        return math.inf if math.isnan(value) else value
    is_exact = value % 1 == 0 and abs(value) <= _WORDS
    return value if is_exact else math.copysign(math.frexp(value)[1] + 1100, value)


def choose_rows(
    tensors: Sequence[Tensor],
    num_rows: int,
    most: int,
    ignored: Iterable[int],
    variant: int,
) -> Parts:
    """Choose rows, in parts that differ as much as possible: two large ones, and two of
    one row.

    These are the rows with the lowest and highest value of each feature, then those
    between. Each ``variant`` starts from another feature. ``ignored`` are labels that
    the loss may ignore.
    """
    if num_rows == 1:  # the row twice: its mean stays the same, its sum does not
        return [[0], [0]]
    each = [[n for n in _features(t, ignored) if n.max() > n.min()] for t in tensors]
    # The first feature of every tensor, then the second, …
    numbers = [n for those in zip_longest(*each) for n in those if n is not None]
    first = variant % max(1, len(numbers))
    numbers = [
        (n - n.min()) / (n.max() - n.min()) for n in numbers[first:] + numbers[:first]
    ]
    generator, wanted = (
        torch.Generator("cpu").manual_seed(variant),
        max(2, min(most, num_rows)),
    )
    score = (
        torch.rand(num_rows, generator=generator, dtype=torch.float64, device="cpu")
        * 1e-9
    )
    for position, n in enumerate(numbers[:8]):
        score += n / 10**position
    keys = score, *(n + score * 1e-6 for n in numbers)
    order, *orders = (to_numbers(key.argsort()) for key in keys)
    ends = dict.fromkeys(chain(*((each[-1], each[0]) for each in orders)))
    spread = [order[round(k * (num_rows - 1) / (wanted - 1))] for k in range(wanted)]
    first_ones = [*ends][: max(2, wanted - 1)]
    taken = [*dict.fromkeys([*first_ones, order[-1], order[0], *spread, *order])][
        :wanted
    ]
    taken.sort(key=to_numbers(score).__getitem__, reverse=bool(variant % 2))
    more = len(taken) - 2 * (wanted > 5)
    some = (more * 4 + 3) // 7
    return [
        *filter(None, [taken[:some], taken[some:more]]),
        *([row] for row in taken[more:]),
    ]


def ignored_values(*functions: Any) -> list[int]:
    """Labels that functions may ignore: the usual ones, and the first integers they
    refer to.
    """
    values = [-100, 255, -1]  # first: several may explain the loss of a few rows
    for function in functions:
        found: list[Any] = []
        # Its own integers before those of the objects that it refers to.
        for value in (*reachable(function, 1, set()), *reachable(function, 2, set())):
            modules = value.modules() if isinstance(value, nn.Module) else [value]
            found += [value, *(getattr(each, "ignore_index", None) for each in modules)]
            found += getattr(getattr(unbound(value), "__code__", None), "co_consts", ())
        values += [*dict.fromkeys(v for v in found if type(v) is int)][:_MAX_LABELS]
    return [*dict.fromkeys(values)]


def unbound(function: Any) -> Any:
    """The function within ``functools.partial``."""
    return (
        unbound(function.func) if isinstance(function, functools.partial) else function
    )


def in_two(rows: Sequence[int]) -> list[Parts]:
    """Ways to cut rows in two: of equal sizes, multiples of four if there are eight,
    and others.
    """
    half = len(rows) // 2 if len(rows) < 8 else len(rows) // 8 * 4
    cuts = (len(rows) * quarters // 4 for quarters in (3, 1))
    return [
        [rows[:half], rows[half : 2 * half]],
        *([rows[:cut], rows[cut:]] for cut in cuts),
    ]


def _features(tensor: Tensor, ignored: Iterable[int]) -> Iterator[Tensor]:
    """Numbers that distinguish rows, one tensor per feature, the most informative
    first.
    """
    own, more = tensor.reshape(len(tensor), -1), list[Tensor]()
    masks: Iterable[Tensor] = ()
    # what is ignored, and padding on the right and on the left
    if may_be_labels(tensor):
        masks = chain([(own < 0) | (own == 255)], (own == value for value in ignored))
        more = [own == own[:, -1:], own == own[:, :1]]
    elif tensor.is_floating_point():
        masks, more = [own.isnan()], [own < 0]
    for numbers in (*masks, own, *more, own == 0):
        yield to_device(numbers, HOST).double().nan_to_num().mean(1)
