"""``valuecheck``: numbers of an evaluation in parts beside those of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from scatterpar.causes.evidence import CauseKind
from scatterpar.splitting.check_report import Cause, SplitReport
from scatterpar.splitting.gradients import Gradients, differing
from scatterpar.splitting.split_arguments import SplitArguments
from scatterpar.splitting.trial import Trial

Evaluate = Callable[[Any, list[Any]], "float | Mapping[str, Any]"]

_SMALLEST = 1e-12  # a value of zero has no relative error


@dataclass(frozen=True)
class ValueCheck(SplitReport):
    """Numbers of an evaluation in parts, beside those of the whole batch.

    It has the attributes of ``SplitReport``, too.

    Attributes:
        value: the name of the number with the largest difference.
        whole: the numbers of the whole batch, by name.
        in_parts: those in parts, on rank 0.
    """

    value: str
    whole: dict[str, float]
    in_parts: dict[str, float]

    def __str__(self) -> str:
        """The verdict, the numbers, the reason, and the remedy: a line each."""
        name = self.value
        numbers = (
            f"{name} (limit {self.limit:.0e}): {self.in_parts[name]:.6g}, whole batch "
            f"{self.whole[name]:.6g}"
        )
        return self._in_lines("values", numbers)


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
    arguments = SplitArguments(
        evaluate,
        model,
        batch,
        parts=parts,
        ranks=ranks,
        equal=equal,
        timeout=timeout,
        returns_values=True,
    )
    trial = Trial(arguments)
    reference, results = trial.compare()
    whole = reference.gradients
    worst, name = trial.worst_error(results, whole)
    cause = Cause()
    if worst > trial.limit:
        cause = _explain(trial, name, whole, [result.gradients for result in results])
    return ValueCheck(
        **trial.report([reference, *results], worst, cause),
        value=name,
        whole=_numbers(whole),
        in_parts=_numbers(results[0].gradients),
    )


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
    parts = [part for share in trial.split() for part in share]
    # Each part by itself, as an evaluation of a smaller set.
    of_parts = [float(trial.gradients_of([[part]])[name]) for part in parts]
    ways = _ways_to_combine(trial, parts)
    # Stricter than the verdict: many ways are tried, and one may fit by chance.
    tolerance = trial.limit / 10
    actual = _first_fit(ways, of_parts, float(of_ranks[0][name]), tolerance)
    right = _first_fit(ways, of_parts, float(whole[name]), tolerance)
    kind = CauseKind.OTHER_WEIGHTS if actual is None else actual.kind
    words = "another sum" if actual is None else actual.words
    why = f"The evaluation takes {name} as {words} of the parts"
    if right is not None:
        is_dropped = kind is CauseKind.ONLY_SOME_PARTS
        remedy = _DROPPED if is_dropped else _BY_TERMS
        return Cause(kind.value, f"{why}, right is {right.words}.", remedy)
    kind = CauseKind.UNKNOWN if actual is None else CauseKind.MEAN_OF_RATIOS
    why += (
        ", and that of the whole batch is no mean of them: it is a ratio, a root or an "
        "exponential."
    )
    return Cause(kind.value, why, _RATIO)


@dataclass(frozen=True)
class _Way:
    """A way to combine the values of parts: its words, its cause, and the weights."""

    words: str
    kind: CauseKind
    weights: Sequence[float]


def _ways_to_combine(trial: Trial, parts: Sequence[Sequence[int]]) -> list[_Way]:
    """All usual ways: means by each count, equal weights, sums, parts left out."""
    ones = [1.0] * len(parts)
    ways: list[_Way] = []
    for count in trial.counts:
        words = f"a mean weighted by their {count.words}"
        terms = [count.of(part) for part in parts]
        ways += _means(words, CauseKind.OTHER_WEIGHTS, terms)
    # After the counts: for equal parts, a mean by rows says more than a mean.
    ways += _means("a mean", CauseKind.MEAN_OF_MEANS, ones)
    last = [*[0.0] * (len(parts) - 1), 1.0]
    ways.append(_Way("the last", CauseKind.ONLY_SOME_PARTS, last))
    ways.append(_Way("the sum", CauseKind.SUM_OF_MEANS, ones))
    return ways


def _means(words: str, kind: CauseKind, terms: Sequence[float]) -> Iterator[_Way]:
    """Yield the mean of all parts, and that of all but the last."""
    yield _Way(words, kind, _divided(terms))
    without_last = _divided([*terms[:-1], 0.0])
    words += ", without the last,"
    yield _Way(words, CauseKind.ONLY_SOME_PARTS, without_last)


def _divided(terms: Sequence[float]) -> list[float]:
    total = sum(terms) or 1.0  # of a count that no row has
    return [number / total for number in terms]


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
