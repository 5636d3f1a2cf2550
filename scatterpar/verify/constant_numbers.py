"""Random operators whose numbers depend neither on the rows nor on their number.

This file knows neither the engine nor its steps.
"""

from __future__ import annotations

from typing import Any

import torch

from scatterpar.torch_private import OperatorMode
from scatterpar.verify.comparison import Inconclusive

# Of no special meaning: neither 0, 1 nor 0.5, which losses may treat apart.
_CONSTANT = 0.618
_PER_ROW = ("aten::randperm", "aten::multinomial")  # what they draw depends on the rows


class ConstantNumbers(OperatorMode):
    """In its body random operators give constant numbers, so that results can be
    compared.

    Dropout keeps all elements, floating-point numbers are 0.618, and integers repeat
    the first one drawn.

    Attributes:
        calls: the number of random operators, without dropout, since it was set to
            zero.

    Raises:
        Inconclusive: of an operator such as ``randperm``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # torch tags each operator that draws, so no list of names can be too short.
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        operator = func._schema.name
        parameters = [argument.name for argument in func._schema.arguments]
        # Attention has dropout, too; of ``bernoulli`` an argument ``p`` is no dropout.
        probabilities = {"dropout_p", "p"} if "dropout" in operator else {"dropout_p"}
        without_dropout = [
            0.0 if name in probabilities else value
            for name, value in zip(parameters, args, strict=False)
        ]
        # The operator is called, because its result has the right shape and device.
        drawn = func(*without_dropout, **kwargs)
        if not probabilities.isdisjoint(parameters):
            return drawn
        self.calls += 1
        if operator in _PER_ROW:
            raise Inconclusive("what is drawn depends on the rows", patience=2)
        if drawn.is_floating_point():
            drawn.fill_(_CONSTANT)
        elif drawn.numel():
            # Drawn, not a constant: it must be within the range that was asked for.
            drawn.fill_(drawn.flatten()[0])
        return drawn
