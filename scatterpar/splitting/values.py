"""``valuecheck``: numbers of an evaluation in parts beside those of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from scatterpar.causes.evidence import CauseKind
from scatterpar.splitting.causes import Cause
from scatterpar.splitting.gradients import Gradients, differing, largest_error
from scatterpar.splitting.trial import Trial, described
from scatterpar.tables import Printed

Evaluate = Callable[[Any, list[Any]], "float | Mapping[str, Any]"]

_SMALLEST = 1e-12


@dataclass(frozen=True)
class ValueCheck(Printed):
    """Numbers of an evaluation in parts, beside those of the whole batch.

    Attributes:
        rows: the size of the batch.
        sizes: the sizes of the parts; ``|`` is between ranks.
        ranks: the number of processes.
        whole: the numbers of the whole batch, by name.
        in_parts: those in parts, on rank 0.
        worst: the largest relative difference.
        value: the name of this number.
        limit: the largest difference that rounding explains.
        cause: the mistake that explains the difference; empty if only rounding differs.
        why: a sentence with the numbers that show it.
        remedy: what to write instead.
        note: what this batch cannot show.
    """

    rows: int
    sizes: str
    ranks: int
    whole: dict[str, float]
    in_parts: dict[str, float]
    worst: float
    value: str
    limit: float
    cause: str
    why: str
    remedy: str
    note: str

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
        name = self.value
        lines = [
            f"values of {self.rows} rows as {self.sizes}{ranks}, beside those of the "
            f"whole batch: {verdict}",
            f"  largest relative difference {self.worst:.1e}, in {name} (limit "
            f"{self.limit:.0e}): {self.in_parts[name]:.6g}, whole batch "
            f"{self.whole[name]:.6g}",
        ]
        if not self.passed:
            lines.append(f"  why: {self.cause}. {self.why}")
            lines.append(f"  do:  {self.remedy}")
        elif self.note:
            lines.append(f"  not seen: {self.note}")
        return "\n".join(lines)


def valuecheck(
    evaluate: Evaluate,
    model: nn.Module,
    batch: Any,
    *,
    parts: int = 4,
    ranks: int = 1,
    equal: bool | None = None,
    timeout: float = 60.0,
) -> ValueCheck:
    """Check that the numbers of an evaluation do not depend on how the batch is split.

    Compares ``evaluate(model, [part, part, …])`` with ``evaluate(model, [batch])``.

    Args:
        evaluate: your evaluation of a list of batches. It returns a number, or a dict
            of numbers by name: a loss, an accuracy, a perplexity.
        model: the module, as in ``splitcheck``.
        batch: as in ``splitcheck``.
        parts: batches of each rank.
        ranks: processes that form a gloo group. Each must return the whole number.
        equal: whether all parts have equally many rows; by default the parts have not.
        timeout: seconds after which ranks are killed.
    """
    trial = Trial(
        evaluate,
        model,
        batch,
        parts=parts,
        ranks=ranks,
        equal=equal,
        loss=None,
        seconds=timeout,
        returns_values=True,
    )
    reference, results = trial.compare()
    whole = reference.gradients
    errors = [_largest_error(result.gradients, whole) for result in results]
    worst, name = max(errors)
    cause = Cause()
    if worst > trial.limit:
        cause = _explain(trial, name, whole, [result.gradients for result in results])
    return ValueCheck(
        rows=len(trial.rows),
        sizes=described(trial.split()),
        ranks=ranks,
        whole=_numbers(whole),
        in_parts=_numbers(results[0].gradients),
        worst=worst,
        value=name,
        limit=trial.limit,
        cause=cause.name,
        why=cause.why,
        remedy=cause.remedy,
        note="; ".join([*trial.hidden_terms(), *trial.unseen]),
    )


def _largest_error(actual: Gradients, expected: Gradients) -> tuple[float, str]:
    """The largest relative error of a number, each by itself."""
    errors = []
    for name, value in expected.items():
        error, _ = largest_error({name: actual[name]}, {name: value})
        errors.append((error, name))
    return max(errors)


def _numbers(values: Gradients) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


# --- causes ---

_BY_TERMS = "add up the sums of all parts and their numbers of terms, and divide once."
_DROPPED = "evaluate all batches, also the last one, which may be smaller (drop_last)."
_RATIO = (
    "compute a perplexity, an F-score or another ratio once, from sums over all parts."
)
_RANKS = "reduce sums and numbers of terms over all ranks, and divide on each of them."


def _explain(
    trial: Trial, name: str, whole: Gradients, of_ranks: Sequence[Gradients]
) -> Cause:
    """The usual mistake that explains a wrong number."""
    for values in of_ranks[1:]:
        if differing(values, of_ranks[0], trial.limit):
            why = f"The ranks end with different values of {name}."
            return Cause(CauseKind.RANKS_DIFFER.value, why, _RANKS)
    all_parts = [part for share in trial.split() for part in share]
    of_parts = []
    for part in all_parts:
        result = trial.results([[list(part)]])[0]
        of_parts.append(float(result.gradients[name]))
    ways = _ways_to_combine(trial, all_parts)
    tolerance = trial.limit / 10
    actual = _first_fit(ways, of_parts, float(of_ranks[0][name]), tolerance)
    right = _first_fit(ways, of_parts, float(whole[name]), tolerance)
    if right is None:
        if actual is None:
            why = f"No weights of the values of the parts give {name}."
            return Cause(CauseKind.UNKNOWN.value, why, _RATIO)
        why = (
            f"The evaluation takes {name} as {actual.words} of the parts, and that of "
            f"the whole batch is no mean of them: it is a ratio, a root or an "
            f"exponential."
        )
        return Cause(CauseKind.MEAN_OF_RATIOS.value, why, _RATIO)
    words = "another sum" if actual is None else actual.words
    kind = CauseKind.OTHER_WEIGHTS if actual is None else actual.kind
    why = (
        f"The evaluation takes {name} as {words} of the parts, right is {right.words}."
    )
    is_dropped = kind is CauseKind.ONLY_SOME_PARTS
    return Cause(kind.value, why, _DROPPED if is_dropped else _BY_TERMS)


@dataclass(frozen=True)
class _Way:
    """A way to combine the values of parts: its words, its cause, and the weights."""

    words: str
    kind: CauseKind
    weights: Sequence[float]


def _ways_to_combine(trial: Trial, parts: Sequence[Sequence[int]]) -> list[_Way]:
    """All usual ways: means by each count, equal weights, sums, parts left out."""
    ways = []
    for count in trial.counts:
        terms = [count.of(part) for part in parts]
        words = f"a mean weighted by their {count.words}"
        ways.append(_Way(words, CauseKind.OTHER_WEIGHTS, terms))
        words = f"a mean of all but the last, weighted by their {count.words},"
        ways.append(_Way(words, CauseKind.ONLY_SOME_PARTS, [*terms[:-1], 0]))
    size = len(parts)
    ways.append(_Way("the mean", CauseKind.MEAN_OF_MEANS, [1] * size))
    words = "the mean of all but the last"
    weights = [1] * (size - 1) + [0]
    ways.append(_Way(words, CauseKind.ONLY_SOME_PARTS, weights))
    words = "the last"
    ways.append(_Way(words, CauseKind.ONLY_SOME_PARTS, [0] * (size - 1) + [1]))
    scaled = [_scaled(way) for way in ways]
    return [*scaled, _Way("the sum", CauseKind.SUM_OF_MEANS, [1] * size)]


def _scaled(way: _Way) -> _Way:
    total = sum(way.weights) or 1.0
    return _Way(way.words, way.kind, [weight / total for weight in way.weights])


def _first_fit(
    ways: Sequence[_Way], values: Sequence[float], target: float, tolerance: float
) -> _Way | None:
    """The first way whose sum of the parts' values is the target."""
    for way in ways:
        pairs = zip(way.weights, values, strict=True)
        # A part without terms may be NaN.
        total = sum(weight * value for weight, value in pairs if weight)
        if math.isclose(total, target, rel_tol=tolerance, abs_tol=_SMALLEST):
            return way
    return None
