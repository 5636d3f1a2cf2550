"""What the splits of a batch give, on which causes are asked for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from splitting.linear_trials import (
    OF_PARTS,
    SUM,
    mean_of_means,
    results_of,
    sum_of_sums,
)

from scatterpar.splitting.split_results import split_results
from scatterpar.splitting.trial import Comparison


def test_part_has_gradient_of_its_rows():
    results = results_of(sum_of_sums)
    assert results.parts == [[0, 1, 2, 3], [4, 5]]
    assert results.expected["weight"].tolist() == [SUM]
    of_parts = [gradients["weight"].tolist() for gradients in results.of_parts]
    assert of_parts == [[row] for row in OF_PARTS]
    assert results.wrong == []


def test_mean_of_means_weighs_parts_alike():
    results = results_of(mean_of_means)
    of_loop, of_batch = results.weights(["weight"])
    torch.testing.assert_close(of_loop, torch.tensor([0.5, 0.5]).double())
    torch.testing.assert_close(of_batch, torch.tensor([4 / 6, 2 / 6]).double())
    assert results.counted_as(of_batch).words == "rows"
    assert results.counted_as(of_loop) is None
    assert results.wrong == results.names == ["weight"]
    assert results.is_everything(results.wrong)  # there is no other parameter


def test_part_that_is_nan_counts_as_nothing():
    """A mean over the numbers above 2.5, of which the second part has none."""

    def step(model, batches):
        for batch in batches:
            large = batch.amax(1) > 2.5
            ((model(batch)[:, 0] * large).sum() / large.sum()).backward()

    results = results_of(step)
    first, second = (gradients["weight"][0].tolist() for gradients in results.of_parts)
    assert first == [6 / 4, 5 / 4, 1, 3 / 4]
    assert second == [0, 0, 0, 0]
    assert results.is_undefined


@pytest.mark.parametrize(
    ("worst", "limit", "tolerance"),
    [(1e-1, 1e-9, 1e-4), (1e-3, 1e-9, 1e-5), (1e-3, 1e-2, 1e-2)],
)
def test_explanation_leaves_little_of_the_difference(worst, limit, tolerance):
    results = results_of(sum_of_sums)
    trial = results.trial
    trial.limit = limit
    of_parts = [SimpleNamespace(gradients=results.actual, moved=("teacher",))]
    reference = SimpleNamespace(gradients=results.expected, moves_weights=True)
    again = split_results(trial, Comparison(reference, of_parts, worst, "weight"))
    assert again.tolerance == pytest.approx(tolerance)
    assert again.moves_weights
    assert again.moved == ("teacher",)


def test_all_that_have_a_gradient_are_everything():
    results = results_of(sum_of_sums)
    names = [*results.names, "unused"]
    zero = torch.zeros(3, dtype=torch.float64)
    with_unused = {**results.expected, "unused": zero}
    results = replace(results, names=names, expected=with_unused)
    assert results.is_everything(["weight"])
    assert not results.is_everything(["unused"])
