"""accum="auto": the fewest sub-steps that fit into memory.

The whole step runs with the number that fitted last. If memory runs out, the number is
doubled until a trial fits, then the gap is halved. The smallest number that fits is
tried with a whole step. A trial runs two sub-steps per replica, which have a whole
step's peak of memory::

    accum=1   whole step   memory runs out
    accum=2   trial        memory runs out
    accum=4   trial        fits
    accum=3   trial        memory runs out
    accum=4   whole step   fits, and is kept

Training has one number. Without gradients each function has one per number of rows::

    engine.forward_backward(…)                      accum=4
    engine(…)                            512 rows   accum=1
    engine.map(model.generate, …)        512 rows   accum=16
                                          96 rows   accum=3
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from scatterpar.devices.memory import is_out_of_memory
from scatterpar.errors import warn
from scatterpar.log import logger
from scatterpar.objects.journal import Journal
from scatterpar.objects.references import read_attribute
from scatterpar.options.map_rows import RowFunction
from scatterpar.plan import Plan
from scatterpar.step.attempt import Attempt, Extent
from scatterpar.step.request import Request
from scatterpar.step.substeps import Schedule
from scatterpar.step.tries import Result, Tries, Try
from scatterpar.threads.workers import Workers

_TRIAL = Extent(is_trial=True, max_substeps=2, retain_rows=False)


@dataclass
class Fit:
    """The number of sub-steps that fitted last.

    Attributes:
        accum: the number of sub-steps.
        retain_rows: rows may stay on their device for a second pass. False from the
            first time on that memory runs out with them.
    """

    accum: int = 1
    retain_rows: bool = True


class AutoAccum:
    """The numbers of sub-steps that fit, as an engine has found them.

    Attributes:
        training: what fitted last in training.
        too_many_rows: without gradients, the fewest rows of a sub-step that ran out of
            memory, by function. Its memory follows the rows of a sub-step.
    """

    def __init__(self) -> None:
        self.training = Fit()
        self.too_many_rows: dict[Hashable, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Code, by which functions are known, cannot be pickled.
        return {"training": self.training, "too_many_rows": {}}


class Search(Tries[Result]):
    """The tries of one call, until a whole step fits."""

    def __init__(
        self,
        auto_accum: AutoAccum,
        request: Request,
        work: Schedule | RowFunction,
        plan_of: Callable[[int], Plan],
        num_replicas: int,
        workers: Workers,
        journal: Journal,
    ) -> None:
        """``plan_of`` returns the plan for a number of sub-steps per replica.

        ``journal`` is restored before each try except the first. It alone undoes a
        trial that fits; one that fails is undone as any failed step.
        """
        self._retries = 0  # how often memory has run out
        self._request = request
        self._work = work
        self._plan_of = plan_of
        self._journal = journal
        self._num_replicas = num_replicas
        self._rows = max(request.sizes)  # of several batches each is cut
        # Then a sub-step has one row.
        self._most = self._fewest_substeps_of(1)
        self._too_many_rows = auto_accum.too_many_rows
        self._function: Any = request.criterion
        if isinstance(work, RowFunction):
            self._function = work.function
        # ``generate`` keeps a cache that a forward pass has not: each has a number of
        # its own.
        self._key = type(work), identity_of(self._function)
        # Gradients and the graph of a step take the same memory whichever criterion it
        # has: one number serves all of training.
        self._fit = auto_accum.training
        if not request.backward:
            too_many = self._too_many_rows.get(self._key, self._rows + 1)
            self._fit = Fit(self._fewest_substeps_of(too_many - 1))
        self._candidates_left = self._candidates()
        self._accum, extent = next(self._candidates_left)
        schedule = work if isinstance(work, Schedule) else None
        super().__init__(self._try(extent), schedule, workers)

    def _fewest_substeps_of(self, rows: int) -> int:
        """The fewest sub-steps per replica that have at most so many rows each."""
        return -(-self._rows // (self._num_replicas * max(1, rows)))

    def go_on_after(self, error: Exception | None) -> bool:
        """Choose the next candidate; ``False`` after the error of the last one."""
        if super().go_on_after(error):
            return True
        fits = error is None
        if error is None:
            logger.debug('accum="auto": a trial with %d fits', self._accum)
        else:
            if not self._work.may_start_again or not self._note_failure(error):
                return False
            fits = not is_out_of_memory(error)
        self._free(error)
        self._journal.restore()
        self._accum, extent = self._candidates_left.send(fits)
        self.present = self._try(extent)
        return True

    def keep(self, attempt: Attempt) -> None:
        """Let later calls begin with this number of sub-steps; warn if it is new."""
        super().keep(attempt)
        with attempt.undo:  # warnings may be errors
            self._keep(self._accum)
        attempt.retries = self._retries

    def _try(self, extent: Extent) -> Try:
        request = self._request
        if extent.is_trial:
            # A function that selects outputs is the user's: trials do not call it.
            request = replace(request, return_outputs=False)
        return Try(request, self._plan_of(self._accum), extent)

    def _candidates(self) -> Generator[tuple[int, Extent], bool, None]:
        """Yield the number of sub-steps to try next, and how much of a step.

        The caller sends whether it fits, until a whole step does.
        """
        accum = self._fit.accum
        while True:
            extent = self._whole_step(accum)
            yield accum, extent
            # Rows that are kept for a second pass are the first memory to give up.
            if extent.retain_rows:
                # For all later steps, too: else each would first run out of memory.
                self._fit.retain_rows = False
                yield accum, self._whole_step(accum)
            too_few = accum
            enough = None
            while enough is None or enough > too_few + 1:
                if enough is None:
                    # Doubled: out of memory costs a whole forward pass, so few tries
                    # matter most.
                    accum = min(2 * too_few, self._most)
                else:
                    accum = (too_few + enough + 1) // 2
                if (yield accum, _TRIAL):
                    enough = accum
                else:
                    too_few = accum
            accum = enough

    def _whole_step(self, accum: int) -> Extent:
        plan = self._plan_of(accum)
        # With one sub-step per replica no rows are needed a second time.
        has_several = len(plan.substep_rows) > len(plan.shares)
        trains_all_rows = self._request.whole_batch and self._request.backward
        computes_twice = trains_all_rows and has_several
        return Extent(retain_rows=self._fit.retain_rows and computes_twice)

    def _note_failure(self, error: Exception) -> bool:
        """Count a try that ran out of memory. Returns whether there is more to try.

        If no number of sub-steps is left, ``error`` gets a note.
        """
        accum = self._accum
        extent = self.present.extent
        if not is_out_of_memory(error):
            # The whole step will raise the error of a trial, as for one row in a norm.
            return extent.is_trial
        self._retries += 1
        rows = self._request.rows
        logger.debug(
            'accum="auto": %d rows with accum=%d ran out of memory', rows, accum
        )
        if extent.retain_rows or accum < self._most:
            return True
        error.add_note(
            f'accum="auto" has nothing left to try: with {accum} sub-steps a sub-step '
            f"is one row, and that does not fit ({self._retries} tries ran out of "
            f"memory)"
        )
        return False

    def _keep(self, accum: int) -> None:
        """Begin later calls with this number; warn if it is another one."""
        earlier = self._fit.accum
        if accum == earlier:
            return
        self._fit.accum = accum
        calls = ""
        if not self._request.backward:
            # With one sub-step less, memory ran out.
            too_large = self._plan_of(accum - 1)
            self._too_many_rows[self._key] = max(too_large.substep_rows)
            function = name_of_function(self._function)
            calls = f" for {function} with {self._rows} rows and without gradients"
        warn(
            f'accum="auto": {self._request.rows} rows with accum={earlier} ran out '
            f"of memory, and accum={accum} is the smallest that fits. It is kept{calls}"
        )


def innermost(function: Any) -> Any:
    """The function that the user wrote: a module's ``forward``, what a partial or a
    decorator calls.
    """
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, nn.Module):
        function = function.forward
    # Not of any object: one may answer every attribute.
    if isinstance(function, (types.FunctionType, types.MethodType)):
        function = inspect.unwrap(function)
    return function


def identity_of(function: Any) -> Hashable:
    """The key of a function: its code, which a new lambda in each call shares.

    Of a function in C the name, and of an object that is called its class.
    """
    function = innermost(function)
    if isinstance(function, (types.FunctionType, types.MethodType)):
        return function.__code__
    return name_of_function(function)


def name_of_function(function: Any) -> str:
    """The function, as a warning names it."""
    if function is None:  # there is no criterion
        return "the module's own loss"
    function = innermost(function)
    name: str = read_attribute(function, "__qualname__", type(function).__qualname__)
    return name
