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
from scatterpar.devices.transfers import Transfers
from scatterpar.plan import Plan, Share
from scatterpar.replicas.replicas import Replica
from scatterpar.threads.clock import Clock
from scatterpar.threads.generators import Generators
from scatterpar.threads.workers import Cancelled, Workers, add_note

_Result = TypeVar("_Result")


class _ShareTask(Protocol):
    @property
    def share(self) -> Share: ...


class _ReplicaTask(_ShareTask, Protocol):
    @property
    def replicas(self) -> Sequence[Replica]: ...


_Task = TypeVar("_Task", bound=_ShareTask)


class Attempt:
    """One try at a step, or at a part of one: its generators, its copies and its times.

    As a context manager, which may be entered again, it restores random state if the body raises.
    ``earlier`` is the number of the first replica among those of all processes.
    """

    def __init__(
        self, workers: Workers, plan: Plan, earlier: int | None = None, clock: Clock | None = None
    ) -> None:
        self.workers = workers
        self.plan = plan
        self.generators = Generators([share.device for share in plan.shares], earlier)
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
        """Save tensors, the ``.grad`` of leaves and the user's own generators for ``undo``.

        User code may write these before a step is complete.
        """
        self._values += [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._gradients += gradients
        self._states += [(generator, generator.get_state()) for generator in generators]

    def undo(self, error: BaseException | None = None) -> None:
        """Restore everything because of an ``error``, and wait for copies that are under way.

        If something cannot be restored, the rest is restored nevertheless.
        """
        restores: list[Callable[[], object]]
        restores = [partial(setattr, leaf, "grad", value) for leaf, value in self._gradients]
        restores += [partial(tensor.copy_, value) for tensor, value in self._values]
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
    def isolated(self, task: _ReplicaTask) -> Iterator[None]:
        """The body finds a task's replicas as the step did, and leaves them as they are now.

        And so their random numbers; gradients that come to them are the body's to keep, or not.
        """
        number = task.share.replica
        position = self.generators.get_state(number)
        with contextlib.ExitStack() as stack:
            stack.callback(self.generators.set_state, number, position)
            for replica in task.replicas:
                stack.enter_context(replica.isolated())
            yield

    def run(self, function: Callable[..., _Result], tasks: Sequence[_Task]) -> list[_Result]:
        """``function(task, proceed=…)`` for every replica's task, each by its worker.

        Each draws from the random stream of its replica. ``proceed()`` ends a replica's work
        once another has failed: the function calls it wherever it can stop. When each started
        and ended is noted.
        """
        cancel = threading.Event()
        spans = {task.share.replica: (0.0, 0.0) for task in tasks}
        self.clock.passes.append(spans)

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
