"""The questions that ``splitcheck`` can answer of its results.

A yes shows the cause, with one or several further runs of the step. The list of all
causes is ``causes/evidence.py``; the words of those that are found are in
``cause_words.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from scatterpar.causes.cause_list import other_weights
from scatterpar.causes.counts import Count
from scatterpar.causes.evidence import CLOSE, CauseKind, Finding, Growth, Question
from scatterpar.causes.vectors import factor_between, is_close
from scatterpar.splitting.gradients import is_zero, joined, union
from scatterpar.splitting.split_results import SplitResults
from scatterpar.splitting.trial import Trial

_UNITS = (2, 3)  # numbers of parts or ranks, to see how a difference grows
_NUM_GROUPS = 2
_LEAST_NUMBERS = 3  # of a gradient that is a multiple of another one


def questions_of(results: SplitResults) -> Mapping[CauseKind, Question]:
    """The causes that can be asked for."""
    questions: dict[CauseKind, Question] = {
        CauseKind.NOT_FINITE: is_not_finite,
        CauseKind.WRONG_WITH_ONE_PART: is_wrong_with_one_part,
        CauseKind.RANKS_DIFFER: differing_ranks,
        CauseKind.CONSTANT_FACTOR: factor_or_weights,
        CauseKind.ONCE_PER_PART: once_per_part,
        CauseKind.OTHER_WEIGHTS: factor_or_weights_of_one,
        CauseKind.MEAN_OF_MEANS: mean_of_means_in_a_term,
    }
    # With moved weights, order and rows matter in any loop.
    if not results.moves_weights:
        questions[CauseKind.STATE_BETWEEN_PARTS] = depends_on_earlier_parts
        questions[CauseKind.ROWS_ARE_COMPARED] = do_rows_meet
    return questions


def is_not_finite(results: SplitResults) -> bool:
    """Whether the gradient of the whole batch or that in parts has NaN."""
    numbers = torch.cat([joined(results.expected), joined(results.actual)])
    return not bool(numbers.isfinite().all())


def is_wrong_with_one_part(results: SplitResults) -> bool:
    """With ``loss=``: whether the step is wrong for a single part, too."""
    if not results.trial.arguments.loss:
        return False
    return bool(results.trial.differing(results.with_one_part, results.expected))


def differing_ranks(results: SplitResults) -> Finding | None:
    """The parameters whose gradients differ between ranks."""
    trial = results.trial
    names = union(trial.differing(rank, results.actual) for rank in results.others)
    return Finding(CauseKind.RANKS_DIFFER, names) if names else None


def factor_or_weights(results: SplitResults) -> Finding | None:
    """The one factor, or the weights of the parts, that explain what is wrong."""
    # One of several losses reaches some parameters alone.
    return _first_in(results, [results.names, results.wrong])


def factor_or_weights_of_one(results: SplitResults) -> Finding | None:
    """A factor or weights that explain one of the wrong parameters."""
    return _first_in(results, [[name] for name in results.wrong])


def _first_in(results: SplitResults, scopes: Sequence[Sequence[str]]) -> Finding | None:
    for names in scopes:
        # One number says more than as many weights as there are parts.
        finding = constant_factor(results, names) or other_weights(results, names)
        if finding is not None:
            return finding
    return None


def constant_factor(results: SplitResults, names: Sequence[str]) -> Finding | None:
    """The one number that the right gradient is multiplied by, if there is one."""
    actual = joined(results.actual, names)
    expected = joined(results.expected, names)
    factor = factor_between(actual, expected, results.tolerance)
    if factor is None or math.isclose(factor, 1, rel_tol=results.tolerance):
        return None
    # Any two numbers are multiples of each other, and zero is of all.
    is_any = (actual.abs() + expected.abs()).count_nonzero() < _LEAST_NUMBERS
    if is_any and not results.gets_whole_loss(factor):
        return None
    # A factor of zero has remedies of its own: something is detached.
    kind = CauseKind.CONSTANT_FACTOR if factor else CauseKind.NO_GRADIENT
    return Finding(kind, names, factor=factor)


def depends_on_earlier_parts(results: SplitResults) -> bool:
    """Whether the parts of each rank in reverse order give another gradient."""
    # Sums do not depend on the order, what one part leaves for the next does.
    backwards = [share[::-1] for share in results.trial.split()]
    gradients = results.trial.runs.gradients_of(backwards)
    return bool(results.trial.differing(gradients, results.actual))


def once_per_part(results: SplitResults) -> Finding | None:
    """A term of the loss counts in each part, or on each rank."""
    for growth in growths(results):
        if growth.is_of_a_term:
            return Finding(CauseKind.ONCE_PER_PART, growth=growth)
    return None


def growths(results: SplitResults) -> list[Growth]:
    """How the difference grows from two parts to three, and from two ranks.

    A term that counts in each part grows two-fold: once too often, then twice. With
    ranks, it may count in each part of all ranks, too: from 2 ranks of 3 parts to 3
    ranks, it grows from 5 times too often to 8 times.
    """
    ranks, parts = results.trial.ranks, results.trial.num_parts
    by_unit: list[Growth] = []
    if ranks > 1:
        by_unit += _growth(results, "rank", parts)
    if parts > 1:
        by_unit += _growth(results, "part", ranks)
    return by_unit


def _growth(results: SplitResults, unit: str, others: int) -> list[Growth]:
    """The growth from two parts to three, with what a term may make of it.

    The parts are alike, so that the term is. Empty for too few
    rows. ``others`` is the number of ranks for parts, and of parts for ranks.
    """
    trial = results.trial
    # Both splits must cut the same rows without a rest.
    multiple = math.prod(_UNITS) * others
    rows = trial.rows[: len(trial.rows) // multiple * multiple]
    if not rows:
        return []
    two, three = [_difference_of_units(trial, rows, unit, n, others) for n in _UNITS]
    # Without a difference both are not a number, which no growth is.
    factor = float(three.norm() / two.norm())
    cosine = float(torch.cosine_similarity(two, three, dim=0))
    return [
        Growth(unit, factor, (3 * times - 1) / (2 * times - 1), cosine)
        for times in {1, others}
    ]


def _difference_of_units(
    trial: Trial, rows: Sequence[int], unit: str, number: int, others: int
) -> Tensor:
    """The gradient of ``number`` equal units, minus that of the whole batch."""
    ranks, parts = (number, others) if unit == "rank" else (others, number)
    # Dealt like cards, so that each part has rows of all kinds.
    dealt = [row for start in range(number) for row in rows[start::number]]
    actual = trial.runs.gradients_of(trial.cut(dealt, ranks, parts, equal=True))
    return joined(actual) - joined(trial.runs.reference(rows).gradients)


def mean_of_means_in_a_term(results: SplitResults) -> Finding | None:
    """The count whose equal rows are treated right, though others are not.

    A loss that compares rows is wrong for rows with equal counts, too.
    """
    for count in results.counts:
        if count.is_constant:
            continue
        groups = _groups_with_equal(results, count)
        if groups and all(_is_right_in_parts(results, rows) for rows in groups):
            return Finding(CauseKind.MEAN_OF_MEANS, count=count)
    return None


def _groups_with_equal(results: SplitResults, count: Count) -> list[list[int]]:
    """The largest groups of rows with equally many terms, for two parts or more.

    Two groups, because one of few rows may be right by chance.
    """
    by_terms: dict[float, list[int]] = {}
    for row in results.trial.rows:
        by_terms.setdefault(count.per_row[row], []).append(row)
    # A part for each rank, because a rank without rows could not take part.
    num_parts = max(2, results.trial.ranks)
    by_terms.pop(0, None)  # rows without terms show nothing
    groups = sorted(by_terms.values(), key=len, reverse=True)[:_NUM_GROUPS]
    in_parts = [rows[: len(rows) // num_parts * num_parts] for rows in groups]
    return [rows for rows in in_parts if rows]


def _is_right_in_parts(results: SplitResults, rows: list[int]) -> bool:
    trial = results.trial
    # As few runs as show it, because each may start processes: two parts, or a
    # part for each rank.
    parts = 2 if trial.ranks == 1 else 1
    actual = trial.runs.gradients_of(trial.cut(rows, trial.ranks, parts, equal=True))
    expected = trial.runs.reference(rows).gradients
    # A ratio, such as Dice, may have no gradient for rows of one class.
    return not (is_zero(expected) or trial.differing(actual, expected))


def do_rows_meet(results: SplitResults) -> bool:
    """Whether no weights of the parts' gradients make up that of the batch.

    Also if the weights of the loop and of the batch are the same, and still the
    gradients differ: rows are tied to each other a little.
    """
    right = results.weights_for(results.expected, results.names)
    if right is not None:
        computed = results.weights_for(results.actual, results.names)
        return computed is not None and is_close(computed, right, CLOSE)
    # Fewer numbers than twice the parts could be explained by any weights.
    num_numbers = len(joined(results.expected))
    return not results.is_undefined and num_numbers >= 2 * len(results.parts)


def first_meeting(trial: Trial) -> str:
    """The first module whose outputs for some rows depend on the other rows.

    Empty if there is none.
    """
    first_part = trial.split()[0][0]
    of_all = trial.runs.reference(trial.rows, watch_modules=True).outputs
    of_part = trial.runs.reference(first_part, watch_modules=True).outputs
    size = len(first_part)
    for name, expected in of_all.items():
        # The first entries are of the first rows, also of several views: each view
        # behind the other, or row by row.
        of_first_rows = expected[:size]
        actual = of_part.get(name, expected)[:size]
        has_rows = actual.shape == of_first_rows.shape
        if has_rows and not is_close(actual, of_first_rows, trial.limit):
            return name
    return ""
