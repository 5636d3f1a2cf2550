"""What factors and weights mean, and the order of the hypotheses.

Whole loops are in ``test_check.py``.
"""

from __future__ import annotations

import pytest
import torch
from harness.oracle import seeded
from torch import nn

from scatterpar import splitcheck
from scatterpar.splitting import causes

ROWS = torch.eye(4).repeat(2, 1)[:6] * torch.tensor([6.0, 5, 4, 3, 2, 1])[:, None]


def linear():
    with seeded():
        return nn.Linear(4, 1, bias=False)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1 / 2, "divided by the number of ranks once too often"),
        (1 / 4, "divided by the number of ranks twice too often"),
        (2, "added over the ranks, not averaged"),
        (1 / 3, "divided by the number of parts once too often"),
        (3, "not divided by the number of parts"),
        (1 / 6, "divided by ranks and parts once too often"),
        (6, "divided by neither ranks nor parts"),
        (5, ""),
    ],
)
def test_factors_of_ranks_and_parts_named(factor, words):
    meaning, remedy = causes._meaning(factor, ranks=2, parts=3)
    assert meaning.removeprefix(": ") == words
    assert remedy.endswith(".")


def test_one_rank_explains_no_factor():
    assert causes._meaning(1, ranks=1, parts=2)[0] == ""


def test_all_readings_of_a_factor_are_listed():
    meaning, remedy = causes._meaning(1 / 4, ranks=2, parts=2)
    assert "number of ranks twice too often, or " in meaning
    assert meaning.endswith("divided by ranks and parts once too often")
    meaning, remedy = causes._meaning(2, ranks=2, parts=2)
    assert "added over the ranks" in meaning
    assert "not divided by the number of parts" in meaning
    assert " Or divide each loss by len(batches)" in remedy


@pytest.mark.parametrize(
    ("weights", "ranks", "ratio"),
    [
        ([1 / 8, 1 / 4, 1 / 2, 1], 1, 0.5),  # halved after each part
        ([1 / 2, 1, 1 / 4, 1 / 2], 2, 0.5),
        ([1 / 2, 1, 1 / 4, 1 / 2], 1, None),
        ([1, 1, 1], 1, None),
        ([1 / 2, 1], 1, None),  # any two weights have a ratio
    ],
)
def test_ratio_of_neighbouring_weights(weights, ranks, ratio):
    found = causes._ratio_of_neighbours(torch.tensor(weights), ranks)
    assert found == (None if ratio is None else pytest.approx(ratio))


def test_three_names_listed_others_counted():
    assert causes._listed(["a", "b", "c"]) == "a, b, c"
    assert causes._listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def penalty_in_each_part(model, batches):
    for batch in batches:
        (model(batch).sum() + 100 * model.weight.sum()).backward()


def first_part_only(model, batches):
    model(batches[0]).mean().backward()


def not_a_number_in_parts(model, batches):
    for batch in batches:
        (model(batch).sum() / (len(batch) == 6)).backward()


def mean_of_means(model, batches):
    for batch in batches:
        (model(batch).mean() / len(batches)).backward()


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (not_a_number_in_parts, "not finite"),
        (first_part_only, "only some parts"),
        (penalty_in_each_part, "once per part"),
        (mean_of_means, "mean of means"),
    ],
)
def test_first_fitting_hypothesis_is_cause(step, name):
    assert splitcheck(step, linear(), ROWS, parts=2).cause == name


def with_norm():
    with seeded():
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_batch_norm_alone_is_the_cause():
    def step(model, batches):
        rows = sum(len(batch) for batch in batches)
        for batch in batches:
            (model(batch).square().sum() / rows).backward()

    report = splitcheck(step, with_norm(), ROWS, parts=2)
    assert report.cause == "batch normalisation"


def test_mistake_found_beside_batch_norm():
    def step(model, batches):
        for batch in batches:
            (model(batch).square().mean() / len(batches)).backward()

    report = splitcheck(step, with_norm(), ROWS, parts=2)
    assert report.cause == "mean of means"
    assert report.why.startswith("Also with the running statistics")
