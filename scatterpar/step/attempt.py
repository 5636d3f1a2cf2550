"""One try at a step: its random generators, transfers and times, and how
it is undone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import traceback as fx_traceback

from scatterpar import torch_private
from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.memory import is_out_of_memory
from scatterpar.devices.transfers import PHASES, Transfers, write
from scatterpar.errors import add_note, restore_after, restored
from scatterpar.plan import Plan, Share, shown
from scatterpar.replicas.replicas import Replicas
from scatterpar.step.loss_weights import LossWeights
from scatterpar.step.request import Request
from scatterpar.threads.generators import Generators
from scatterpar.threads.workers import Cancelled, Workers

_Result = TypeVar("_Result")
# Names the sub-step in notes on errors: called before each one, with ``None`` after the
# last.
Proceed = Callable[[int | None], None]
_UNTIMED = contextlib.nullcontext()
# Times its body: a part of the step, the share whose replica does it (``None``: the
# caller's thread), and the sub-step. Threads of several replicas call it at the same
# time.
Clock = Callable[
    [str, Share | None, int | None], contextlib.AbstractContextManager[object]
]


def profiler_block(
    name: str, share: Share | None = None, sub_step: int | None = None
) -> contextlib.AbstractContextManager[object]:
    """Show the body in torch's profilers as a block, such as
    ``scatterpar forward 3``.
    """
    number = "" if sub_step is None else f" {sub_step}"
    return torch.profiler.record_function(f"scatterpar {name}{number}")


# Called before the sub-steps with the replicas' tasks, when replicas are refreshed; may
# raise.
Check = Callable[["Attempt", Sequence[Any]], None]
# Called with a task, the outputs of each replica, and a function of a task and rows
# that computes such outputs. Raises if these outputs, joined, are not what one call
# gives for all rows.
CheckJoin = Callable[..., None]

_ONE_ROW = (
    "batch normalisation cannot train on a micro-batch of one row: use a smaller "
    "accum=, or "
    "micro_batch_size= in its place, which cuts a small last batch into fewer "
    "micro-batches"
)
_NO_GRAPH = (
    "the loss of these rows has no graph: where it has no terms, return a zero that "
    "has one, such "
    "as (output * 0).sum(), or pass count=, its number of terms"
)
_OTHER_KEYS = (
    "the key is a replica's: a dictionary in an object that replicas share has the keys "
    "of your own module; make it an attribute of a module, or a variable that the hook "
    "closes over, and replicas get copies of its keys"
)
_LESS_MEMORY = (
    "more sub-steps need less memory: a larger accum=, a smaller "
    'micro_batch_size=, or accum="auto"'
)


class note_replica(contextlib.AbstractContextManager["note_replica"]):
    """Add notes to an exception of the body: replica, device, sub-step ``number`` and
    its rows.
    """

    def __init__(self, share: Share, number: int | None = None) -> None:
        self._share, self.number = share, number

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        where = f"in replica {self._share.replica} on {self._share.device}"
        rows: Sequence[int] = ()
        if self.number is not None:
            rows = self._share.rows_of(self.number)
            is_span = isinstance(rows, range) and len(rows) > 1
            named = (
                f"{rows[0]} to {rows[-1]}"
                if is_span
                else shown(", ".join(map(str, rows)))
            )
            where += f", sub-step {self.number} of {len(self._share.micro_batches)}"
            where += f", row{'s' * (len(rows) > 1)} {named}"
        add_note(error, f"{where}, counted from 0")
        if isinstance(error, ValueError) and "Expected more than 1 value" in str(error):
            add_note(error, _ONE_ROW)
        if isinstance(error, RuntimeError) and "does not require grad and" in str(
            error
        ):
            add_note(error, _NO_GRAPH)
        if isinstance(error, KeyError) and isinstance(
            next(iter(error.args), None), (nn.Module, Tensor)
        ):
            add_note(error, _OTHER_KEYS)
        if len(rows) > 1 and is_out_of_memory(error):  # one row cannot be divided
            add_note(error, _LESS_MEMORY)


@dataclass(eq=False)
class Attempt(contextlib.AbstractContextManager["Attempt"]):
    """One try at a request or a part of one: its plan, random generators, transfers and
    times.

    As a context manager, which may be entered again, it calls ``undo`` if the body
    raises.
    """

    workers: Workers
    request: Request
    plan: Plan
    replicas: Replicas
    # the number of the first replica among all processes'
    replica_offset: int | None = None
    clock: Clock | None = None
    check: Check | None = None
    check_join: CheckJoin = lambda *_: None
    # that a trial runs, whether sub-steps fit into memory
    max_substeps: int | None = None
    retain_rows: bool = True  # rows that have arrived stay for a second pass
    # Set while the attempt runs:
    # that user code reaches: no gradient may arrive there
    user_leaves: Sequence[Tensor] = ()
    is_serial: bool = False  # replicas run one after the other

    def __post_init__(self) -> None:
        shares = self.plan.shares
        self.generators = Generators(
            [share.device for share in shares], self.replica_offset
        )
        self.transfers, self.weights = Transfers(), LossWeights([], 1.0)
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.replica_seconds = [0.0] * len(shares)  # of work in the replica's thread
        # Asked once: a step has a hundred parts, and a profiler starts between steps.
        self.clock = self.clock or (
            profiler_block if torch_private.profiler_is_on() else None
        )
        self._values: list[tuple[Tensor, Tensor]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._restores: list[Callable[[], object]] = []  # of generators

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.undo(error)

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Time the body, which runs in the caller's thread, for a trace
        or a profiler.
        """
        return self.clock(name, None, None) if self.clock else _UNTIMED

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as part of phase ``name``."""
        start = time.perf_counter()
        try:
            with self.span(name):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def save_for_undo(
        self,
        tensors: Iterable[Tensor],
        gradients: Iterable[tuple[Tensor, Tensor | None]] = (),
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        """Save tensors, the ``.grad`` of leaves and the user's generators, for ``undo``
        to restore.

        Pass whatever user code may write before the commit is complete.
        """
        self._values += [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._gradients += gradients
        self._restores += [
            partial(each.set_state, each.get_state()) for each in generators
        ]

    def written(self) -> set[int]:
        """The ids of the saved tensors that have other values now."""
        return {
            id(tensor) for tensor, value in self._values if not same_bits(tensor, value)
        }

    def undo(self, error: BaseException | None = None) -> None:
        """Restore everything that was saved, and wait for pending copies.

        With ``error``, a failure becomes a note on it and the rest is restored.
        """
        restores = [self.generators.rollback, *self._restores]
        restores += [
            partial(setattr, leaf, "grad", value) for leaf, value in self._gradients
        ]
        restores += [partial(write, tensor, value) for tensor, value in self._values]
        with torch.no_grad():
            # The wait comes last: on a device that has failed it raises, and all else
            # is restored.
            restore_after(error, *restores, self.transfers.synchronize)

    @contextlib.contextmanager
    def isolated(self, task: Any) -> Iterator[None]:
        """In the body, the task's replicas start in the state of the last refresh.

        Afterwards their present state and their generators' is restored, but not their
        gradients.
        """
        number = task.share.replica
        position = self.generators.get_state(number)
        set_state = partial(self.generators.set_state, number, position)
        with restored(set_state), contextlib.ExitStack() as stack:
            for replica in task.replicas:
                stack.enter_context(replica.isolated())
            yield

    def run(
        self, function: Callable[..., _Result], tasks: Sequence[Any]
    ) -> list[_Result]:
        """Run ``function(task, proceed=…)`` for every replica's task, each in its
        worker.

        Each draws from the random stream of its replica. The function calls ``proceed``
        between sub-steps, where it can stop: between two of them it raises if another
        replica has failed. Every replica runs its first, so errors do not depend on
        timing.
        """
        cancel = threading.Event()

        def work(task: Any) -> _Result:
            start, where = time.perf_counter(), note_replica(task.share)

            def proceed(number: int | None) -> None:
                # Not before the first sub-step, which every replica runs, nor after the
                # last.
                if None not in (where.number, number):
                    self.replicas.end_substep()
                    if cancel.is_set():
                        raise Cancelled
                where.number = number

            with self.generators.of(task.share.replica), where:
                try:
                    result = function(task, proceed=proceed)
                finally:
                    self.replicas.end_substep()
            self.replica_seconds[task.share.replica] += time.perf_counter() - start
            return result

        # Threads that run one compiled graph restore each other's value of a
        # process-wide flag. Once it stayed set after activation checkpoints, and later
        # calls of torch.export failed.
        with fx_traceback.preserve_node_meta(fx_traceback.has_preserved_node_meta()):
            return self.workers.parallel_apply(
                [work] * len(tasks),
                [(task,) for task in tasks],
                devices=[task.share.device for task in tasks],
                cancel=cancel,
                is_serial=self.is_serial or self.generators.must_take_turns,
            )
