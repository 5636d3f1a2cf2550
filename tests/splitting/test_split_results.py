"""What the splits of a batch give, on which causes are asked for."""

from __future__ import annotations

import torch
from splitting.linear_trials import (
    OF_PARTS,
    SUM,
    mean_of_means,
    results_of,
    sum_of_sums,
)


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
