"""Turns: one replica at a time runs a part of its sub-step, in the order of the rows.

::

    replica 0    call 0   backward 0        call 2   backward 2
    replica 1             call 1   backward 1        call 3   backward 3

A replica that has failed, that was cancelled, or that has no more sub-steps holds
nobody up: its turns are dropped, or waits end with ``Cancelled``. No call of the user's
function begins after an earlier one has failed.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence

from scatterpar.plan import Share, rounds_of
from scatterpar.threads.workers import Cancellation, Cancelled, threads_of


class Scope(enum.IntEnum):
    """The part of a sub-step that one replica at a time runs; each includes the last.

    Attributes:
        NOTHING: replicas do not wait for each other.
        CRITERION: the criterion, in any order of the replicas.
        FUNCTION: the user's function, in the order of the rows: the forward pass and
            the criterion, or the function of ``engine.map``. Backward passes overlap.
        SUBSTEP: the whole sub-step, in the order of the rows.
    """

    NOTHING = 0
    CRITERION = 1
    FUNCTION = 2
    SUBSTEP = 3

    @property
    def is_ordered(self) -> bool:
        """Whether turns come in the order of the rows."""
        return self > Scope.CRITERION


class TurnOrder:
    """The turns of the replicas in one pass over their shares.

    Attributes:
        scope: what a turn includes.
        is_ordered: whether turns come in the order of the rows.
    """

    def __init__(
        self, scope: Scope, shares: Sequence[Share], cancel: Cancellation
    ) -> None:
        """``cancel`` ends all waits."""
        self.scope = scope
        self._cancel = cancel
        self.is_ordered = scope.is_ordered
        self._present: tuple[int, int] | None = None  # of the turn that runs
        # Places of turns that have not ended, the next first.
        self._pending: dict[tuple[int, int], None] = {}
        if self.is_ordered:
            self._pending = dict.fromkeys(_in_order(shares))

    def leave(self, replica: int) -> None:
        """Drop the turns of a replica that has no more sub-steps."""
        with self._cancel.changed:
            for turn in list(self._pending):
                if turn[0] == replica:
                    del self._pending[turn]
            self._cancel.changed.notify_all()

    @contextlib.contextmanager
    def turn(self, replica: int, sub_step: int) -> Iterator[None]:
        """In the body it is the turn of this replica and sub-step.

        Raises ``Cancelled`` in place of the body if another replica has failed.
        """
        if self.is_turn_of(replica, sub_step):  # the body is a part of the turn
            yield
            return
        place = replica, sub_step
        self._begin(place)
        try:
            yield
        except BaseException:
            # Before the next replica has its turn. Without an order the error may be
            # mended: after a failed capture of a graph the criterion is called again.
            if self.is_ordered:
                self._cancel.set()
            raise
        finally:
            self._end(place)

    def is_turn_of(self, replica: int, sub_step: int) -> bool:
        """Whether the present turn is that of this replica and sub-step."""
        return self._present == (replica, sub_step)

    def _begin(self, place: tuple[int, int]) -> None:
        with self._cancel.changed:
            while not (self._is_cancelled() or self._is_next(place)):
                self._cancel.changed.wait()
            if self._is_cancelled():
                raise Cancelled
            self._present = place

    def _end(self, place: tuple[int, int]) -> None:
        with self._cancel.changed:
            self._present = None
            self._pending.pop(place, None)
            self._cancel.changed.notify_all()

    def _is_cancelled(self) -> bool:
        # Without an order all replicas call the criterion of their first sub-step, so
        # errors do not depend on timing.
        return self.is_ordered and self._cancel.is_set()

    def _is_next(self, place: tuple[int, int]) -> bool:
        if self.is_ordered:
            return place == next(iter(self._pending), place)
        return self._present is None


def _in_order(shares: Sequence[Share]) -> list[tuple[int, int]]:
    """The replica and sub-step of each turn.

    In the order of the rows, unless replicas share a thread: there the second replica
    begins when the first one has ended, so all others wait for that, too.
    """
    rounds = rounds_of(threads_of([share.device for share in shares]))
    starts: dict[tuple[int, int], tuple[int, int]] = {}
    for round_of_share, share in zip(rounds, shares, strict=True):
        for sub_step, (start, _) in enumerate(share.micro_batches):
            starts[share.replica, sub_step] = round_of_share, start
    return sorted(starts, key=starts.__getitem__)
