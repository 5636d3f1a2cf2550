"""The losses of a share, which the host reads last.

Reading them waits for the device. So all that comes before the commit is launched
first::

    replica 0   sub-steps launched -+
    replica 1   sub-steps launched -+- buffers, gradients launched - losses read

An error of a device is raised here at the latest: before anything is committed.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from scatterpar.devices.copies import PendingNumbers
from scatterpar.plan import Share
from scatterpar.step.logged_numbers import NumbersOfShare, total
from scatterpar.step.replica_threads import ReplicaNote

_NO_NUMBERS: Mapping[str, float] = {}  # to log


class ShareLosses:
    """The losses of a share's sub-steps and the criterion's numbers to log.

    Attributes:
        dtype: that of the losses.
    """

    def __init__(
        self,
        share: Share,
        losses: Sequence[Tensor],
        weights: Sequence[float],
        numbers: NumbersOfShare,
        *,
        check_finite: bool,
    ) -> None:
        """Launch one copy of all to the host. ``weights`` are those of the losses."""
        self.dtype = losses[0].dtype
        self._share = share
        self._note = ReplicaNote(share)
        self._num_losses = len(losses)
        self._weights = weights
        self._numbers = numbers
        self._has_numbers = numbers.has_any()
        self._check_finite = check_finite
        self._pending = PendingNumbers(torch.stack([*losses, *numbers.tensors()]))

    def read(self) -> tuple[float, Mapping[str, float]]:
        """Wait for the device. Returns the share's part of the batch's loss, and of the
        numbers to log.

        Raises ``FloatingPointError`` with ``check_finite`` for a loss that is not
        finite.
        """
        total = 0.0
        with self._note:
            values = self._pending.read()
            # A trial has fewer losses than weights.
            losses = values[: self._num_losses]
            for sub_step, (loss, weight) in enumerate(
                zip(losses, self._weights, strict=False)
            ):
                if not weight:  # ignores even NaN
                    continue
                total += loss * weight
                if self._check_finite and not math.isfinite(loss):
                    self._note.sub_step = sub_step
                    raise FloatingPointError(
                        f"the loss is {loss} in replica {self._share.replica} on "
                        f"{self._share.device}, sub-step {sub_step}; nothing was "
                        "changed. The note below names the rows to check"
                    )
            if not self._has_numbers:
                return total, _NO_NUMBERS
            values_of_numbers = values[self._num_losses :]
            return total, self._numbers.weighted(values_of_numbers, self._weights)


def total_of(shares: Sequence[ShareLosses]) -> tuple[float, Mapping[str, float]]:
    """The loss of the whole batch, and the numbers to log. Waits for all devices.

    Raises ``FloatingPointError`` as ``ShareLosses.read``, and ``ValueError`` if shares
    have other numbers than others.
    """
    parts: list[float] = []
    numbers: list[Mapping[str, float]] = []
    for share_losses in shares:
        part, numbers_of_share = share_losses.read()
        parts.append(part)
        numbers.append(numbers_of_share)
    # Not sum(): from Python 3.12 on it compensates, and so rounds in another way.
    loss = functools.reduce(operator.add, parts)
    return loss, total(numbers) if any(numbers) else _NO_NUMBERS
