"""From `--optimizer` and its keywords to an optimizer of torch's."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from scatterpar import weight_decay_groups
from scatterpar.train.errors import UsageError


def keyword(text: str) -> tuple[str, Any]:
    """Read `name=value`; the value is a Python literal, or else a string.

    Raises:
        ValueError: it is not of that form.

    >>> keyword("betas=(0.9, 0.95)"), keyword("fused=True")
    (('betas', (0.9, 0.95)), ('fused', True))
    """
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise ValueError(f"{text!r} is not of the form name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def make_optimizer(
    name: str, model: nn.Module, rate: float, weight_decay: float, keywords: Mapping[str, Any]
) -> Optimizer:
    """Build an optimizer of `torch.optim` for a model, without decay of biases and norms.

    Args:
        name: of a class in `torch.optim`, such as `SGD` or `AdamW`, in any case.
        model: whose parameters it moves.
        rate: the learning rate.
        weight_decay: of all other parameters.
        keywords: further arguments of the class.

    Raises:
        UsageError: there is no such optimizer, or it does not take the arguments.
    """
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    factory = known.get(name.lower())
    if factory is None:
        names = ", ".join(sorted(value.__name__ for value in known.values()))
        raise UsageError(f"--optimizer {name}: torch.optim has no such class, but {names}")
    try:
        made: Any = factory(weight_decay_groups(model, weight_decay), **{"lr": rate, **keywords})
    except (TypeError, ValueError) as error:
        words = " ".join(str(error).split())
        raise UsageError(f"--optimizer {name}, with --optimizer-option: {words}") from error
    optimizer: Optimizer = made
    return optimizer
