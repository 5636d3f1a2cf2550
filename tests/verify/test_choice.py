"""Candidates: which ones combine parts alike, and the weights of parts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from scatterpar.batch.batch import batch_of
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.step.request import LossCandidate, Request
from scatterpar.verify.choice import CandidateFit, alike, best_fits, weighted_parts

MIXED = torch.tensor([0, -100, 1, -100, 1])


def request(criterion=None, **options):
    return Request([batch_of(MIXED, MIXED, 5, 0)], 0, criterion, **options)


def num_labels(inputs, targets):
    return (targets != -100).sum()


def test_parts_of_mean_weighted_by_rows():
    parts = [[0, 1, 2], [3, 4]]
    assert weighted_parts(request(), parts) == (parts, [3 / 5, 2 / 5])
    assert weighted_parts(request(reduction="sum"), parts) == (parts, [1.0, 1.0])


def test_cross_entropy_counts_its_labels():
    parts = [[0, 1, 2], [3, 4]]
    assert weighted_parts(request(nn.CrossEntropyLoss()), parts) == (
        parts,
        [2 / 3, 1 / 3],
    )


def test_count_gets_copies_of_the_rows_of_parts():
    pieces = []

    def count(inputs, targets):
        pieces.append((inputs, targets))
        return len(targets)

    parts = [[0, 2], [4]]
    assert weighted_parts(request(count=count), parts) == (parts, [2 / 3, 1 / 3])
    assert [targets.tolist() for _, targets in pieces] == [[0, 1], [1]]
    pieces[0][0].zero_()
    assert MIXED.tolist() == [0, -100, 1, -100, 1]


def test_rows_without_labels_inconclusive():
    with pytest.raises(Inconclusive, match="none of the rows adds anything"):
        weighted_parts(request(count=num_labels), [[1], [3]])


def test_candidates_with_equal_weights_are_alike():
    by_rows = LossCandidate("a mean over rows")
    by_labels = LossCandidate("a mean over labels", count=num_labels)
    a_sum = LossCandidate("a sum", "sum")
    candidates = [by_rows, by_labels, a_sum]
    assert alike(request(), [[0, 1], [2, 3]], candidates) == [by_rows, by_labels]
    assert alike(request(), [[0, 1], [2, 4]], candidates) == [by_rows]


@pytest.mark.parametrize(
    ("misfits", "left"),
    [
        ([2e-3, 1e-7], ["labels"]),  # rounding is what the best one shows
        ([3e-7, 1e-7], ["labels", "rows"]),
        ([1e-7, 1e-7], ["rows", "labels"]),
        ([1e-7, 0.0], ["labels", "rows"]),  # a best one by luck
        ([0.2, 0.01], ["labels"]),
        ([0.05, 0.01], ["labels", "rows"]),
        ([math.inf, 1e-7], ["labels"]),
        ([math.inf, math.inf], ["rows", "labels"]),  # state, or draws
    ],
)
def test_rounding_of_the_best_one_refutes_others(misfits, left):
    eps = torch.finfo(torch.float32).eps
    candidates = [LossCandidate("rows"), LossCandidate("labels")]
    fits = [CandidateFit(*pair, eps) for pair in zip(candidates, misfits, strict=True)]
    assert [candidate.words for candidate in best_fits(fits)] == left
