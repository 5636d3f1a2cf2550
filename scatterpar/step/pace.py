"""How large each replica's share is: as the user says, or learned from the devices' pace.

A card that is three times as fast as its neighbour should have three times the rows. The pace of
a device is its rows per second in one step, from the first start to the last end of its
replicas.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

import torch

from scatterpar.devices.ledger import Span
from scatterpar.plan import Plan

__all__ = ["Pace"]

_REMEMBERED = 5  # paces of a device, whose median counts: one slow step moves nothing
_WORTHWHILE = 1.05  # moving shares must make the step this much faster


class Pace:
    """The relative sizes of the replicas' shares.

    Args:
        shares: one positive number per replica, ``"auto"``, or ``None`` for equal ones.
        device_ids: one entry per replica; equal entries learn one pace together.

    Raises:
        TypeError: not a list of numbers, nor ``"auto"``.
        ValueError: another number of shares than replicas, or one that is not positive.
    """

    def __init__(
        self,
        shares: Sequence[float] | Literal["auto"] | None,
        device_ids: Sequence[torch.device],
    ) -> None:
        self._device_ids = tuple(device_ids)
        self._learns = isinstance(shares, str) and shares == "auto"
        self._paces: dict[torch.device, deque[float]] = {}
        given = None if self._learns else shares
        self.shares = _checked(given, len(device_ids)) or (1.0,) * len(device_ids)

    def observe(self, plan: Plan, passes: Sequence[Mapping[int, Span]]) -> None:
        """Learn from a step that was committed.

        A device's first step is left out: it pays for what is done only once.

        Args:
            plan: the step's shares.
            passes: when each replica started and ended, in each pass of the step.
        """
        if not self._learns:
            return
        for device, pace in _paces(plan, passes).items():
            if device in self._paces:
                self._paces[device].append(pace)
            else:
                self._paces[device] = deque(maxlen=_REMEMBERED)
        if all(self._paces.get(device) for device in self._device_ids):
            self._follow()

    def _follow(self) -> None:
        """Take shares in proportion to the paces, if that is worth a move."""
        pace = {device: median(self._paces[device]) for device in set(self._device_ids)}
        has = dict.fromkeys(pace, 0.0)
        for device, share in zip(self._device_ids, self.shares, strict=True):
            has[device] += share / sum(self.shares)
        now = max(has[device] / pace[device] for device in pace)
        best = 1 / sum(pace.values())
        if now > _WORTHWHILE * best:
            self.shares = tuple(
                pace[device] / self._device_ids.count(device) for device in self._device_ids
            )


def _paces(plan: Plan, passes: Sequence[Mapping[int, Span]]) -> dict[torch.device, float]:
    """Rows per second of each device that took part."""
    paces = {}
    for device in {share.device for share in plan.shares}:
        own = [share for share in plan.shares if share.device == device]
        seconds = 0.0
        for spans in passes:
            starts, ends = zip(*(spans[share.replica] for share in own), strict=True)
            seconds += max(ends) - min(starts)
        paces[device] = sum(share.rows for share in own) / max(seconds, 1e-9)
    return paces


def _checked(shares: Any, count: int) -> tuple[float, ...] | None:
    if shares is None:
        return None
    if isinstance(shares, str) or not isinstance(shares, Sequence):
        raise TypeError(
            f'shares must be "auto" or a list with one number per replica, got {shares!r}'
        )
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise TypeError(f"shares must be numbers, got {share!r} in {list(shares)!r}")
        if not (share > 0 and math.isfinite(share)):
            raise ValueError(
                f"shares must be positive and finite, got {share!r} in {list(shares)!r}; "
                f"to leave a device out, leave it out of device_ids"
            )
    if len(shares) != count:
        raise ValueError(
            f"shares has {len(shares)} numbers for {count} replicas; pass one number for each "
            f"entry of device_ids"
        )
    return tuple(shares)
