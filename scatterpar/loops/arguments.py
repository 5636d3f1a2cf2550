"""What integrations check before a training: their arguments, and the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from scatterpar.errors import warn
from scatterpar.step.request import check_function


def refuse(integration: str, options: Mapping[str, object], reason: str) -> None:
    """Raise ``ValueError`` for the first option that is used.

    Args:
        integration: what refuses it.
        options: whether each option is used, by its name.
        reason: why it does not work, and what to do.
    """
    for name, is_used in options.items():
        if is_used:
            raise ValueError(
                f"{integration} does not go together with {name}: {reason}"
            )


def check_count(count: Any, arguments: Sequence[str], labels: str) -> None:
    """Refuse a ``count=`` that this loop cannot call.

    Args:
        count: the user's function, or ``None``.
        arguments: what the loop calls it with.
        labels: an expression for the labels in these arguments.

    Raises:
        TypeError: it is no function, or takes other arguments.
    """
    if count is None:
        return
    check_function("count", count)
    try:
        signature = inspect.signature(count)
    except ValueError:  # a function in C
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        names = ", ".join(arguments)
        raise TypeError(
            f"count takes {signature}, but this loop calls count({names}); pass "
            f"count=lambda {names}: {labels}.ne(-100).sum(), for a mean over labels "
            "that are not ignored"
        ) from None


def warn_of_batch_norm(module: nn.Module) -> None:
    """Warn if a batch normalisation in ``module`` has running statistics."""
    for part in module.modules():
        is_normalisation = isinstance(part, nn.modules.batchnorm._BatchNorm)
        if is_normalisation and part.track_running_stats:
            warn(
                "the model has batch normalisation, which sees one micro-batch at a "
                'time; pass buffers="batch" for running statistics of all rows of a '
                'batch, or "master" for those of micro-batches'
            )
            return
