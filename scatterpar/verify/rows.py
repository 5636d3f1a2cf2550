"""Choose the rows of a batch that show best how losses combine, and divide them into
parts.

Rows that differ in what a loss may count are the best. Of eight rows with labels::

    row                0     1     2     3     4     5     6     7
    ignored labels     0/4   2/4   4/4   1/4   0/4   3/4   0/4   2/4

``RowChoice`` first takes rows 2 and 0, with the most and the fewest ignored labels,
then those with the highest and lowest values of other features, then rows between
these. They are sorted by their features, so that the parts ``[5, 1, 7]``, ``[3, 0,
4]``, ``[6]`` and ``[2]`` have as different numbers of labels as possible, and one of
them none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.causes.counts import IGNORED
from scatterpar.devices.copies import to_device, to_numbers
from scatterpar.devices.virtual_devices import HOST
from scatterpar.objects.reach import reachable
from scatterpar.objects.references import read_attribute
from scatterpar.plan import Plan
from scatterpar.spans import Part
from scatterpar.step.request import Request
from scatterpar.verify.schedule import may_be_labels

Parts = Sequence[Part]

MIN_ROWS = 2  # one row has no parts
# Of the graph, inputs or outputs of a look: so much memory is always there.
MAX_BYTES = 2**22

_MAX_IGNORED = 8  # integers in a function that are taken for ignored labels
# Each counts a tenth of the one before: others would be lost in rounding.
_SCORED_FEATURES = 8
_SECOND_ORDER = 1e-6  # the weight of other features among rows with equal values of one
_THIRD_ORDER = 1e-9  # the weight of chance among rows with equal features
_MIN_ROWS_FOR_SINGLES = 6  # of so many rows, two are parts of one row
_SHARE_OF_FIRST_PART = 4 / 7  # of the rows in large parts: the two differ in size


@dataclass(frozen=True, eq=False)
class RowChoice:
    """Choose rows of a step for a look, and divide them.

    Attributes:
        request: the call, with its largest batch.
        tensors: of the request, that may hold labels, masks, lengths or weights.
        plan: how the step, or its loop, divides the rows of the batch.
        ignored: labels that the loss may ignore.
        number: the number of earlier looks: each look takes other rows.
        is_divided: whether the step divides the batch; otherwise there is one part, and
            only the replica is compared.
        most: the number of rows that are cheap.
    """

    request: Request
    tensors: Sequence[Tensor]
    plan: Plan
    ignored: Sequence[int]
    number: int
    is_divided: bool
    most: int

    def parts(self, affordable: int) -> Parts:
        """Rows, at least two and not more than are ``affordable``, in parts."""
        return self.divided(self._rows(min(self.most, affordable)))

    def divided(self, rows: Part) -> Parts:
        """These rows in parts, as the step divides its batch."""
        if not self.is_divided:
            return [rows]
        if self.has_single_rows:
            return [[row] for row in rows]
        # The last one is a part: a mean over terms is NaN for a row without one.
        ordered = list(rows)
        candidates = [row for row in self._rows_without_terms if row in ordered]
        for row in candidates[:1]:
            ordered.remove(row)
            ordered.append(row)
        return _unequal(ordered)

    @property
    def rows_of_substeps(self) -> int | None:
        """The number of rows of each micro-batch of the step; ``None`` if they differ,
        or if the step does not divide its batch.
        """
        return common_size(self.plan) if self.is_divided else None

    @functools.cached_property
    def _rows_without_terms(self) -> list[int]:
        """The rows of which a mask has zeros alone, then those that have ignored labels
        alone.
        """
        rows: list[int] = []
        # Labels last: some integers of a function are no labels that it ignores.
        for tensor in sorted(self.tensors, key=may_be_labels):
            entries = tensor.reshape(len(tensor), -1)
            for value in self.ignored if may_be_labels(tensor) else [0]:
                is_without = (entries == value).all(1)
                rows += to_numbers(is_without.nonzero().flatten())
        return rows

    def of_step(self) -> Parts:
        """All rows in the parts of the step."""
        # The plan of a loop's look has parts, also of a step that is one call.
        if not self.is_divided:
            return [range(self.request.rows)]
        return parts_of_plan(self.plan)

    @property
    def has_single_rows(self) -> bool:
        """Whether sub-steps have one row.

        A tensor with one entry per row of the batch broadcasts to one row, and to no
        other number.
        """
        return max(self.plan.substep_rows) == 1

    def _rows(self, most: int) -> Part:
        """Up to ``most`` rows, at least two, as different as possible, sorted."""
        num_rows = self.request.rows
        if num_rows == 1:  # the row twice: its mean stays the same, its sum does not
            return [0, 0]
        wanted = max(2, min(most, num_rows))
        features = self._features()
        score = self._score(features)
        extremes: list[int] = []
        for feature in features:
            values = feature + score * _SECOND_ORDER
            extremes += [int(values.argmax()), int(values.argmin())]
        order = to_numbers(score.argsort())
        # One place is left for the extremes of all features together.
        rows = _without_repeats(extremes)[: max(2, wanted - 1)]
        rows += [order[-1], order[0]]
        # Evenly over the order, because rows between the extremes differ, too.
        step = (num_rows - 1) / (wanted - 1)
        rows += [order[round(number * step)] for number in range(wanted)]
        rows = _without_repeats([*rows, *order])[:wanted]
        # Every other look has the other end of the order in the large parts.
        return sorted(rows, key=order.index, reverse=bool(self.number % 2))

    def _features(self) -> list[Tensor]:
        """The features that differ between rows: the first of each tensor, the second,
        …; each look begins with another one.
        """
        by_tensor = [_features_of(tensor, self.ignored) for tensor in self.tensors]
        ranks = chain.from_iterable(zip_longest(*by_tensor))
        features = [feature for feature in ranks if feature is not None]
        first = self.number % max(1, len(features))
        return features[first:] + features[:first]

    def _score(self, features: Sequence[Tensor]) -> Tensor:
        """One number per row that is high for rows that the first features tell from
        others.
        """
        # A generator of its own, so that the user's draws as without a look.
        generator = torch.Generator("cpu").manual_seed(self.number)
        chance = torch.rand(
            self.request.rows, generator=generator, dtype=torch.float64, device="cpu"
        )
        score = chance * _THIRD_ORDER
        for position, feature in enumerate(features[:_SCORED_FEATURES]):
            score += feature / 10**position
        return score


def affordable_rows(tensors: Sequence[Tensor], num_rows: int) -> int:
    """The number of rows, of tensors for ``num_rows``, that fit into ``MAX_BYTES``."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    # One more, because there may be no tensors.
    return max(MIN_ROWS, MAX_BYTES * num_rows // (size + 1))


def parts_of_plan(plan: Plan) -> Parts:
    """The rows of each micro-batch of a plan."""
    return [range(*span) for share in plan.shares for span in share.micro_batches]


def common_size(plan: Plan) -> int | None:
    """The number of rows of each micro-batch; ``None`` if they differ."""
    sizes = set(plan.substep_rows)
    return sizes.pop() if len(sizes) == 1 else None


def positions_of(parts: Parts) -> list[range]:
    """The positions of the rows of each part among those of all parts."""
    ends = [0, *accumulate(map(len, parts))]
    return [range(start, end) for start, end in pairwise(ends)]


def _unequal(rows: Sequence[int]) -> Parts:
    """Two parts of different sizes, and two of one row if there are enough rows: those
    at both ends.
    """
    of_one_row: list[Part] = []
    if len(rows) >= _MIN_ROWS_FOR_SINGLES:
        of_one_row = [[rows[-1]], [rows[0]]]
        rows = rows[1:-1]
    cut = round(len(rows) * _SHARE_OF_FIRST_PART)
    return [rows[:cut], rows[cut:], *of_one_row]


def in_two(rows: Sequence[int]) -> Parts:
    """Two parts of equal sizes, without the rows that are left over."""
    # Multiples of four, because code may group its rows in pairs or fours.
    half = len(rows) // 2 if len(rows) < 8 else len(rows) // 8 * 4
    return [rows[:half], rows[half : 2 * half]]


def _without_repeats(rows: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(rows))


def _features_of(tensor: Tensor, ignored: Iterable[int]) -> Iterator[Tensor]:
    """Numbers from 0 to 1 that distinguish rows, one tensor per feature, the most
    informative first.
    """
    entries = tensor.reshape(len(tensor), -1)
    if may_be_labels(tensor):
        features = [entries < 0, *(entries == label for label in ignored), entries]
        # Padding at either end.
        features += [entries == entries[:, -1:], entries == entries[:, :1]]
    else:
        features = [entries.isnan(), entries, entries < 0]
    for numbers in (*features, entries == 0):
        feature = to_device(numbers, HOST).double().nan_to_num().mean(1)
        low, high = map(float, feature.aminmax())
        if high > low:
            yield (feature - low) / (high - low)


def ignored_values(*functions: Any) -> list[int]:
    """Labels that functions may ignore: the usual ones, and the first integers they
    refer to.
    """
    # The usual ones first: several may explain the loss of a few rows.
    labels: list[int] = [*IGNORED]
    for function in functions:
        # The nearest first: its own integers before those of objects.
        values = map(_integers_of, reachable(function, depth=2))
        labels += _without_repeats(chain.from_iterable(values))[:_MAX_IGNORED]
    return _without_repeats(labels)


def _integers_of(value: Any) -> list[int]:
    """The value itself, labels that its modules ignore, and constants of its code."""
    modules = value.modules() if isinstance(value, nn.Module) else [value]
    candidates = [read_attribute(module, "ignore_index") for module in modules]
    # Code may compare labels with a literal.
    code = read_attribute(unbound(value), "__code__")
    candidates += getattr(code, "co_consts", ())
    return [integer for integer in (value, *candidates) if type(integer) is int]


def unbound(function: Any) -> Any:
    """The function within ``functools.partial``."""
    while isinstance(function, functools.partial):
        function = function.func
    return function
