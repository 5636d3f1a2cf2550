"""``splitcheck``: the gradient of a batch in parts beside that of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn

from scatterpar.option_checks import check_int, check_number
from scatterpar.splitting.causes import EXACT, Cause, explain, explain_terms
from scatterpar.splitting.gradients import differing, joined, largest_error
from scatterpar.splitting.process_state import refers_to_accelerator
from scatterpar.splitting.step_run import StepFunction
from scatterpar.splitting.trial import Loss, Trial, described
from scatterpar.tables import Printed

_PARTS = 4  # by default, in one process


@dataclass(frozen=True)
class SplitCheck(Printed):
    """The gradient of a batch in parts, beside that of the whole batch.

    Attributes:
        rows: the size of the batch.
        sizes: the sizes of the parts; ``|`` is between ranks.
        ranks: the number of processes.
        worst: the largest relative difference of a parameter, as in ``engine.check``.
        parameter: the name of this parameter.
        wrong: the names of all parameters that differ by more than ``limit``.
        limit: the largest difference that rounding explains.
        ratio: the norm of the gradient in parts over that of the whole batch.
        cosine: of the angle between the two.
        cause: the mistake that explains the difference; empty if only rounding differs.
        why: a sentence with the numbers that show it.
        remedy: what to write instead.
        note: what this batch cannot show.
        terms: for each term of the loss its cause, or ``exact``; empty without terms,
            or if only rounding differs.
    """

    rows: int
    sizes: str
    ranks: int
    worst: float
    parameter: str
    limit: float
    ratio: float
    cosine: float
    cause: str
    why: str
    remedy: str
    note: str
    wrong: list[str] = field(default_factory=list)
    terms: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether only rounding differs."""
        return self.worst <= self.limit

    def assert_passed(self) -> None:
        """Raise an ``AssertionError`` with the report, unless only rounding differs."""
        if not self.passed:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        """The verdict, the numbers, the reason, and the remedy: a line each."""
        ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        verdict = "only rounding differs" if self.passed else "NOT the same"
        lines = [
            f"gradient of {self.rows} rows as {self.sizes}{ranks}, beside that of the "
            f"whole batch: {verdict}",
            f"  largest relative difference {self.worst:.1e}, in {self.parameter} "
            f"(limit {self.limit:.0e}); norm {self.ratio:.4g} times, cosine "
            f"{self.cosine:.4f}",
        ]
        if not self.passed:
            lines.append(f"  why: {self.cause}. {self.why}")
            lines.append(f"  do:  {self.remedy}")
        elif self.note:
            lines.append(f"  not seen: {self.note}")
        return "\n".join(lines)


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
        equal: whether all parts have equally many rows. By default ranks have, as a
            ``DistributedSampler`` gives them, but the parts of a rank have not.
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
        RuntimeError: if the step fails on a rank, with its traceback.
        TimeoutError: if ranks wait for each other, with the lines where they do.
    """
    return check_split(
        step,
        model,
        batch,
        parts=parts,
        ranks=ranks,
        equal=equal,
        loss=loss,
        timeout=timeout,
        counted=batch,
    )


def check_split(
    step: StepFunction,
    model: nn.Module,
    batch: Any,
    *,
    parts: int | None,
    ranks: int,
    equal: bool | None,
    loss: Loss | None,
    timeout: float,
    counted: Any,
) -> SplitCheck:
    """Check as ``splitcheck``. ``counted`` has tensors in which a loss may count."""
    _check_arguments(step, model, parts, ranks, loss, timeout)
    if parts is None:
        parts = _PARTS if ranks == 1 else 1
    trial = Trial(
        step,
        model,
        batch,
        parts=parts,
        ranks=ranks,
        equal=equal,
        loss=loss,
        seconds=timeout,
        counted=counted,
    )
    reference, results = trial.compare()
    expected = reference.gradients
    errors = [largest_error(result.gradients, expected) for result in results]
    worst, parameter = max(errors)
    cause = Cause()
    of_terms: dict[str, Cause] = {}
    if worst > trial.limit:
        cause = explain(trial, expected, results)
        if reference.terms:
            of_terms = explain_terms(trial, reference.terms)
            cause = _with_terms(cause, of_terms)
    wrong: dict[str, None] = {}
    for result in results:
        names = differing(result.gradients, expected, trial.limit)
        wrong.update(dict.fromkeys(names))
    why = cause.why
    other_generators = sorted(reference.drawn - {"torch"})
    if cause.name and other_generators:
        generators = " and ".join(other_generators)
        why += (
            f" But step draws from the generator of {generators}, whose numbers may "
            f"differ between parts: draw before splitcheck."
        )
    actual = joined(results[0].gradients)
    whole = joined(expected)
    uncompared = dict.fromkeys((*reference.uncompared, *results[0].uncompared))
    unseen = [*trial.hidden_terms(), *trial.unseen]
    if uncompared:
        unseen.append(
            f"the gradient of {', '.join(uncompared)}: not compared, because no "
            f"optimizer in step has it"
        )
    if isinstance(step, FunctionType):
        vars(step).update(trial.probes)
    return SplitCheck(
        rows=len(trial.rows),
        sizes=described(trial.split()),
        ranks=ranks,
        worst=worst,
        parameter=parameter,
        limit=trial.limit,
        ratio=float(actual.norm() / whole.norm()),
        cosine=float(torch.cosine_similarity(actual, whole, dim=0)),
        cause=cause.name,
        why=why,
        remedy=cause.remedy,
        note="; ".join(unseen),
        wrong=list(wrong),
        terms={name: cause_of_term.name for name, cause_of_term in of_terms.items()},
    )


def _with_terms(cause: Cause, of_terms: dict[str, Cause]) -> Cause:
    """The cause of the first wrong term, with a list of the causes of all terms."""
    listed = "; ".join(f"{name}: {term.name}" for name, term in of_terms.items())
    for name, term in of_terms.items():
        if term.name != EXACT:
            return replace(term, why=f"{listed}. In {name}: {term.why}")
    return replace(cause, why=f"{listed}. {cause.why}")


def _check_arguments(
    step: Any, model: Any, parts: Any, ranks: Any, loss: Any, timeout: Any
) -> None:
    if not callable(step):
        raise TypeError(f"step must be a function step(model, batches), got {step!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function loss(model, batch), got {loss!r}")
    check_int("ranks", ranks, least=1)
    if parts is not None:
        check_int("parts", parts, least=1)
    check_number("timeout", timeout)
    if parts == ranks == 1 and loss is None:
        raise ValueError(
            "parts=1 on one rank compares the step with itself; pass parts=2 or more, "
            "ranks=, or loss="
        )
    if ranks > 1 and refers_to_accelerator(step):
        raise ValueError(
            f"step refers to an Accelerator that was made outside of it, for this "
            f"process alone, and ranks={ranks} starts others; make it, or the Trainer "
            f"that has it, in step, and call prepare() there"
        )
    devices = {parameter.device.type for parameter in model.parameters()}
    if ranks > 1 and devices != {"cpu"}:
        raise ValueError(
            f"model has parameters on {', '.join(sorted(devices)) or 'no device'}; "
            "with ranks= pass it on the CPU"
        )
