"""The first cause that fits, and what weights of parts mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from scatterpar.causes.evidence import (
    CLOSE,
    CauseKind,
    Finding,
    Question,
    SplitEvidence,
)
from scatterpar.causes.vectors import is_close


def first_finding(
    evidence: SplitEvidence, questions: Mapping[CauseKind, Question]
) -> tuple[Finding, list[Exception]]:
    """The first cause that fits, and the errors of causes that were passed over.

    ``questions`` are those that the asker can answer.
    """
    failures = []
    for kind in CauseKind:
        if kind not in questions:  # nobody can tell
            continue
        try:
            answer = questions[kind](evidence)
        # A cause that cannot be tested says nothing of the later ones.
        except evidence.passed_over as error:  # of the user's code, in another split
            failures.append(error)
            continue
        if answer:
            finding = answer if isinstance(answer, Finding) else Finding(kind)
            return finding, failures
    return Finding(CauseKind.UNKNOWN), failures


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
