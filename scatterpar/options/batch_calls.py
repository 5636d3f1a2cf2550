"""Calls of a function for whole batches, each by a replica of its own.

::

    batch       0   1   2   3   4   5
    replica     0   1   0   1   0   1

Replica 0 begins with batch 2 when the loop has the result of batch 0. So replicas
compute while the loop works between two results. No batch is divided, and nothing is
joined.

What the loop could meet half done is computed in groups: batches 0 and 1, whose results
are then taken, before batches 2 and 3. That is so for functions of the user's, which
take turns, for modules in training mode, and for random numbers. It is so for the first
group, too, and after a change of the module: while the loop works, nobody can tell
whether it or a forward pass has written a parameter.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import traceback as fx_traceback

from scatterpar.batch import nested
from scatterpar.devices.transfers import Prefetcher
from scatterpar.errors import warn
from scatterpar.options.map_rows import buffers_of
from scatterpar.plan import Plan, Share, make_plan
from scatterpar.replicas.replicas import Replica, parameter_writes_refused
from scatterpar.step.attempt import WHOLE_STEP, Attempt, Extent
from scatterpar.step.loop_options import LoopOptions
from scatterpar.step.replica_threads import ReplicaNote
from scatterpar.step.request import Request
from scatterpar.step.scatter import moved_together
from scatterpar.threads.process_settings import SETTINGS_KEPT
from scatterpar.threads.workers import Job, Workers, threads_of

_CHANGED = (
    "the module has changed in the middle of an evaluation, such as by a callback; "
    "batches with which replicas had begun were computed with earlier values"
)


@dataclass
class _BatchCall:
    """A call that has begun, and the copies of its batch."""

    replica: int
    job: Job
    copies: Prefetcher


class BatchCalls:
    """Calls ``function(replica, batch)`` for the batches of a loop, in their order.

    Args:
        function: it runs in the replicas' threads, without gradients.
        begin_attempt: makes the record of a try, whose body is undone if it raises.
        module: the user's.
        device_ids: one entry per replica.
        workers: the threads.
        loop: says whether the function takes turns.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        begin_attempt: Callable[
            [Request, Plan, Extent], contextlib.AbstractContextManager[Attempt]
        ],
        module: nn.Module,
        device_ids: Sequence[torch.device],
        workers: Workers,
        loop: LoopOptions,
    ) -> None:
        self._function = function
        self._begin_attempt = begin_attempt
        self._module = module
        self._plan = make_plan(len(device_ids), device_ids)
        self._threads = threads_of(device_ids)
        self._workers = workers
        self._loop = loop
        # In the order of the batches, without those whose results were taken.
        self._calls: deque[_BatchCall] = deque()
        self._next_batches: Sequence[Any] = ()  # after that of the last result
        # Ends the attempt, which lasts until the result of its last call is taken.
        self._end_of_attempt = contextlib.ExitStack()
        self._attempt: Attempt | None = None
        # Whether a part of the module trains, and so moves buffers, or a call has drawn
        # random numbers.
        self._moves_state = False
        # Whether the module may have changed since the last group that was computed
        # while the loop waited.
        self._is_changed = True

    def result(self, batches: Sequence[Any]) -> Any:
        """The result of the first of these batches, on its replica's device.

        The others are the next ones of the loop, which replicas compute meanwhile. A
        later call has them in the same order, without the first.
        """
        with self._workers.exclusive(), self._undone_on_error():
            if not self._calls:
                attempting = self._attempting()
                self._attempt = self._end_of_attempt.enter_context(attempting)
                self._begin(batches)
                if not self._may_go_on():
                    self._end_group()
            self._next_batches = batches[1:]
            return self._taken()

    def go_on(self) -> None:
        """Let replicas that are free begin with more of the loop's next batches.

        Call it when the last result is on its way to the loop's device. On an
        accelerator its copy would else wait for the next batch, and so would a loop
        that reads it.
        """
        with self._workers.exclusive(), self._undone_on_error():
            if self._may_go_on():
                self._begin(self._next_batches)

    def skip(self) -> None:
        """The loop leaves a batch out: drop its result, if a call has begun."""
        if not self._calls:
            return
        with self._workers.exclusive(), self._undone_on_error():
            skipped = self._calls.popleft()
            self._workers.wait_for(skipped.job)
            if not self._calls:
                self._commit()

    @contextlib.contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._wait()
            self._calls.clear()
            self._attempt = None
            self._is_changed = True
            self._end_of_attempt.__exit__(type(error), error, error.__traceback__)
            raise

    def close(self) -> None:
        """End calls whose results nobody takes."""
        if not self._calls:  # the engine may be closed, or be used by another thread
            return
        with self._workers.exclusive():
            self.settle()
            self._calls.clear()

    def settle(self) -> None:
        """Wait until no call is in progress. Results can be taken later."""
        self._wait()
        self._commit()
        self._is_changed = True

    @contextlib.contextmanager
    def _attempting(self) -> Iterator[Attempt]:
        """In the body calls may begin. At its end buffers and random state move."""
        request = Request([], 0, backward=False)
        with self._begin_attempt(request, self._plan, WHOLE_STEP) as attempt:
            replicas = attempt.replicas
            # Whether anything was written is cheap to ask, and enough: in a loop's
            # evaluation nobody writes through ``.data``.
            if not self._is_changed and not replicas.of_model.is_current():
                warn(_CHANGED)
                self._is_changed = True
            guard: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self._is_changed:
                replicas.refresh(self._module, None, attempt.transfers)
                guard = parameter_writes_refused(replicas.replica_sets)
            if any(part.training for part in self._module.modules()):
                self._moves_state = True
            # A step that begins in the middle of the loop waits for these calls.
            self._loop.settle = self.settle
            try:
                with (
                    SETTINGS_KEPT,
                    # See ``ReplicaThreads.run``.
                    fx_traceback.preserve_node_meta(
                        fx_traceback.has_preserved_node_meta()
                    ),
                    guard,
                ):
                    yield attempt
            finally:
                self._loop.settle = None
            self._is_changed = False
            buffers = buffers_of(attempt, self._module)
            if buffers is not None:
                buffers.write()
            # Else the generators of accelerators, from which the loop may have drawn
            # meanwhile, would be as before these calls.
            if attempt.generators.drawn:
                attempt.generators.commit()

    def _commit(self) -> None:
        if self._attempt is not None:
            self._attempt = None
            self._end_of_attempt.close()

    def _begin(self, batches: Sequence[Any]) -> None:
        """Begin with batches until each replica has one."""
        for batch in batches[len(self._calls) : len(self._plan.shares)]:
            call = self._begun(batch)
            self._calls.append(call)
            if self._loop.takes_turns:
                self._workers.wait_for(call.job)
                # Of all calls in turn, the first one that fails is the last one.
                if call.job.errors:
                    break

    def _end_group(self) -> None:
        self._wait()
        assert self._attempt is not None
        if self._attempt.generators.drawn:
            self._moves_state = True
        # Else what the calls have moved is undone when the result is asked for that an
        # error stands for.
        if not any(call.job.errors for call in self._calls):
            self._commit()

    def _begun(self, batch: Any) -> _BatchCall:
        assert self._attempt is not None
        number = 0
        if self._calls:
            number = (self._calls[-1].replica + 1) % len(self._plan.shares)
        share = self._plan.shares[number]
        sources = {tensor.device for tensor in nested.tensors(batch)}
        copies = Prefetcher(share.device, sources)
        replica = self._attempt.replicas.of_model.replicas[number]
        job = self._workers.begin(
            self._call,
            (self._attempt, share, replica, batch, copies),
            share.device,
            self._threads[number],
        )
        return _BatchCall(number, job, copies)

    def _may_go_on(self) -> bool:
        """Whether calls may begin while results of others are taken."""
        attempt = self._attempt
        if attempt is None or self._loop.takes_turns:
            return False
        if self._is_changed or self._moves_state:
            return False
        return attempt.replicas.of_model.is_current()

    def _taken(self) -> Any:
        """The result of the first call."""
        call = self._calls.popleft()
        (result,) = self._workers.results_of(call.job)
        call.copies.synchronize()
        # Not those of other replicas, whose calls may have drawn or not at this time:
        # else which calls form a group would differ between runs.
        if self._attempt and self._attempt.generators.has_drawn(call.replica):
            self._moves_state = True
        if not self._calls:
            self._commit()
        return result

    def _wait(self) -> None:
        for call in self._calls:
            self._workers.wait_for(call.job)

    def _call(
        self,
        attempt: Attempt,
        share: Share,
        replica: Replica,
        batch: Any,
        copies: Prefetcher,
    ) -> Any:
        """Call the function, in the replica's thread."""
        with attempt.generators.of(share.replica), ReplicaNote(share):
            # What its last call has written, such as buffers, is none of this call's.
            with torch.inference_mode(False), torch.no_grad():
                replica.refresh()
            arrived = moved_together(copies, share.device, batch, copies_all=True)
            copies.issue(0)
            copies.wait_on_stream(0)
            try:
                with torch.no_grad():
                    return self._function(replica.root, arrived)
            finally:
                attempt.replicas.end_substep()
