"""Which random numbers a step gets, so that its gradient does not depend on the split.

::

    constant    in each run, unless a gradient vanishes with them
    varied      then: each draw the same for all rows, and draws without rows as weights

Draws that a batch of fewer rows has as well are those without rows.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import torch

from scatterpar.spans import Part
from scatterpar.splitting.gradients import first_names, is_zero
from scatterpar.splitting.operator_modes import Numbers, Shape
from scatterpar.splitting.split_runs import SplitRuns
from scatterpar.splitting.step_run import StepResult

_VANISHED = 1e-3  # of the limit: a gradient below it is rounding


def first_reference(
    runs: SplitRuns, rows: Part, limit: float
) -> tuple[StepResult, list[str]]:
    """The gradient of the whole batch. Finds out which random numbers are used.

    They are in the settings of ``runs`` from now on. Returns also sentences about what
    these numbers hide. ``limit`` is the difference that rounding explains.

    Raises ``ValueError`` if the step leaves no gradient.
    """
    result = runs.reference(rows)
    as_drawn = result
    if result.has_drawn:
        as_drawn = runs.reference(rows, numbers=Numbers.AS_DRAWN)
    if is_zero(as_drawn.gradients):
        raise ValueError(
            "step left no gradient on any parameter of the model; compute the loss "
            "with the model that step gets as its argument, call backward(), and do "
            "not clear gradients after the last backward()"
        )
    if not result.has_drawn:
        return result, []
    of_fewer_rows = Counter[Shape]()
    if result.draws:
        of_fewer_rows = runs.reference(rows[: len(rows) // 2]).draws
    if _vanished(result, as_drawn, limit):
        # Equal weights of classes, for one, leave no gradient on what is below.
        shapes = frozenset(result.draws & of_fewer_rows)
        runs.settings = replace(
            runs.settings, numbers=Numbers.VARIED, fixed_shapes=shapes
        )
        result = runs.reference(rows)
    vanished = _vanished(result, as_drawn, limit)
    if len(vanished) == len(as_drawn.gradients) or is_zero(result.gradients):
        raise ValueError(
            "splitcheck replaces random numbers by constants, and with these the "
            "gradient is zero, so that nothing can be compared; draw the random "
            "numbers before you call splitcheck, and pass them in batch"
        )
    unseen: list[str] = []
    if vanished:
        unseen.append(
            f"the gradient of {first_names(vanished)}, which is zero with constant "
            f"random numbers"
        )
    # Initial weights are as many for fewer rows.
    if result.draws != of_fewer_rows:
        unseen.append(
            "what random numbers of each row decide, such as weights or masks, since "
            "all rows get the same numbers; draw them before, and pass them in batch"
        )
    return result, unseen


def _vanished(result: StepResult, as_drawn: StepResult, limit: float) -> list[str]:
    """The parameters whose gradient is not finite, or rounding beside another."""
    vanished = []
    for name, gradient in as_drawn.gradients.items():
        # Norms, because a gradient may be moved among the entries by other numbers.
        size = float(result.gradients.get(name, torch.zeros(())).norm())
        is_rounding = size < _VANISHED * limit * float(gradient.norm())
        if is_rounding or not math.isfinite(size):
            vanished.append(name)
    return vanished
