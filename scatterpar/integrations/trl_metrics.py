"""Metrics of a whole step from what its micro-batches have passed to ``gather``.

TRL's trainers make a metric from values that they gather over all processes::

    correct = accelerator.gather_for_metrics(is_top1.sum()).sum()
    tokens = accelerator.gather_for_metrics(mask.sum()).sum()
    metrics["mean_token_accuracy"].append((correct / tokens).item())

So their code says how the values of processes combine. The micro-batches of a step are
combined in the same way::

    micro-batch 0    3 correct of  4 tokens    0.75
    micro-batch 1    5 correct of 10 tokens    0.50
    step             8 correct of 14 tokens    0.57, and not the mean 0.625

On a replica ``gather`` returns a ``Gathered``. Sums, means and extremes of it, and
ratios of these, know what they were made of (``Statistic``). Other functions return
plain tensors and numbers, whose means are weighted like the loss.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class Aggregate(enum.Enum):
    """How the value of a whole step is made of those of its micro-batches."""

    SUM = "their sum"
    MEAN = "their mean, each as often as it has entries"
    MEAN_OF_MEANS = "their mean, weighted like the loss"
    MIN = "the least"
    MAX = "the greatest"
    RATIO = "the ratio of both operands, each of the whole step"


@dataclass(frozen=True)
class Statistic:
    """A number of one micro-batch, and how it combines with those of others.

    Attributes:
        kind: how.
        value: the number, as a tensor without dimensions; zero for a ratio.
        entries: the number of entries of a mean.
        operands: the numerator and denominator of a ratio.
    """

    kind: Aggregate
    value: Tensor | float = 0.0
    entries: int = 1
    operands: tuple[Statistic, ...] = ()


_REDUCTIONS = {
    "sum": Aggregate.SUM,
    "nansum": Aggregate.SUM,
    "mean": Aggregate.MEAN,
    "min": Aggregate.MIN,
    "amin": Aggregate.MIN,
    "max": Aggregate.MAX,
    "amax": Aggregate.MAX,
}
_DIVISIONS = {"__truediv__", "div", "true_divide", "divide"}
# These return the same numbers in another form.
_CONVERSIONS = {"detach", "clone", "float", "double", "to", "cpu", "flatten", "squeeze"}


class Gathered(Tensor):
    """What ``gather`` returns on a replica: the entries of its micro-batch.

    Attributes:
        statistic: what a number without dimensions was made of; ``None`` for entries.
    """

    statistic: Statistic | None = None

    @classmethod
    def of(cls, value: Any) -> Any:
        """``value`` as ``Gathered``, if it is a tensor."""
        return value.as_subclass(cls) if isinstance(value, Tensor) else value

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # without types, results are plain tensors
        run: Any = Tensor.__torch_function__
        result = run(function, (), tuple(args), kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "item":
            return _number(result, args[0].statistic)
        # The same number in another form has the same statistic.
        if name in _CONVERSIONS:
            return _with(result, args[0].statistic)
        if isinstance(result, cls):
            # Written in place, it is no longer what was gathered.
            return result.as_subclass(Tensor)
        statistic = None
        if name in _DIVISIONS:
            statistic = _ratio_of(*args[:2])
        elif name in _REDUCTIONS:
            statistic = _reduced(_REDUCTIONS[name], args, result)
        return result if statistic is None else _with(result, statistic)


def _with(tensor: Tensor, statistic: Statistic | None) -> Tensor:
    gathered: Gathered = Gathered.of(tensor)
    gathered.statistic = statistic
    return gathered


def _reduced(kind: Aggregate, args: Sequence[Any], result: Any) -> Statistic | None:
    """What a reduction makes of gathered entries; ``None`` if that is no number."""
    entries = args[0] if args else None
    # torch.max(gathered, limits) is no reduction.
    is_of_two_tensors = any(isinstance(argument, Tensor) for argument in args[1:])
    is_number = isinstance(result, Tensor) and result.ndim == 0
    if not isinstance(entries, Gathered) or is_of_two_tensors or not is_number:
        return None
    if entries.statistic is not None:  # the number itself
        return entries.statistic
    # Each process has gathered one number, which is a mean already.
    if kind is Aggregate.MEAN and entries.ndim == 0:
        kind = Aggregate.MEAN_OF_MEANS
    return Statistic(kind, result.detach(), entries.numel())


def _ratio_of(numerator: Any, denominator: Any) -> Statistic | None:
    """The ratio of two numbers; ``None`` if one of them is not known to combine."""
    above = getattr(numerator, "statistic", None)
    below = getattr(denominator, "statistic", None)
    # A number of the user's own may be another one in each batch.
    if above is None or below is None:
        return None
    return Statistic(Aggregate.RATIO, operands=(above, below))


class _Number:
    """The base of numbers that ``item`` returns. Their ratios know their statistic."""

    statistic: Statistic

    def __truediv__(self: Any, divisor: Any) -> Any:
        return _number(float(self) / divisor, _ratio_of(self, divisor))


class _Real(_Number, float):
    def __reduce__(self) -> tuple[type, tuple[float]]:
        return float, (float(self),)  # in files it is a plain number


class _Whole(_Number, int):
    def __reduce__(self) -> tuple[type, tuple[int]]:
        return int, (int(self),)


def _number(value: Any, statistic: Statistic | None) -> Any:
    """A Python number with its statistic; any other value itself."""
    kinds = {float: _Real, int: _Whole}
    # A flag is an int in Python, and no number here.
    if statistic is None or type(value) not in kinds:
        return value
    number = kinds[type(value)](value)
    number.statistic = statistic
    return number


def metric_of_step(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The metric of a step, from the values that its micro-batches have appended.

    Values without a statistic are averaged with ``weights``. Beside others that have
    one they do not count: trainers append zero if there is nothing to divide by.
    """
    statistics = []
    their_weights = []
    for value, weight in zip(values, weights, strict=True):
        if isinstance(value, _Number):
            statistics.append(value.statistic)
            their_weights.append(weight)
    # A metric that a branch computes otherwise has no single rule.
    if statistics and _are_alike(statistics):
        return _joined(statistics, their_weights)
    return _weighted_mean(values, weights)


def _are_alike(statistics: Sequence[Statistic]) -> bool:
    """Whether all statistics combine in the same way."""
    if len({statistic.kind for statistic in statistics}) > 1:
        return False
    by_operand = zip(*(statistic.operands for statistic in statistics), strict=True)
    return all(map(_are_alike, by_operand))


def _joined(statistics: Sequence[Statistic], weights: Sequence[float]) -> float:
    kind = statistics[0].kind
    if kind is Aggregate.RATIO:
        numerators, denominators = zip(*(s.operands for s in statistics), strict=True)
        denominator = _joined(denominators, weights)
        return _joined(numerators, weights) / (denominator or math.nan)
    numbers = [float(statistic.value) for statistic in statistics]
    if kind is Aggregate.SUM:
        return sum(numbers)
    if kind is Aggregate.MIN:
        return min(numbers)
    if kind is Aggregate.MAX:
        return max(numbers)
    if kind is Aggregate.MEAN:
        weights = [statistic.entries for statistic in statistics]
    mean: float = _weighted_mean(numbers, weights)
    return mean


def _weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The mean of values; those without weight may be NaN, as means of nothing are."""
    total = 0.0
    products = 0.0
    for value, weight in zip(values, weights, strict=True):
        if weight:
            total += weight
            products += value * weight
    return products / (total or math.nan)
