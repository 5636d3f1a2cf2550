"""A share that is too large for its device: its rows arrive micro-batch by micro-batch, one ahead::

    computed    sub-step 0   sub-step 1   sub-step 2
    copied      rows of 1    rows of 2    rows of 3

Each byte crosses once. For a loss of the whole batch most cross twice: its second pass needs them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from scatterpar.devices.ahead import Ahead
from scatterpar.devices.ledger import Ledger
from scatterpar.plan import Plan, Share
from scatterpar.step import nested
from scatterpar.step.markers import Replicated
from scatterpar.step.request import Request
from scatterpar.step.scatter import Crossing, scatter
from scatterpar.step.slices import of_share, take

__all__ = ["Arriving", "bring_batch"]


def bring_batch(request: Request, plan: Plan, ledger: Ledger) -> list[Any]:
    """Each share's inputs and targets: on its device or, if they are to, arriving one by one."""
    bring = _arriving if request.one_by_one else scatter
    return bring(request.batch, plan, request.dim, ledger)


def _arriving(
    batch: tuple[Any, ...], plan: Plan, dim: int, ledger: Ledger
) -> list[tuple[Any, ...]]:
    """As ``scatter``, with shares whose rows have not left yet. What has no rows is there."""
    crossing = Crossing(ledger, _is_rowless)

    def prepared(share: Share, value: Any) -> Arriving:
        rows = nested.transform(lambda leaf: of_share(leaf, share, dim), value)
        rows = nested.transform(partial(crossing.bring, share.device), rows)
        ahead = Ahead(share.device)
        ledger.follow(ahead)
        return Arriving(rows, share, dim, ahead)

    return [tuple(prepared(share, value) for value in batch) for share in plan.shares]


class Arriving:
    """The rows of one share, which come to its device as they are asked for, in their order.

    Args:
        rows: of the share, where the caller has them.
        share: which they are, and how they are cut into micro-batches.
        dim: the dimension that holds the rows.
        ahead: copies them.
    """

    def __init__(self, rows: Any, share: Share, dim: int, ahead: Ahead) -> None:
        self._rows = rows
        self._share = share
        self._dim = dim
        self._ahead = ahead
        self._crossing = Crossing(ahead, lambda leaf: not _is_rowless(leaf))
        self._here: dict[int, Any] = {}

    def at_home(self, number: int) -> Any:
        """The rows of one micro-batch where the caller has them."""
        start, stop = self._share.cuts[number : number + 2]
        return take(self._rows, start, stop, self._dim)

    def here(self, number: int) -> Any:
        """The rows of one micro-batch on the share's device. Those of the next one set out."""
        self._keep(number, number + 1)
        self._bring(number)
        self._ahead.arrive()
        if number + 1 < len(self._share.micro_batches):
            self._bring(number + 1)
        return self._here[number]

    def let_go(self) -> None:
        """Keep none of the rows that have come; they come again if they are asked for."""
        self._ahead.arrive()
        self._keep()

    def _keep(self, *numbers: int) -> None:
        self._here = {n: rows for n, rows in self._here.items() if n in numbers}

    def _bring(self, number: int) -> None:
        if number not in self._here:
            bring = partial(self._crossing.bring, self._share.device)
            self._here[number] = nested.transform(bring, self.at_home(number))


def _is_rowless(leaf: Any) -> bool:
    return isinstance(leaf, Replicated) or (isinstance(leaf, Tensor) and not leaf.ndim)
