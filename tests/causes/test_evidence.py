"""Which count the weights of parts are proportional to."""

from __future__ import annotations

import torch

from scatterpar.causes.counts import Count
from scatterpar.causes.evidence import SplitEvidence


class Counted(SplitEvidence):
    parts = ((0, 1, 2, 3), (4, 5))
    counts = (
        Count("rows", "", (1,) * 6),
        Count("labels", "batch", (1, 0, 0, 0, 1, 1)),
    )


def test_weights_are_named_by_first_count():
    evidence = Counted()
    rows, labels = evidence.counts
    assert evidence.counted_as(torch.tensor([4.0, 2.0])) is rows
    assert evidence.counted_as(torch.tensor([0.5, 1.0])) is labels
    assert evidence.counted_as(torch.tensor([1.0, 1.0])) is None
    assert evidence.counted_as(torch.tensor([0.0, 0.0])) is None


def test_evidence_without_answers_has_none():
    evidence = SplitEvidence()
    assert not evidence.questions()
    assert evidence.weights(()) is evidence.factor(()) is None
    assert not evidence.growths()
