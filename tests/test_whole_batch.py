"""whole_batch=True: the gradient of a loss that sees the outputs of all rows at once."""

from __future__ import annotations

import pytest
from helpers.contrastive import FEATURES, LOSSES, two_views
from helpers.oracle import assert_step, randint, randn

from scatterpar import ScatterOnceParallel


def batch(rows):
    views = randn(rows, FEATURES, seed=rows), randn(rows, FEATURES, seed=rows + 1)
    return views, randint(4, rows, seed=rows)


@pytest.mark.parametrize("accum", [1, 3, 16])
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_that_of_the_whole_batch(devices, loss, replicas, accum):
    with ScatterOnceParallel(two_views(), accum, devices(replicas)) as engine:
        for rows in (37, 9, 3, 1):
            assert_step(engine, *batch(rows), LOSSES[loss], whole_batch=True)


def test_it_is_not_the_gradient_of_the_micro_batches(devices):
    """What accumulation gives instead: the tests above would not pass without the two passes."""
    with (
        ScatterOnceParallel(two_views(), 3, devices(2)) as engine,
        pytest.raises(AssertionError, match="off by"),
    ):
        assert_step(engine, *batch(37), LOSSES["nt_xent"])
