"""Modes that see each operator: constant random numbers, dtypes, draws."""

from __future__ import annotations

import enum
import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.numerics.constant_numbers import ConstantNumbers
from scatterpar.torch_private.thread_modes import OperatorMode

Shape = tuple[int, ...]

_DOUBLE = (torch.float64, torch.complex128)

# Multiples of the golden ratio, without their integers, are spread evenly over [0, 1).
_GOLDEN = 0.6180339887498949


class Numbers(enum.Enum):
    """The numbers that random operators give."""

    AS_DRAWN = enum.auto()
    CONSTANT = enum.auto()
    VARIED = enum.auto()  # each row gets the same; the rows of weights differ


class RepeatedNumbers(ConstantNumbers):
    """Random operators that give each row the same, in every call.

    With ``CONSTANT`` all numbers of a call are equal. With ``VARIED`` they differ along
    the dimensions after the first, so that ``torch.rand(rows, width) < 0.15`` is true
    for some. All numbers of a draw with one of ``fixed_shapes`` differ: those are of
    weights that the step makes, and have no rows.

    A permutation is the identity: mixup mixes a row with itself, and a sampler keeps
    the order. A sample has the categories of the highest probability.

    Attributes:
        has_drawn: true from the first random operator in the body on.
        draws: the shapes that have been drawn, without those of dropout.
    """

    def __init__(self, numbers: Numbers, fixed_shapes: frozenset[Shape]) -> None:
        super().__init__()
        self.has_drawn = False
        self.draws: Counter[Shape] = Counter()
        self._numbers = numbers
        self._fixed_shapes = fixed_shapes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, and replace what it draws."""
        kwargs = kwargs or {}
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if not is_random or self._numbers is Numbers.AS_DRAWN:
            return func(*args, **kwargs)
        self.has_drawn = True
        if func.overloadpacket is torch.ops.aten.randperm:
            # Drawn all the same, for its dtype and device.
            drawn = func(*args, **kwargs)
            return torch.arange(len(drawn), out=drawn)
        if func.overloadpacket is torch.ops.aten.multinomial:
            return _most_likely(*args, **kwargs)
        # The first number of each call is the same; integers repeat it.
        generator = kwargs.get("generator") or torch.default_generator
        generator.manual_seed(0)
        calls = self.calls
        drawn = super().__torch_dispatch__(func, types, args, kwargs)
        if self.calls == calls:  # dropout, or slopes: nothing was drawn that differs
            return drawn
        # Dropout draws in place where its backward pass has no operator of its own.
        is_dropout = func is torch.ops.aten.bernoulli_.float
        shape = tuple(drawn.shape)
        if not is_dropout:
            self.draws[shape] += 1
        # Weights have no rows.
        varied = shape if shape in self._fixed_shapes else shape[1:]
        if drawn.is_floating_point() and varied and self._numbers is Numbers.VARIED:
            fill_evenly(drawn, varied)
        return drawn


def fill_evenly(drawn: Tensor, shape: Shape) -> None:
    """Fill a draw with numbers between 0 and 1, the same for each part of a shape."""
    numbers = torch.arange(1, math.prod(shape) + 1, device=drawn.device)
    drawn.copy_((numbers * _GOLDEN % 1).reshape(shape))


def _most_likely(probabilities: Tensor, count: int, *_: Any, **__: Any) -> Tensor:
    """A result that ``torch.multinomial`` may return, without chance."""
    categories = probabilities.argsort(-1, descending=True)
    # Again from the first one, if there are fewer categories than ``count``.
    return categories[..., torch.arange(count) % categories.shape[-1]]


class WatchedOperators(OperatorMode):
    """Sees in which dtypes a step computes, and prevents casts.

    If ``in_double``, a cast to a lower dtype gives float64, and so does a tensor made
    in a lower dtype. So one limit holds for steps that compute in half precision, too.

    Attributes:
        coarsest: the coarsest dtype of a result; if ``in_double``, of one that was
            computed from numbers in float64, by a kernel that casts.
    """

    def __init__(self, in_double: bool) -> None:
        super().__init__()
        self.coarsest: torch.dtype | None = None
        self._in_double = in_double

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, perhaps with another ``dtype``."""
        arguments = dict(kwargs or {})
        # Casts and factories say their dtype by this name.
        dtype = arguments.get("dtype") if self._in_double else None
        if dtype is not None and (dtype.is_floating_point or dtype.is_complex):
            arguments["dtype"] = _DOUBLE[dtype.is_complex]
        result = func(*args, **arguments)
        is_made = func is torch.ops.aten.lift_fresh.default  # by ``torch.tensor``
        if self._in_double and is_made and result.is_floating_point():
            return result.double()
        # Most operators return one tensor, and this runs for each of them.
        tensors = [result] if isinstance(result, Tensor) else nested.tensors(result)
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.dtype not in _DOUBLE:
                self._note(tensor.dtype, args)
        return result

    def _note(self, dtype: torch.dtype, args: tuple[Any, ...]) -> None:
        """Remember the dtype of a result."""
        is_double = any(tensor.dtype in _DOUBLE for tensor in nested.tensors(args))
        if self._in_double and not is_double:
            return  # a constant, which is exact
        dtypes = (dtype, self.coarsest or torch.float64)
        self.coarsest = max(dtypes, key=lambda known: torch.finfo(known).eps)
