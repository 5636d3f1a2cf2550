"""The options that another library's loop sets on the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scatterpar.objects.journal import Journal
from scatterpar.objects.walk import Walk
from scatterpar.step.request import LossCandidate
from scatterpar.step.turns import Scope


@dataclass(frozen=True)
class LoopOptions:
    """The options of a loop around the engine, ``engine.loop``; read in each step.

    Without such a loop they are the defaults. Copies of an engine have defaults, too,
    because a loop makes its own engine.

    Attributes:
        is_checked: whether a step may have looks. Not if its criterion reads more than
            the outputs and targets that it gets.
        takes_turns: whether replicas call the user's function one at a time.
        lends: whether calls in turn are those of the user's own modules, which have a
            replica's tensors meanwhile.
        turn: the part of a sub-step that is the user's function. By default the
            module's forward pass and the criterion, or the function of ``engine.map``.
        loss_name: the user's function that computes the loss, for texts; empty if it is
            the module, or the criterion.
        remedies: sentences for the refusals of a look, which name arguments of the loop
            in the place of the engine's. Empty: the engine's own.
        candidates: ways in which the losses of the loop's micro-batches may combine,
            the likeliest first. The engine takes the first one that fits a few rows.
            Empty: the arguments of each step say how.
        divided: returns the inputs of a look, whose rows can be divided, for those of a
            step whose rows are whole micro-batches. It raises ``ValueError`` if they
            cannot be divided. ``None``: the step's own inputs.
        written: finds what calls of the user's function may write, before the first try
            of ``accum="auto"`` at a step. It is restored after each try that ran out of
            memory, and after trials. ``None``: what the arguments of the step lead to.
        around_looks: makes a context manager for the calls of a look, in which the
            loop's loggers are silent, and after which its owner is as before.
        journal_of_look: returns what saves, in a look, all that calls may write, random
            generators included; ``None`` outside of looks.
        disturbs: whether calls of the last look have written in place what calls on
            other replicas read, too. Their backward passes may need it as it was.
    """

    is_checked: bool = True
    takes_turns: bool = False
    lends: bool = False
    turn: Scope = Scope.FUNCTION
    loss_name: str = ""
    remedies: str = ""
    candidates: Sequence[LossCandidate] = ()
    divided: Callable[[Any], Any] | None = None
    written: Callable[[], Walk] | None = None
    around_looks: Callable[[], contextlib.AbstractContextManager[object]] = (
        contextlib.nullcontext
    )
    journal_of_look: Callable[[], Journal | None] = lambda: None
    disturbs: Callable[[], bool] = lambda: False
