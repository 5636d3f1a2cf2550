"""Which of the candidates of a call tells how losses of its parts combine.

::

    candidates      labels  rows    a sum     ways in which the losses may combine
    look 1          fits    fits    refuted   no label is ignored: two are left, and
                                              give the same
    look 2          1e-7    2e-3    –         within rounding both: ``labels`` has shown
                                              how far rounding goes, and ``rows`` is off
                                              by more
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from scatterpar.batch.batch import batch_of
from scatterpar.numerics.comparison import Inconclusive, NoTerms
from scatterpar.step.loss_weights import is_smoothed, term_counts
from scatterpar.step.request import LossCandidate, Request
from scatterpar.verify.rows import Parts, positions_of

# The last digits of a weight depend on the order of a sum.
_DIGITS = 9  # of weights that are compared
# The candidate that holds has no more than the rounding of the look, which the best one
# shows. That may be less by luck, but not in all gradients.
_TIMES_BEST = 10.0
_LEAST_ROUNDINGS = 16  # of the look's format: the best one may be zero


@dataclass(frozen=True)
class CandidateFit:
    """A candidate that a look has not refused.

    Attributes:
        candidate: the way in which losses may combine.
        misfit: the relative difference that it leaves; infinite if another reason than
            rounding explains a difference.
        eps: that of the coarsest format of the look.
    """

    candidate: LossCandidate
    misfit: float
    eps: float


def best_fits(fits: Sequence[CandidateFit]) -> list[LossCandidate]:
    """The candidates that the rounding of the best one leaves, the best first.

    Without a measure all are left, in their order.
    """
    by_misfit = sorted(fits, key=lambda fit: fit.misfit)
    best = by_misfit[0]
    candidates: list[LossCandidate] = []
    for fit in by_misfit:
        rounding = max(best.misfit, _LEAST_ROUNDINGS * max(best.eps, fit.eps))
        if fit.misfit <= _TIMES_BEST * rounding:
            candidates.append(fit.candidate)
    return candidates


def alike(
    request: Request, parts: Parts, candidates: Sequence[LossCandidate]
) -> list[LossCandidate]:
    """The first candidate, and those that combine ``parts`` of rows in the same way.

    If the parts are those of a look, it has not told these candidates apart. If they
    are the micro-batches of a step, it does not matter there which one holds.
    """
    if len(candidates) < 2:  # counts are the user's, and may keep what they see
        return [*candidates]
    first, *_ = ways = [
        _combination(request, parts, candidate) for candidate in candidates
    ]
    pairs = zip(candidates, ways, strict=True)
    return [candidate for candidate, way in pairs if way == first]


def _combination(request: Request, parts: Parts, candidate: LossCandidate) -> object:
    """How a candidate divides and weighs parts of rows; no weights if it cannot."""
    try:
        divided, weights = weighted_parts(request.combined_by(candidate), parts)
    except Inconclusive:
        return None
    return divided, [round(weight, _DIGITS) for weight in weights]


def candidate_of(request: Request) -> LossCandidate:
    """How the arguments of a step say that losses combine."""
    words = "a sum"
    if request.is_mean:
        terms = "rows" if request.count is None else "what count= gives"
        words = f"a mean over {terms}"
    return LossCandidate(words, request.reduction, request.count)


def weighted_parts(request: Request, parts: Parts) -> tuple[Parts, Sequence[float]]:
    """The parts, and the factors by which the engine would multiply their losses.

    Raises:
        Inconclusive: no row has a term.
    """
    if not request.is_mean:  # with whole_batch, too
        return parts, [1.0] * len(parts)
    spans = [(rows.start, rows.stop) for rows in positions_of(parts)]
    (batch,) = request.batches
    # Terms are counted in the pieces, since these rows are no slices of the batch.
    pieces = [batch.select(part).unwrapped() for part in parts]
    no_batch = batch_of(None, None, request.rows, request.dim)
    terms = term_counts(replace(request, batches=[no_batch]), spans, pieces)
    total = sum(terms)
    if not total:
        raise NoTerms("none of the rows adds anything")
    if is_smoothed(request) and 0.0 in terms:
        # They have a loss, but not by themselves: its mean is over no terms.
        return [list(chain(*parts))], [1.0]
    return parts, [count / total for count in terms]
