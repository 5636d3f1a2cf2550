"""The skeleton of all loops: a step of a library's loop on the replicas of an engine.

::

    loop.step(inputs, …)
        engine.loss                     # the loss of all rows
            with looking():             # a look: what its calls write is restored
                call(work, …)
            with in_turn(work):         # a call: the user's own modules, and in them
                call(work, …)           #     the tensors of a replica
        lending.end_step()              # also of a step that has failed
        functions.tell_numbers(…)       # those that the calls of the look wrote

A library's subclass says what its calls may write, calls the step function for a
micro-batch, and puts together what the calls have left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from scatterpar.devices.virtual_devices import HOST, physical
from scatterpar.engine import ScatterOnceParallel
from scatterpar.loops.lending import Lending, Loan, loan_of, roots_of
from scatterpar.loops.modules import device_of
from scatterpar.loops.parameter_hooks import hooks_refused
from scatterpar.loops.user_functions import UserFunctions
from scatterpar.objects.walk import Walk
from scatterpar.step.loop_options import LoopOptions
from scatterpar.step.request import LossCandidate
from scatterpar.step.turns import Scope, lasting_a_turn
from scatterpar.verify.dropped_records import is_look


class Loop:
    """The step function of a library's loop, which replicas call for micro-batches.

    Attributes:
        function: the name of the step function, for texts.
        remedies: as in ``LoopOptions``.
        once_per_batch: what counts steps, for texts about numbers that calls write.
        gradients_at: where gradients can be read, for the text about those in a call.
        not_lent: names of attributes of owners that stay as they are. They lead to
            data, to the loop, or to modules that are exchanged otherwise.
        lends: whether calls in turn are those of the user's own modules.
        turn: as in ``LoopOptions``.
        divided: as in ``LoopOptions``.
        engine: computes the steps; ``None`` if there is none at present.
        home: the device of the user's modules.
        lending: lends the owners a replica's tensors.
        functions: those of the user's that take turns.
        takes_turns: whether the calls of the present step do.
    """

    function: str
    remedies: str
    once_per_batch: str
    gradients_at = "Read it when the step has ended"
    not_lent: Collection[str] = ()
    lends = True
    turn = Scope.FUNCTION
    divided: Callable[[Any], Any] | None = None
    engine: ScatterOnceParallel[Any] | None = None
    home: torch.device
    lending: Lending
    takes_turns = False

    def __init__(self) -> None:
        self.functions = UserFunctions()

    def begin(self, home: torch.device) -> None:
        """The user's modules are on ``home`` from now on."""
        self.home = home
        self.lending = Lending(self.lent_roots, self.not_lent, home, self.optimizers)

    # What a library has of its own.

    def owners(self) -> list[Any]:
        """The owner of the step function, and what else leads calls to tensors, such as
        callbacks.
        """
        raise NotImplementedError

    def beside(self) -> list[Any]:
        """What else calls may write, such as data sets. It leads to no tensors of
        replicas.
        """
        return []

    def replicated_modules(self) -> Sequence[nn.Module]:
        """The modules of the engine, which lends their tensors. Without them, modules
        to which the owners lead are owners, too.
        """
        return ()

    def optimizers(self) -> Iterable[Any]:
        """Those whose state answers for a replica's parameters."""
        return ()

    # The skeleton.

    def roots(self) -> list[Any]:
        """What calls may write."""
        owners = [*self.owners(), *self.beside()]
        return roots_of(owners, self.replicated_modules(), self.not_lent)

    def lent_roots(self) -> list[Any]:
        """What may lead calls to tensors, which they then find on their device."""
        return roots_of(self.owners(), self.replicated_modules(), self.not_lent)

    def let_take_turns(self, functions: Sequence[Any]) -> None:
        """Replicas call these functions in turn. Without one they need no turns."""
        self.takes_turns = bool(functions)
        for function in functions:
            self.functions.tell_turns(function)

    def options(
        self, candidates: Sequence[LossCandidate] = (), *, is_checked: bool = True
    ) -> LoopOptions:
        """The options of the engine in the next step."""
        return LoopOptions(
            is_checked=is_checked,
            takes_turns=self.takes_turns,
            lends=self.lends and self.takes_turns,
            turn=self.turn,
            # Of calls in turn, the function; else the engine's criterion is named.
            loss_name=self.function if self.lends else "",
            remedies=self.remedies,
            candidates=candidates,
            divided=self.divided,
            written=self.written,
            around_looks=self.looking,
            journal_of_look=lambda: self.functions.journal,
            disturbs=self.disturbs,
        )

    def step(
        self,
        inputs: Any,
        *arguments: Any,
        candidates: Sequence[LossCandidate] = (),
        is_checked: bool = True,
        **options: Any,
    ) -> Any:
        """``engine.loss`` for these arguments, whose calls are those of a step."""
        engine = self.engine
        assert engine is not None
        engine.loop = self.options(candidates, is_checked=is_checked)
        try:
            result = engine.loss(inputs, *arguments, **options)
        finally:
            self.lending.end_step()
        # One loss of all rows is one call.
        if self.takes_turns and not options.get("whole_batch"):
            assert engine.last_step is not None
            calls = len(engine.last_step.plan.substep_rows)
            owner = self.owners()[0] if self.lends else None
            remedy = self.once_per_batch
            self.functions.tell_numbers(self.function, calls, remedy, owner)
        return result

    @contextlib.contextmanager
    def in_turn(self, loan: Loan, device: torch.device) -> Iterator[None]:
        """In the body, and until the turn ends, a call runs with the tensors of
        ``loan`` on ``device``.
        """
        # Else numbers that calls write would differ with the rows of a look.
        if is_look():
            self.functions.restart_look()
        assert self.engine is not None
        turns = self.engine.present_turns
        # Of a replica, or of the user's own modules, which looks call.
        leaves = [*loan.leaves().values()] or [*self.engine.module.parameters()]
        with (
            lasting_a_turn(turns, self.lending.lent(loan, device)),
            # Not until the turn ends, with a backward pass that adds gradients.
            self.lending.gradients_hidden(loan, self.function, self.gradients_at),
            hooks_refused(leaves, self.engine.module, self.function),
        ):
            yield

    def loan_of(self, work: nn.Module) -> Loan:
        """The tensors of the replica whose modules are ``work``."""
        assert self.engine is not None
        return loan_of(self.engine.present_replicas, work)

    def device_of(self, work: Any) -> torch.device:
        """The device of the replica whose modules are ``work``."""
        return device_of(work[0], self.home)

    def looking(self) -> contextlib.AbstractContextManager[None]:
        """In the body, which is a look, calls of functions leave nothing."""
        assert self.engine is not None
        return self.functions.looking(
            [self.engine.module], self.lending, self.roots(), self.not_lent
        )

    def disturbs(self) -> bool:
        """Whether calls of the last look have written in place what replicas share."""
        engine = self.engine
        assert engine is not None
        if len(engine.device_ids) == 1:
            return False
        # Each replica has memory of its own for these.
        replicated = {*map(id, engine.module.parameters())}
        replicated.update(map(id, engine.module.buffers()))
        # Others read copies of what is on a device, and all read the host's.
        devices = {HOST, *map(physical, engine.device_ids)}
        return any(
            device in devices
            for key, device in self.functions.written.items()
            if key not in replicated
        )

    def written(self) -> Walk:
        """Finds all that calls may write, before the tries of a step."""
        return Walk(self.roots(), excluded=self.not_lent)

    def close(self) -> None:
        """Close the engine, if there is one."""
        # Replicas would keep the memory of their devices.
        if self.engine is not None:
            self.engine.close()
        self.engine = None
