"""Run the work of replicas, each in its own thread and from its own random stream."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.fx import traceback as fx_traceback

from scatterpar.devices.memory import is_out_of_memory
from scatterpar.devices.streams import is_async
from scatterpar.errors import add_note
from scatterpar.plan import Share
from scatterpar.replicas.sync_batch_norm import Meeting
from scatterpar.step.turns import Scope, TurnOrder
from scatterpar.threads.generators import Generators
from scatterpar.threads.workers import Cancellation, Cancelled, Workers

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Context = contextlib.AbstractContextManager[object]
_AT_ONCE = contextlib.nullcontext()
# Held by the step whose replicas meet on accelerators. Autograd has one thread per
# accelerator for all backward passes of the process. A replica that waits in it for
# another one holds up those of other engines, whose replicas it may wait for in turn.
_MEETING = threading.Lock()
# Called with the number of each sub-step before it begins, and with ``None`` after the
# last one.
Proceed = Callable[[int | None], None]


class ReplicaThreads:
    """The threads of the replicas that have a share of the batch.

    Attributes:
        workers: the threads.
        scope: the part of a sub-step that one replica at a time runs.
        turns: those of the pass that runs; ``None`` without, and between passes.
        seconds: for each replica, how long its thread has worked.
    """

    def __init__(
        self,
        workers: Workers,
        shares: Sequence[Share],
        generators: Generators,
        end_substep: Callable[[], None] = lambda: None,
        *,
        is_of_call: bool = False,
    ) -> None:
        """``end_substep`` is called in a replica's thread after each sub-step.

        Notes on errors of a call with a graph (``is_of_call``) name other remedies.
        """
        self.workers = workers
        self.scope = Scope.NOTHING
        self.turns: TurnOrder | None = None
        self.seconds = [0.0] * len(shares)
        self._shares = shares
        self._generators = generators
        self._end_substep = end_substep
        self._is_of_call = is_of_call

    def widen(self, scope: Scope) -> None:
        """Let a turn include at least this, from the next pass on."""
        self.scope = max(self.scope, scope)

    def run(
        self,
        function: Callable[[_Item, Proceed], _Result],
        items: Sequence[_Item],
        meeting: Meeting | None = None,
    ) -> list[_Result]:
        """Call ``function(item, proceed)`` for each share, in its replica's thread.

        ``items`` has one item per share. The function calls ``proceed`` before each
        sub-step. There it can stop: between two sub-steps ``proceed`` raises if another
        replica has failed. Every replica runs its first sub-step, so errors do not
        depend on timing. In turns in the order of the rows, nobody begins a turn after
        an error: of all calls in turn, the first one that fails is the only one.

        In a ``meeting`` and in turns, replicas wait for each other within sub-steps,
        too.

        Returns the results, one per share.
        """
        # A meeting is also an event: who waits in it wakes up when another one fails.
        cancel = Cancellation() if meeting is None else meeting
        turns = None
        if self.scope is not Scope.NOTHING:
            turns = TurnOrder(self.scope, self._shares, cancel)
            if meeting is not None:
                meeting.is_turn_of = turns.is_turn_of

        def work(share: Share, item: _Item) -> _Result:
            start = time.perf_counter()
            note = ReplicaNote(share, is_of_call=self._is_of_call)

            def proceed(sub_step: int | None) -> None:
                # Not before the first sub-step, which every replica runs.
                is_between = note.sub_step is not None and sub_step is not None
                if is_between:
                    self._end_substep()
                    if cancel.is_set():
                        raise Cancelled
                # Before the meeting, where an error belongs to the sub-step that
                # begins.
                note.sub_step = sub_step
                if meeting is not None:
                    meeting.enter(share.replica, sub_step)

            with self._generators.of(share.replica), note:
                try:
                    result = function(item, proceed)
                except BaseException:
                    # Before the replica leaves the meeting, where others would miss it.
                    cancel.set()
                    raise
                finally:
                    if meeting is not None:
                        meeting.enter(share.replica, None)
                    if turns is not None:
                        turns.leave(share.replica)
                    self._end_substep()
            # Added up: two passes run in the same threads.
            self.seconds[share.replica] += time.perf_counter() - start
            return result

        # Threads that run one compiled graph restore each other's value of a
        # process-wide flag. Once it stayed set after activation checkpoints, and later
        # calls of torch.export failed.
        at_once = None
        if turns is not None and turns.is_ordered:
            at_once = len(items)  # those that wait do not compete for cores
        alone: Context = contextlib.nullcontext()
        if meeting is not None and any(is_async(s.device) for s in self._shares):
            alone = _MEETING
        self.turns = turns
        try:
            with (
                alone,
                fx_traceback.preserve_node_meta(fx_traceback.has_preserved_node_meta()),
            ):
                return self.workers.parallel_apply(
                    [work] * len(items),
                    list(zip(self._shares, items, strict=True)),
                    devices=[share.device for share in self._shares],
                    cancel=cancel,
                    at_once=at_once,
                )
        finally:
            self.turns = None

    def turn(self, scope: Scope, replica: int, sub_step: int) -> Context:
        """In the body, which is this part of a sub-step, it is the replica's turn.

        The body waits for its turn if turns include this part, and do not include the
        part around it already.
        """
        if self.turns is None or scope > self.turns.scope:
            return _AT_ONCE
        return self.turns.turn(replica, sub_step)

    def call(self, device: torch.device, function: Callable[[], _Result]) -> _Result:
        """Call ``function()`` on ``device``, in the caller's thread."""
        results: list[_Result]
        results = self.workers.parallel_apply([function], [()], devices=[device])
        return results[0]


_ONE_ROW = "batch normalisation cannot train on a micro-batch of one row: "
_FEWER_SUBSTEPS = (
    "use a smaller accum=, or micro_batch_size= in its place, which cuts a small last "
    "batch into fewer micro-batches"
)
_MORE_ROWS = (
    "use a larger batch, drop_last=True of the loader if it is a small last one, or "
    "fewer devices"
)
_LOSS_WITHOUT_GRAPH = (
    "the loss of these rows has no graph: .detach(), .item() or torch.no_grad() has "
    "cut it off from the module; or these rows have no terms: return a zero with a "
    "graph, such as (output * 0).sum(), or pass count=, its number of terms"
)
_OTHER_KEYS = (
    "the key is a replica's copy, but the dictionary is in an object that replicas "
    "share, so its keys are your own modules or tensors; make the dictionary an "
    "attribute of a module, or a variable that the hook closes over: replicas then get "
    "copies of its keys"
)
_TUNING = (
    "Triton's autotuner keeps the arguments of a call on the kernel, which replicas "
    "share (docs/limits.md); start one process per GPU, with torchrun and "
    "process_group="
)
_WRITTEN = (
    "your code may have written a tensor in place after this loss was computed from "
    "it, because replicas share a criterion that is a function, and call it for other "
    "rows before this backward pass; assign a new tensor (self.weights = new) instead "
    "of writing in place, or compute the loss from a clone() of the tensor"
)
_LESS_MEMORY = (
    "more sub-steps need less memory: a larger accum=, a smaller "
    'micro_batch_size=, or accum="auto"'
)
# A call keeps what all its rows have computed until the backward pass.
_LESS_MEMORY_OF_CALL = (
    "fewer rows per call need less memory: call several times, with all backward "
    "passes except the last inside of no_sync(); or use torch.autocast, or "
    "checkpoint(…, use_reentrant=False) in the module; or a step, "
    "ScatterOnceParallel.forward_backward, with a larger accum="
)
_FROZEN_IN_CALL = (
    "in a call the parameters of all replicas except the first are no leaf tensors, "
    "because they are computed from your parameters; set requires_grad before the "
    "call, or use parameter.detach() in forward"
)


class ReplicaNote(contextlib.AbstractContextManager["ReplicaNote"]):
    """Add notes to an exception of the body: replica, device, sub-step and its rows.

    Attributes:
        sub_step: the number of the sub-step that runs; ``None`` between sub-steps.
    """

    def __init__(
        self, share: Share, sub_step: int | None = None, *, is_of_call: bool = False
    ) -> None:
        self._share = share
        self._is_of_call = is_of_call
        self.sub_step = sub_step

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        share = self._share
        where = f"in replica {share.replica} on {share.device}"
        rows = range(0)
        if self.sub_step is not None:
            rows = share.rows_of(self.sub_step)
            where += f", sub-step {self.sub_step}"
            where += f", {_named(rows)}"
        add_note(error, f"{where} (numbers begin at 0)")
        # The class is asked first: the text of a user's own error may raise another.
        if isinstance(error, ValueError) and _says(error, "Expected more than 1 value"):
            has_one_substep = len(share.micro_batches) == 1
            add_note(
                error, _ONE_ROW + (_MORE_ROWS if has_one_substep else _FEWER_SUBSTEPS)
            )
        if isinstance(error, RuntimeError) and _says(error, "not require grad and"):
            add_note(error, _LOSS_WITHOUT_GRAPH)
        if isinstance(error, RuntimeError) and _says(error, "modified by an inplace"):
            add_note(error, _WRITTEN)
        if isinstance(error, KeyError) and _is_about_a_replica(error):
            add_note(error, _OTHER_KEYS)
        if isinstance(error, TypeError) and _is_of_autotuner(error):
            add_note(error, _TUNING)
        is_frozen = isinstance(error, RuntimeError) and _says(error, "requires_grad f")
        if self._is_of_call and is_frozen:
            add_note(error, _FROZEN_IN_CALL)
        if len(rows) > 1 and is_out_of_memory(error):  # one row cannot be divided
            add_note(error, _LESS_MEMORY_OF_CALL if self._is_of_call else _LESS_MEMORY)


def _says(error: BaseException, words: str) -> bool:
    return words in str(error)


def _is_about_a_replica(error: KeyError) -> bool:
    return bool(error.args) and isinstance(error.args[0], (nn.Module, Tensor))


def _is_of_autotuner(error: TypeError) -> bool:
    """Whether Triton's autotuner found that another thread had ended its call."""
    *_, innermost = traceback.extract_tb(error.__traceback__)
    is_there = innermost.filename.endswith(os.path.join("runtime", "autotuner.py"))
    return is_there and _says(error, "'NoneType' object is not")


def _named(rows: range) -> str:
    """The numbers of rows as text, such as ``rows 8 to 9``."""
    if len(rows) == 1:
        return f"row {rows[0]}"
    return f"rows {rows[0]} to {rows[-1]}"
