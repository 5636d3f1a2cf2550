"""Random operators whose numbers depend neither on the rows nor on their number.

This file knows neither the engine nor its steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scatterpar.numerics.comparison import Inconclusive
from scatterpar.torch_private.thread_modes import OperatorMode

# Of no special meaning: neither 0, 1 nor 0.5, which losses may treat apart.
_CONSTANT_DRAW = 0.618
_PER_ROW = ("aten::randperm", "aten::multinomial")  # what they draw depends on the rows
# Operators that draw slopes between two bounds.
_SLOPES = ("lower", "upper")


class ConstantNumbers(OperatorMode):
    """In its body random operators give constant numbers, so that results can be
    compared.

    ::

        the operator                    its result
        drops elements                  keeps all
        draws slopes, as RReLU does     has the mean slope
        draws floating-point numbers    0.618
        draws integers                  the first one drawn, repeated

    Attributes:
        calls: the number of random operators, without dropout, since it was set to
            zero.

    Raises:
        Inconclusive: of an operator such as ``randperm``, or one that is not torch's
            and has no probability of dropout: what it keeps for its backward pass
            cannot be made constant.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # torch tags each operator that draws, so no list of names can be too short.
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        schema = func._schema
        operator = schema.name
        # Left-out arguments have values, too.
        values = {
            argument.name: argument.default_value for argument in schema.arguments
        }
        values |= dict(zip(values, args, strict=False)) | kwargs
        constants = _constant_arguments(operator, values)
        if constants:
            args = tuple(
                constants.get(name, value)
                for name, value in zip(values, args, strict=False)
            )
            kwargs = kwargs | {
                name: value
                for name, value in constants.items()
                if list(values).index(name) >= len(args)
            }
            return func(*args, **kwargs)
        self.calls += 1
        # The operator is called, because its result has the right shape and device.
        drawn = func(*args, **kwargs)
        is_number = isinstance(drawn, Tensor) and operator.startswith("aten::")
        if operator in _PER_ROW or not is_number:
            raise Inconclusive("what is drawn depends on the rows", patience=2)
        if drawn.is_floating_point():
            drawn.fill_(_CONSTANT_DRAW)
        elif drawn.numel():
            # Drawn, not a constant: it must be within the range that was asked for.
            drawn.fill_(drawn.flatten()[0])
        return drawn


def _constant_arguments(operator: str, values: dict[str, Any]) -> dict[str, Any]:
    """Other values of arguments, with which the operator draws nothing that differs.

    Empty for an operator that has no such arguments.
    """
    if set(_SLOPES) <= values.keys():
        mean = (values["lower"] + values["upper"]) / 2
        return dict.fromkeys(_SLOPES, mean)
    # Of ``bernoulli`` an argument ``p`` is no dropout; attention and recurrent layers
    # have dropout, too.
    is_dropout = "dropout" in operator
    names = ("dropout_p", "dropout", "p") if is_dropout else ("dropout_p", "dropout")
    # The old fused operator takes the probability to keep an element.
    kept = 1.0 if operator == "aten::_fused_dropout" else 0.0
    return {name: kept for name in names if isinstance(values.get(name), float)}
