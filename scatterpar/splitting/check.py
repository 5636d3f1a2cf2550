"""``splitcheck``: the gradient of a batch in parts beside that of the whole batch."""

from __future__ import annotations

from typing import Any

from torch import nn

from scatterpar.splitting.cause_words import explain
from scatterpar.splitting.check_report import SplitCheck, report_of
from scatterpar.splitting.split_arguments import Loss, SplitArguments
from scatterpar.splitting.step_run import StepFunction
from scatterpar.splitting.trial import Trial


def splitcheck(
    step: StepFunction,
    model: nn.Module,
    batch: Any,
    *,
    parts: int | None = None,
    ranks: int = 1,
    equal: bool | None = None,
    loss: Loss | None = None,
    timeout: float = 60.0,
) -> SplitCheck:
    """Check that a training loop's gradient does not depend on how the batch is split.

    Calls ``step(model, [batch])`` and ``step(model, [part, part, …])``, and compares
    the gradients that the optimizer would receive. If they differ, the report names
    the usual mistake that explains it. Afterwards everything is as before, except for
    numbers that ``step`` sets on itself, as ``step.largest = 1.0``.

    Args:
        step: your loop over micro-batches: ``step(model, batches)`` runs forward and
            backward for each. It may create optimizers and call their ``step()``,
            which changes nothing, and ends the call when all gradients are known.
            Write ``len(batches)``, not a constant.
        model: the module; with ``ranks`` on the CPU.
        batch: 16 to 64 rows, along the first dimension of tensors, in tuples, lists,
            mappings. Rows should differ in what your loss counts, such as labels that
            are not -100.
        parts: micro-batches of each rank: 4, or 1 with ``ranks``.
        ranks: processes that form a gloo group. Each calls ``step`` with its own parts.
        equal: whether all parts have equally many rows. By default all ranks have
            equally many rows, as with a ``DistributedSampler``, but the parts of a
            rank do not.
        loss: the loss of a whole batch in plain torch, ``loss(model, batch)``. Its
            gradient is then the right one: mistakes show that ``step`` makes with a
            single part, too.
        timeout: seconds after which ranks are killed.

    Computes in float64, if the step can. Random operators give constant numbers, and
    torch's functions that clip gradients change nothing at their first call.

    Raises:
        ValueError: for too few rows, a comparison of a step with itself, a step that
            leaves no gradient or is for one batch, and with ``ranks`` an
            ``Accelerator`` from outside.
        RuntimeError: if the step fails on a rank, with your lines that led there.
        TimeoutError: if ranks wait for each other, with the lines where they do.
    """
    arguments = SplitArguments(
        step,
        model,
        batch,
        parts=parts,
        ranks=ranks,
        equal=equal,
        loss=loss,
        timeout=timeout,
    )
    return check(Trial(arguments))


def check(trial: Trial) -> SplitCheck:
    """Compare the gradients, and find the cause of a difference."""
    comparison = trial.compare()
    cause = explain(trial, comparison)
    # After the last run, which would restore them.
    trial.runs.leave_numbers()
    return report_of(trial, comparison, cause)
