"""The trap: raises what it was armed with, at the place and in the sub-step it was set
for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scatterpar import Plan

Position = tuple[int, int]  # replica, sub-step
BARRIER_SECONDS = 60.0


class Trap:
    """Springs once per position, when a thread comes by.

    The first column of the inputs holds the number of the row: by it a forward pass and
    what follows in its thread know replica and sub-step. Places outside of them are
    counted instead.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self._thread = threading.local()
        self._graph_tasks: dict[int, Position] = {}
        self._lock = threading.Lock()
        self.disarm()

    def arm(
        self,
        place: str,
        error: Callable[[], BaseException],
        positions: Sequence[Position] = (),
        visit: int | None = None,
    ) -> None:
        """Raise ``error()`` at ``place``, at each of ``positions`` or at the given
        ``visit``.
        """
        self.place, self.positions, self._make, self._visit = (
            place,
            positions,
            error,
            visit,
        )
        self.visits = 0
        self.sprung: dict[Position | int, BaseException] = {}
        self._barrier = (
            threading.Barrier(len(positions)) if len(positions) > 1 else None
        )

    def disarm(self) -> None:
        self.arm("nowhere", AssertionError)

    def enter(self, inputs: Tensor) -> None:
        """Tell the trap what the current thread works on."""
        row = int(inputs[0, 0])
        assert self.plan is not None
        for share in self.plan.shares:
            for number, (start, stop) in enumerate(share.micro_batches):
                if start <= row < stop:
                    self._thread.position = (share.replica, number)

    def follow(self, output: Tensor) -> None:
        """Know the way into the backward pass too: accelerators' run in
        other threads.
        """
        position = self._thread.position

        def adopt(_: Tensor) -> None:
            self._graph_tasks[torch._C._current_graph_task_id()] = position

        if output.requires_grad:
            output.register_hook(adopt)

    def at(self, place: str) -> None:
        position = getattr(self._thread, "position", None)
        position = self._graph_tasks.get(torch._C._current_graph_task_id(), position)
        if (
            place != self.place
            or position not in self.positions
            or position in self.sprung
        ):
            return
        if self._barrier is not None:
            self._barrier.wait(BARRIER_SECONDS)
        self._spring(position)

    def count(self, place: str) -> None:
        """Some thread is at ``place``, which is counted."""
        if place != self.place:
            return
        with self._lock:
            visit, self.visits = self.visits, self.visits + 1
        if visit == self._visit:
            self._spring(visit)

    def _spring(self, where: Position | int) -> None:
        self.sprung[where] = error = self._make()
        raise error


trap = Trap()
