"""What a look says of a step: the verdict, and what calls do beside their results."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scatterpar.step.turns import Scope
from scatterpar.verify.rows import Parts
from scatterpar.verify.verdicts import Verdict


@dataclass(frozen=True)
class CallEffects:
    """What calls of user code do beside their results.

    Attributes:
        moved: the names of state that each part moves.
        is_seeded: whether the module seeds the default generator, and draws from it.
        lost: the shapes of large tensors that they write.
        thread_locals: what they refer to and each thread has for itself, by name.
        scope: the part of a sub-step that one replica at a time must run.
    """

    moved: Sequence[str] = ()
    is_seeded: bool = False
    lost: Sequence[tuple[int, ...]] = ()
    thread_locals: Mapping[str, threading.local] = field(default_factory=dict)
    scope: Scope = Scope.NOTHING


@dataclass(frozen=True)
class LookReport:
    """The result of a look.

    Attributes:
        verdict: what becomes of the step.
        effects: what calls do beside their results; nothing if they were not compared.
        parts: the rows of each part.
        difference: the relative difference between the results, which the GPUs' page
            shows, with the ``tolerance`` that it stayed within.
    """

    verdict: Verdict
    effects: CallEffects = CallEffects()
    parts: Parts = ()
    difference: float = math.inf
    tolerance: float = 0.0
