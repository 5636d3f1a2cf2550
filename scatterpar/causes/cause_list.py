"""The causes, in the order in which they are tested. The first that fits counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scatterpar.causes.evidence import CLOSE, CauseKind, Finding, SplitEvidence
from scatterpar.causes.vectors import is_close

_ALIKE = 0.9  # the cosine of two differences that have one reason
_ROUGHLY = 0.15  # how far a growth may be from that of a term per part, relatively
_SAME_GROWTH = 0.05  # two growths that cannot be told apart


def ranks_differ(evidence: SplitEvidence) -> Finding | None:
    """Processes end with different results."""
    names = evidence.differing_ranks()
    return Finding(CauseKind.RANKS_DIFFER, names) if names else None


def factor_or_weights(evidence: SplitEvidence) -> Finding | None:
    """In all results, or in all that are wrong."""
    return _first_in(evidence, evidence.scopes())


def one_result(evidence: SplitEvidence) -> Finding | None:
    """One of several losses is wrong: it shows in the results that only it reaches."""
    return _first_in(evidence, evidence.single_scopes())


def once_per_part(evidence: SplitEvidence) -> Finding | None:
    """A term of the loss counts in each part."""
    for growth in evidence.growths():
        # Without growth any difference would fit.
        is_flat = math.isclose(growth.expected, 1, abs_tol=_SAME_GROWTH)
        is_expected = math.isclose(growth.factor, growth.expected, rel_tol=_ROUGHLY)
        # The same direction, because any difference may grow as fast by chance.
        if is_expected and not is_flat and growth.cosine >= _ALIKE:
            return Finding(CauseKind.ONCE_PER_PART, growth=growth)
    return None


def mean_of_means_in_a_term(evidence: SplitEvidence) -> Finding | None:
    """One of several terms is a mean of means; the others are right."""
    count = evidence.count_that_decides()
    return None if count is None else Finding(CauseKind.MEAN_OF_MEANS, count=count)


CauseFunction = Callable[[SplitEvidence], Finding | None]
CAUSES: Sequence[CauseKind | CauseFunction] = (
    # The asker answers the question of a kind by yes or no; a function tests figures.
    # First: nothing can be compared with NaN.
    CauseKind.NOT_FINITE,
    # Before all others, because they compare results.
    CauseKind.UNREPEATABLE,
    # Before rounding, because this gradient is exact, however small it is.
    CauseKind.GRADIENT_OF_NO_LOSS,
    # From here on all compare with the limit that rounding explains.
    CauseKind.ROUNDING,
    # No split explains the next two.
    CauseKind.WRONG_WITH_ONE_PART,
    ranks_differ,
    # The result is right if all parts draw the same numbers.
    CauseKind.NUMBERS_PER_PART,
    # Weights before state, because a running sum of losses is both. They need no other
    # split, so they are also the cheaper question.
    factor_or_weights,
    # Before a term per part, because a single number may grow as fast by chance.
    CauseKind.MEAN_OF_RATIOS,
    CauseKind.STATE_BETWEEN_PARTS,
    once_per_part,
    # A single result comes after all of them, because it may fit by chance.
    one_result,
    mean_of_means_in_a_term,
    # No weights make up the whole batch: why they do not.
    CauseKind.ROWS_ARE_COMPARED,
    CauseKind.OUTPUTS_OF_A_PART,
    CauseKind.SHAPES_BROADCAST,
)


def first_finding(evidence: SplitEvidence) -> tuple[Finding, list[Exception]]:
    """The first cause that fits, and the errors of causes that were passed over."""
    failures = []
    for cause in CAUSES:
        try:
            finding = _finding_of(cause, evidence)
        # A cause that cannot be tested says nothing of the later ones.
        except evidence.passed_over as error:  # of the user's code, in another split
            failures.append(error)
            continue
        if finding is not None:
            return finding, failures
    return Finding(CauseKind.UNKNOWN), failures


def _finding_of(
    cause: CauseKind | CauseFunction, evidence: SplitEvidence
) -> Finding | None:
    """The finding of one cause; ``None`` if it does not fit, or nobody can tell."""
    if not isinstance(cause, CauseKind):
        return cause(evidence)
    question = evidence.questions().get(cause)
    return Finding(cause) if question is not None and question() else None


def _first_in(
    evidence: SplitEvidence, scopes: Sequence[Sequence[str]]
) -> Finding | None:
    for names in scopes:
        # One number says more than as many weights as there are parts.
        finding = constant_factor(evidence, names) or other_weights(evidence, names)
        if finding is not None:
            return finding
    return None


def constant_factor(evidence: SplitEvidence, names: Sequence[str]) -> Finding | None:
    """The results with these names are a multiple of the right ones, or zero."""
    factor = evidence.factor(names)
    if factor is None or math.isclose(factor, 1, rel_tol=evidence.tolerance):
        return None
    # A factor of zero has remedies of its own: something is detached.
    kind = CauseKind.CONSTANT_FACTOR if factor else CauseKind.NO_GRADIENT
    return Finding(kind, names, factor=factor)


def other_weights(evidence: SplitEvidence, names: Sequence[str]) -> Finding | None:
    """The results are those of the parts, with other weights than right."""
    weights = evidence.weights(names)
    if weights is None:
        return None
    if is_close(weights.computed, weights.right, evidence.weight_error):
        return None
    # Not those of a part without labels.
    has_terms = weights.right.abs() > CLOSE * weights.right.abs().max()
    kind = kind_of_weights(
        weights.computed[has_terms], weights.right[has_terms], len(evidence.parts)
    )
    return Finding(kind, names, weights=weights)


def kind_of_weights(computed: Tensor, right: Tensor, num_parts: int) -> CauseKind:
    """The kind of the weights of parts with terms, among ``num_parts``."""
    size = len(computed)
    # First: weights of zero would divide the running sum below.
    if computed.abs().min() < CLOSE * computed.abs().max():
        return CauseKind.ONLY_SOME_PARTS
    # A loop divides by the parts that it has read, or by those that had labels.
    for divisor in (size, num_parts):
        if is_close(computed, torch.full_like(computed, 1 / divisor), CLOSE):
            return CauseKind.MEAN_OF_MEANS
    if is_close(computed, torch.ones_like(computed), CLOSE):
        return CauseKind.SUM_OF_MEANS
    times = torch.arange(size, 0, -1, dtype=computed.dtype)  # that a part is added
    # The running sum is of losses that have their weights, or of plain means.
    for weights in (computed, computed / right):
        if size > 1 and is_close(weights / weights[-1], times, CLOSE):
            return CauseKind.RUNNING_SUM
    return CauseKind.OTHER_WEIGHTS
