"""The report of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scatterpar.splitting.gradients import first_names, joined, union
from scatterpar.splitting.split_runs import sizes_in_words
from scatterpar.splitting.step_run import StepResult
from scatterpar.splitting.trial import Comparison, Trial
from scatterpar.tables import Printed


@dataclass(frozen=True)
class Cause:
    """A mistake, the numbers that show it, and what to write instead."""

    name: str = ""
    why: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class SplitCheck(Printed):
    """The gradient of a batch in parts, compared with that of the whole batch.

    Attributes:
        rows: the size of the batch.
        sizes: the sizes of the parts; ``|`` is between ranks.
        ranks: the number of processes.
        worst: the largest relative difference of a parameter.
        limit: the largest difference that rounding explains.
        cause: the mistake that explains the difference; empty if only rounding differs.
        why: a sentence with the numbers that show it.
        remedy: what to write instead.
        note: what this batch cannot show.
        parameter: the name of the parameter with the largest difference.
        ratio: the norm of the gradient in parts over that of the whole batch.
        cosine: of the angle between the two.
        wrong: the names of all parameters that differ by more than ``limit``.
    """

    rows: int
    sizes: str
    ranks: int
    worst: float
    limit: float
    cause: str
    why: str
    remedy: str
    note: str
    parameter: str
    ratio: float
    cosine: float
    wrong: list[str]

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
            f"gradient of {self.rows} rows as {self.sizes}{ranks}, compared with the "
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


def report_of(trial: Trial, comparison: Comparison, cause: Cause) -> SplitCheck:
    """The report of a comparison, and of the cause that explains it."""
    reference = comparison.reference
    results = comparison.results
    expected = reference.gradients
    # Rank 0 stands for all in the numbers of the report, though not in the verdict.
    actual = joined(results[0].gradients)
    whole = joined(expected)
    ratio = actual.norm() / whole.norm()
    cosine = torch.cosine_similarity(actual, whole, dim=0)
    wrong: list[list[str]] = []
    for result in results:
        wrong.append(trial.differing(result.gradients, expected))
    return SplitCheck(
        rows=len(trial.rows),
        sizes=sizes_in_words(trial.split()),
        ranks=trial.ranks,
        worst=comparison.worst,
        limit=trial.limit,
        cause=cause.name,
        why=cause.why,
        remedy=cause.remedy,
        note=_note(trial, [reference, *results]),
        parameter=comparison.name,
        ratio=float(ratio),
        cosine=float(cosine),
        wrong=union(wrong),
    )


def _note(trial: Trial, results: Sequence[StepResult]) -> str:
    """Sentences about what ``results``, that of the whole batch first, hide."""
    sentences = list(trial.unseen)
    uncompared = union(result.uncompared for result in results)
    if uncompared:
        sentences.append(
            f"the gradient of {', '.join(uncompared)}: not compared, because no "
            f"optimizer in step has it, or its shape depends on the split"
        )
    # Frozen ones have no gradient in any loop.
    trained = {n for n, p in trial.model.named_parameters() if p.requires_grad}
    hidden = trial.invisible(results[0].gradients)
    names = [name for name in hidden if name in trained]
    if names:
        sentences.append(
            f"the gradient of {first_names(names)}, which is zero, or nearly zero"
        )
    return "; ".join(sentences)
