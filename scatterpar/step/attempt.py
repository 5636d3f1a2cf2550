"""One try at a step: its random generators, transfers and times, and how it is undone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from scatterpar import torch_private
from scatterpar.devices.transfers import Transfers, write
from scatterpar.plan import Plan, Share
from scatterpar.replicas.replicas import Replica
from scatterpar.step.request import Request
from scatterpar.threads.clock import Clock
from scatterpar.threads.generators import Generators
from scatterpar.threads.workers import Cancelled, Workers, add_note

_Result = TypeVar("_Result")


class _ShareTask(Protocol):
    @property
    def share(self) -> Share: ...


class _ReplicasTask(_ShareTask, Protocol):
    @property
    def replicas(self) -> Sequence[Replica]: ...


_Task = TypeVar("_Task", bound=_ShareTask)


class Attempt:
    """One try at a request or a part of one: its plan, random generators, transfers and times.

    As a context manager, which may be entered again, it calls ``undo`` if the body raises.
    ``replica_offset`` is the number of the first replica among those of all processes.
    """

    def __init__(
        self,
        workers: Workers,
        request: Request,
        plan: Plan,
        replica_offset: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.workers = workers
        self.request = request
        self.plan = plan
        self.generators = Generators([share.device for share in plan.shares], replica_offset)
        self.transfers = Transfers()
        self.clock = clock or Clock()
        self._values: list[tuple[Tensor, Tensor]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._states: list[tuple[torch.Generator, Tensor]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.undo(error)

    def save_for_undo(
        self,
        tensors: Iterable[Tensor],
        gradients: Iterable[tuple[Tensor, Tensor | None]] = (),
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        """Save tensors, the ``.grad`` of leaves and the user's generators, for ``undo`` to restore.

        Pass whatever user code may write before the commit is complete.
        """
        self._values += [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._gradients += gradients
        self._states += [(generator, generator.get_state()) for generator in generators]

    def undo(self, error: BaseException | None = None) -> None:
        """Restore everything that was saved, and wait for pending copies.

        With ``error``, a failure becomes a note on it and the rest is restored.
        """
        restores: list[Callable[[], object]]
        restores = [partial(setattr, leaf, "grad", value) for leaf, value in self._gradients]
        restores += [partial(write, tensor, value) for tensor, value in self._values]
        restores += [partial(generator.set_state, state) for generator, state in self._states]
        with torch.no_grad():
            for restore in [self.generators.rollback, *restores]:
                try:
                    restore()
                except Exception as another:
                    if error is None:
                        raise
                    add_note(error, f"after that, something could not be put back: {another!r}")
        with contextlib.suppress(Exception):  # the first error is the one to raise
            self.transfers.synchronize()

    @contextlib.contextmanager
    def isolated(self, task: _ReplicasTask) -> Iterator[None]:
        """In the body, the task's replicas start in the state of the last refresh.

        Afterwards their present state and their generators' is restored, but not their gradients.
        """
        number = task.share.replica
        position = self.generators.get_state(number)
        with contextlib.ExitStack() as stack:
            stack.callback(self.generators.set_state, number, position)
            for replica in task.replicas:
                stack.enter_context(replica.isolated())
            yield

    def run(self, function: Callable[..., _Result], tasks: Sequence[_Task]) -> list[_Result]:
        """Run ``function(task, proceed=…)`` for every replica's task, each in its worker.

        Each draws from the random stream of its replica. ``proceed()`` raises if another replica
        has failed: the function calls it where it can stop. The clock records each start and end.
        """
        cancel = threading.Event()
        spans = {task.share.replica: (0.0, 0.0) for task in tasks}
        self.clock.replica_spans.append(spans)

        def proceed() -> None:
            if cancel.is_set():
                raise Cancelled

        def work(task: _Task) -> _Result:
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
