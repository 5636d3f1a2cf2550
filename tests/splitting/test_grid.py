"""Several splits in one table, and differences that are so by design."""

from __future__ import annotations

import pytest
import torch
from splitting.loop_models import Experts, Net, average, balance, images, new, num_rows
from torch.nn.functional import cross_entropy

from scatterpar.splitting import split_runs, splitgrid


def right(model, batches):
    for pixels, classes in batches:
        (cross_entropy(model(pixels), classes) / len(batches)).backward()


def on_ranks(model, batches):
    right(model, batches)
    if torch.distributed.is_initialized():
        average(model)


def routed(model, batches):
    """The balance loss compares the rows of a part."""
    count = num_rows(batches)
    for pixels, classes in batches:
        outputs, logits = model(pixels)
        loss = cross_entropy(outputs, classes, reduction="sum") / count
        (loss + 0.1 * balance(logits) * len(classes) / count).backward()


def grid_of(step, model=Net, parts=(2, 4), ranks=(1,)):
    return splitgrid(step, new(model), images(), parts=parts, ranks=ranks)


def test_grid_has_a_line_per_cell():
    grid = grid_of(right, parts=(1, 2, 4))
    assert [(cell.ranks, cell.parts) for cell in grid.cells] == [(1, 2), (1, 4)]
    assert len(str(grid).splitlines()) == 3
    assert str(grid).count("the same") == 2
    grid.assert_passed()


@pytest.mark.slow
def test_grid_has_parts_and_ranks():
    grid = grid_of(on_ranks, parts=(1, 4), ranks=(1, 2))
    assert [(c.ranks, c.parts) for c in grid.cells] == [(1, 4), (2, 1), (2, 4)]


@pytest.mark.parametrize(
    ("allow", "words"),
    [
        (None, "router.weight differs (rows are compared)"),
        ({"router": "once per part"}, "allowed is once per part"),
        pytest.param(
            {"bias": "rows are compared"},
            "no cell differs in bias",
            marks=pytest.mark.slow,
        ),
        (
            {"router": "rows are compared", "head": "mean of means"},
            "no cell differs in head",
        ),
    ],
)
def test_differences_must_be_those_allowed(allow, words):
    grid = grid_of(routed, Experts)
    with pytest.raises(AssertionError) as raised:
        grid.assert_passed(allow=allow)
    assert words in str(raised.value)


def test_allowed_difference_passes_until_it_is_gone():
    allow = {"router": "rows are compared", "embedding": "rows are compared"}
    grid_of(routed, Experts).assert_passed(allow=allow)
    with pytest.raises(AssertionError, match="take it out of allow="):
        grid_of(right).assert_passed(allow=allow)


def test_grid_of_one_part_refused():
    with pytest.raises(ValueError, match="compares the step with itself"):
        grid_of(right, parts=(1,))
    assert not torch.distributed.is_initialized()


def test_cells_share_runs_of_the_whole_batch(monkeypatch):
    numbers_of_parts = []
    run = split_runs.run_step

    def noted(step, model, batches, *others):
        numbers_of_parts.append(len(batches))
        return run(step, model, batches, *others)

    monkeypatch.setattr(split_runs, "run_step", noted)
    grid = splitgrid(right, new(Net), images(), parts=(2, 4), ranks=(1,))
    grid.assert_passed()
    # Of four parts a second time: in the first order some part lacks a class.
    assert numbers_of_parts == [1, 2, 4, 4]
