"""Numbers to log that a criterion returns beside its loss: ``(loss, {"kl": kl})``.

They combine as the losses do::

    for rows, weight in zip(micro_batches, weights):
        loss, numbers = criterion(module(inputs of rows), targets of rows)
        loss of the batch += weight * loss
        logged["kl"]      += weight * numbers["kl"]
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

NumbersToLog = Mapping[str, Tensor | float]  # of one micro-batch; tensors have no graph


def are_with_loss(result: Any) -> bool:
    """Whether a criterion's result is a pair of a loss and numbers to log."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    return is_pair and isinstance(result[1], Mapping)


def copied(numbers_of_user: Mapping[Any, Any], device: torch.device) -> NumbersToLog:
    """The numbers, without graphs, in memory that no later call writes.

    Raises ``TypeError`` or ``ValueError`` for what is no number.
    """
    copies: dict[str, Tensor | float] = {}
    for name, value in numbers_of_user.items():
        if not isinstance(name, str):
            raise TypeError(
                f"the criterion's numbers have the name {name!r}, a "
                f"{type(name).__name__}; their names must be strings"
            )
        if isinstance(value, Tensor):
            copies[name] = _copied_tensor(name, value, device)
        elif isinstance(value, numbers.Real):
            copies[name] = float(value)
        else:
            raise TypeError(
                f"the criterion's number {name!r} is a {type(value).__name__}; it must "
                "be a 0-dim tensor or a number"
            )
    return copies


def _copied_tensor(name: str, value: Tensor, device: torch.device) -> Tensor | float:
    if value.ndim:
        raise ValueError(
            f"the criterion's number {name!r} is a tensor of shape "
            f"{tuple(value.shape)}; it must be 0-dim: return its .mean() or .sum()"
        )
    if value.is_complex():
        raise ValueError(
            f"the criterion's number {name!r} is a {value.dtype}; it must be real: "
            "return its .abs()"
        )
    # On the host there is nothing to wait for.
    if value.device != device:
        return float(value.detach())
    number = value.detach().clone()
    # A count in float16, as the loss may be, would end at 65,504.
    return number if number.dtype == torch.float64 else number.float()


class NumbersOfShare:
    """The numbers of one replica's sub-steps."""

    def __init__(self) -> None:
        self._by_substep: list[NumbersToLog] = []

    def add(self, numbers_of_substep: NumbersToLog) -> None:
        """Add those of the next sub-step.

        Raises ``ValueError`` if earlier ones have other names.
        """
        self._by_substep.append(numbers_of_substep)
        if numbers_of_substep or self._by_substep[0]:
            require_same_names(self._by_substep[0], numbers_of_substep)

    def has_any(self) -> bool:
        """Whether the criterion has returned any number."""
        return any(self._by_substep)

    def tensors(self) -> list[Tensor]:
        """The numbers that are on the device, which ``weighted`` takes as values."""
        found: list[Tensor] = []
        for numbers_of_substep in self._by_substep:
            for value in numbers_of_substep.values():
                if isinstance(value, Tensor):
                    found.append(value)
        return found

    def weighted(
        self, values: Sequence[float], weights: Sequence[float]
    ) -> dict[str, float]:
        """The weighted sum of each number. ``values`` are those of ``tensors``."""
        # Also if all sub-steps were replayed, which are of criteria without numbers.
        if not self.has_any():
            return {}
        remaining = iter(values)
        sums = dict.fromkeys(self._by_substep[0], 0.0)
        # A trial has fewer sub-steps than weights.
        for numbers_of_substep, weight in zip(self._by_substep, weights, strict=False):
            for name, value in numbers_of_substep.items():
                number = next(remaining) if isinstance(value, Tensor) else value
                # What does not count may be NaN.
                if weight:
                    sums[name] += weight * number
        return sums


def total(by_share: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each number over the shares.

    Raises ``ValueError`` if shares have different names.
    """
    if not any(by_share):
        return {}
    sums = dict.fromkeys(by_share[0], 0.0)
    for numbers_of_share in by_share:
        require_same_names(sums, numbers_of_share)
        for name, number in numbers_of_share.items():
            sums[name] += number
    return sums


def require_same_names(first: Mapping[str, Any], later: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if rows have other numbers than other rows."""
    if first.keys() != later.keys():
        raise ValueError(
            f"the criterion returned (loss, numbers), and the dict numbers has the "
            f"keys {_listed(first)} for some rows, and {_listed(later)} for others; "
            "return the same keys for all rows, with the value 0.0 if there is nothing "
            "to log"
        )


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names)) or "none"
