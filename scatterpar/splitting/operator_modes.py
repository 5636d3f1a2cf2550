"""Modes that see each operator: constant random numbers, and the coarsest dtype."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from scatterpar.torch_private import OperatorMode
from scatterpar.verify.constant_numbers import ConstantNumbers

_DOUBLE = (torch.float64, torch.complex128)


# Multiples of the golden ratio, without their integers, are spread evenly over [0, 1).
_GOLDEN = 0.6180339887498949


class RepeatedNumbers(ConstantNumbers):
    """Random operators that give each row the same, in every call.

    All numbers of a call are equal. With ``by_column`` they differ along the dimensions
    after the first, so that ``torch.rand(rows, width) < 0.15`` is true for some.

    A permutation is the identity: mixup mixes a row with itself, and a sampler keeps
    the order. A sample has the categories of the highest probability.
    """

    def __init__(self, by_column: bool) -> None:
        super().__init__()
        self._by_column = by_column

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, and replace what it draws."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.randperm:
            drawn = func(*args, **(kwargs or {}))
            return torch.arange(len(drawn), out=drawn)
        if func.overloadpacket is torch.ops.aten.multinomial:
            return _most_likely(*args, **(kwargs or {}))
        # The first number of each call is the same; integers repeat it.
        _generator(kwargs).manual_seed(0)
        drawn = super().__torch_dispatch__(func, types, args, kwargs)
        if self._by_column and isinstance(drawn, Tensor) and drawn.ndim > 1:
            _fill_by_column(drawn)
        return drawn


def _generator(kwargs: dict[str, Any] | None) -> torch.Generator:
    """The generator that an operator draws from."""
    generator = (kwargs or {}).get("generator")
    return torch.default_generator if generator is None else generator


def _fill_by_column(drawn: Tensor) -> None:
    """Fill each row with the same numbers between 0 and 1."""
    if not drawn.is_floating_point():
        return
    numbers = torch.arange(1, drawn[0].numel() + 1, device=drawn.device)
    drawn.copy_((numbers * _GOLDEN % 1).reshape(drawn[0].shape))


def _most_likely(
    probabilities: Tensor, count: int, replacement: bool = False, **_: Any
) -> Tensor:
    """What ``torch.multinomial`` returns, without chance."""
    if replacement:
        best = probabilities.argmax(-1, keepdim=True)
        return best.expand(*best.shape[:-1], count).clone()
    return probabilities.topk(count, -1).indices


class CoarsestDtype(OperatorMode):
    """Finds the coarsest dtype to which numbers in float64 are converted."""

    coarsest: torch.dtype | None = None  # of those below float64

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, and compare the dtypes of its inputs and outputs."""
        result = func(*args, **(kwargs or {}))
        if any(tensor.dtype in _DOUBLE for tensor in _tensors(args)):
            for tensor in _tensors([result]):
                self._note(tensor.dtype)
        return result

    def _note(self, dtype: torch.dtype) -> None:
        if not dtype.is_floating_point or dtype in _DOUBLE:
            return
        if (
            self.coarsest is None
            or torch.finfo(dtype).eps > torch.finfo(self.coarsest).eps
        ):
            self.coarsest = dtype


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """The tensors among values, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
