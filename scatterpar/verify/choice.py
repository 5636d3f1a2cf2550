"""Which of the candidates of a loop tells how losses of micro-batches combine.

::

    candidates      labels  rows  a sum     ways in which the losses may combine
    look 1          fits    fits  refuted   rows of equal lengths: two are left, and the
                                            first one is assumed
    look 2          refuted fits            rows that differ: it is settled
"""

from __future__ import annotations

from collections.abc import Sequence

from scatterpar.step.request import LossCandidate, Request
from scatterpar.verify.comparison import Inconclusive
from scatterpar.verify.look_losses import weighted_parts
from scatterpar.verify.rows import Parts

# The last digits of a weight depend on the order of a sum.
_DIGITS = 9  # of weights that are compared


class Choice:
    """The candidates of one loop that looks have not refuted."""

    def __init__(self) -> None:
        # Their words, because a loop makes new candidates in each step.
        self._words: list[str] = []

    def remaining(self, candidates: Sequence[LossCandidate]) -> list[LossCandidate]:
        """Those of ``candidates`` that no look has refuted; the first is assumed."""
        known = [entry for entry in candidates if entry.words in self._words]
        # A look may have moved another candidate to the front.
        known.sort(key=lambda candidate: self._words.index(candidate.words))
        # None is known before the first look, and in a loop with other candidates.
        return known or list(candidates)

    def keep(self, candidates: Sequence[LossCandidate]) -> None:
        """All other candidates are refuted. The first of ``candidates`` is assumed."""
        self._words = [candidate.words for candidate in candidates]


def alike(
    request: Request, parts: Parts, candidates: Sequence[LossCandidate]
) -> list[LossCandidate]:
    """The first candidate, and those that combine ``parts`` of rows in the same way.

    If the parts are those of a look, it has not told these candidates apart. If they
    are the micro-batches of a step, it does not matter there which one holds.
    """
    first = candidates[0]
    expected = _combination(request, parts, first)
    candidates_alike = [first]
    for candidate in candidates[1:]:
        if not _has_same_entries(first, candidate):
            continue
        if _combination(request, parts, candidate) == expected:
            candidates_alike.append(candidate)
    return candidates_alike


def _has_same_entries(first: LossCandidate, candidate: LossCandidate) -> bool:
    entries = first.entries.items()
    return all(candidate.entries.get(name) is value for name, value in entries)


def _combination(request: Request, parts: Parts, candidate: LossCandidate) -> object:
    """How a candidate divides and weighs parts of rows; ``None`` if it cannot."""
    try:
        divided, weights = weighted_parts(request.combined_by(candidate), parts)
    except Inconclusive:
        return None
    return divided, [round(weight, _DIGITS) for weight in weights]
