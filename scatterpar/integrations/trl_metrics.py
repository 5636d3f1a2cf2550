"""Metrics of a whole step from what its micro-batches have passed to ``gather``.

TRL's trainers make a metric from values that they gather over all processes::

    correct = accelerator.gather_for_metrics(is_top1.sum()).sum()
    tokens = accelerator.gather_for_metrics(mask.sum()).sum()
    metrics["mean_token_accuracy"].append((correct / tokens).item())

So their code says how the values of processes combine. The same functions are called
again at the end of a step, with what all its micro-batches have gathered::

    micro-batch 0    3 correct of  4 tokens    0.75
    micro-batch 1    5 correct of 10 tokens    0.50
    step             sum([3, 5]) / sum([4, 10]) = 0.57, and not the mean 0.625

On a replica ``gather`` returns a ``Gathered``. Sums, means and extremes of it, and
ratios of these, know how they were made. Other functions return plain tensors and
numbers, whose means are weighted like the loss.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scatterpar.devices.copies import to_numbers

# Functions that make one number of gathered entries, or of such numbers.
_FUNCTIONS = {"sum", "nansum", "mean", "min", "amin", "max", "amax"}
_FUNCTIONS |= {"__truediv__", "div", "true_divide", "divide"}
# These return the same numbers in another form.
_CONVERSIONS = {"detach", "clone", "float", "double", "to", "cpu", "flatten", "squeeze"}


class _Origin(NamedTuple):
    """How a number was made of what was gathered.

    Attributes:
        text: the functions, such as ``"div(sum(), sum())"``.
        function: the last one of them.
        operands: its arguments: gathered tensors, or how these were made.
    """

    text: str
    function: Callable[..., Any]
    operands: Sequence[Any]


class Gathered(Tensor):
    """What ``gather`` returns on a replica: the entries of its micro-batch.

    Attributes:
        origin: how a number without dimensions was made; ``None`` for gathered entries.
    """

    origin: _Origin | None = None

    @classmethod
    def of(cls, value: Any) -> Any:
        """``value`` as ``Gathered``, if it is a tensor."""
        return value.as_subclass(cls) if type(value) is Tensor else value

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
            return _number(result, args[0].origin)
        # The same number in another form was made in the same way.
        if name in _CONVERSIONS:
            converted = cls.of(result)
            converted.origin = args[0].origin
            return converted
        if isinstance(result, cls):
            # Written in place, it is no longer what was gathered.
            return result.as_subclass(Tensor)
        is_number = isinstance(result, Tensor) and result.ndim == 0
        if name not in _FUNCTIONS or kwargs or not is_number:
            return result
        origin = _origin_of(function, args)
        if origin is None:
            return result
        number = cls.of(result)
        number.origin = origin
        return number


def _origin_of(
    function: Callable[..., Any], arguments: Sequence[Any]
) -> _Origin | None:
    """How a function makes a number; ``None`` if an argument was not gathered."""
    operands: list[Any] = []
    texts: list[str] = []
    for argument in arguments:
        operand = getattr(argument, "origin", None)
        if operand is None and isinstance(argument, Gathered):
            operand = argument.detach().as_subclass(Tensor)
        # A number of the user's own may be another one in each batch.
        if operand is None:
            return None
        operands.append(operand)
        texts.append(getattr(operand, "text", ""))
    text = f"{function.__name__}({', '.join(texts)})"
    return _Origin(text, function, operands)


class _Number:
    """The base of numbers that ``item`` returns. Their ratios know how they were
    made.
    """

    origin: _Origin

    def __truediv__(self: Any, divisor: Any) -> Any:
        origin = _origin_of(operator.truediv, [self, divisor])
        return _number(float(self) / divisor, origin)


class _Real(_Number, float):
    def __reduce__(self) -> tuple[type, tuple[float]]:
        return float, (float(self),)  # in files it is a plain number


class _Whole(_Number, int):
    def __reduce__(self) -> tuple[type, tuple[int]]:
        return int, (int(self),)


def _number(value: Any, origin: _Origin | None) -> Any:
    """A Python number that knows how it was made; any other value itself."""
    kinds = {float: _Real, int: _Whole}
    # A flag is an int in Python, and no number here.
    if origin is None or type(value) not in kinds:
        return value
    number = kinds[type(value)](value)
    number.origin = origin
    return number


def metric_of_step(values: Sequence[tuple[Any, float]]) -> Any:
    """The metric of a step, from values that its micro-batches have appended, and their
    weights.

    Values that were not made of what was gathered are averaged. Beside others they do
    not count: trainers append zero if there is nothing to divide by.
    """
    origins: list[Any] = []
    weights: list[float] = []
    for value, weight in values:
        if isinstance(value, _Number):
            origins.append(value.origin)
            weights.append(weight)
    # A metric that a branch computes otherwise has no single rule.
    if len({origin.text for origin in origins}) == 1:
        return float(_of_all(origins, weights))
    return _weighted_mean(values)


def _of_all(origins: Sequence[Any], weights: Sequence[float]) -> Any:
    """The number, or the gathered entries, of all micro-batches together."""
    first = origins[0]
    if isinstance(first, Tensor):
        entries: list[float] = []
        for gathered in origins:
            entries += to_numbers(gathered.flatten())
        # A sum of many tokens has more digits than single precision.
        return torch.tensor(entries, dtype=torch.float64)
    values = []
    for operands in zip(*(origin.operands for origin in origins), strict=True):
        values.append(_of_all(operands, weights))
    # A number that was gathered is a mean already: each counts as in the loss.
    is_mean_of_means = first.text == "mean()" and first.operands[0].ndim == 0
    if is_mean_of_means:
        return _weighted_mean(zip(values[0], weights, strict=True))
    return first.function(*values)


def _weighted_mean(values: Iterable[tuple[Any, float]]) -> Any:
    """The mean of values with their weights; those without may be NaN, as means of
    nothing are.
    """
    total = 0.0
    products = 0.0
    for value, weight in values:
        if weight:
            total += weight
            products += value * weight
    return products / (total or math.nan)
