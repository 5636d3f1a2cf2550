"""One try at a step: who works, what they draw, what is copied, and how long it takes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from scatterpar import torch_private
from scatterpar.devices.chunks import copy_each
from scatterpar.devices.ledger import Clock, Ledger
from scatterpar.plan import Plan
from scatterpar.threads.generators import Generators
from scatterpar.threads.workers import Cancelled, Workers

_Result = TypeVar("_Result")


class Attempt:
    """One try at a step, or at a part of one: what is drawn from, what is copied, what it takes.

    What is raised where it is entered as a context leaves no trace in the random numbers; it may
    be entered again. ``earlier`` replicas of other processes are numbered before these.
    """

    def __init__(self, workers: Workers, plan: Plan, earlier: int = 0) -> None:
        self.workers = workers
        self.plan = plan
        self.generators = Generators([share.device for share in plan.shares], earlier)
        self.ledger = Ledger()
        self.clock = Clock()
        self._kept: list[Tensor] = []
        self._copies: list[Tensor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.undo()

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Take a copy of what user code may write meanwhile, to be put back by ``undo``."""
        self._kept = [tensor.detach() for tensor in tensors]
        self._copies = [torch.empty_like(tensor) for tensor in self._kept]
        copy_each(self._copies, self._kept)

    def undo(self) -> None:
        """Leave no trace; what is copied may be written again."""
        self.generators.rollback()
        copy_each(self._kept, self._copies)
        with contextlib.suppress(Exception):  # the first error is the one to tell
            self.ledger.settle()

    def run(
        self, function: Callable[..., _Result], tasks: Sequence[Any], *, timed: bool = True
    ) -> list[_Result]:
        """``function(task, proceed=…)`` for every replica's task, each by its worker.

        Each draws from the random stream of its replica. ``proceed()`` ends a replica's work
        once another has failed: the function calls it wherever it can stop. When each started
        and ended is noted, if it is ``timed``.
        """
        cancel = threading.Event()
        spans = {task.share.replica: (0.0, 0.0) for task in tasks}
        if timed:
            self.clock.passes.append(spans)

        def proceed() -> None:
            if cancel.is_set():
                raise Cancelled

        def work(task: Any) -> _Result:
            start = time.perf_counter()
            with self.generators.of(task.share.replica):
                result = function(task, proceed=proceed)
            spans[task.share.replica] = (start, time.perf_counter())
            return result

        with torch_private.node_metadata_kept():
            return self.workers.parallel_apply(
                [work] * len(tasks),
                [(task,) for task in tasks],
                devices=[task.share.device for task in tasks],
                cancel=cancel,
            )
