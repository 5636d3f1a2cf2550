"""Losses × batches × ways × layouts × dtypes, drawn anew in each slow run, beside plain
torch: a right program is exact and not refused, and no wrong one is trained silently.

``harness/generated_losses.py`` has what is drawn. The name of a cell that fails is the
Python that makes it again: an entry of ``FOUND``.
"""

from __future__ import annotations

import random

import pytest
import torch
from harness import generated_losses as g
from harness.generated_losses import LIMITS, WRONG, Cell, Network, cells
from harness.oracle import randn, seeded
from harness.pairwise import few_of

from scatterpar import ScatterOnceParallel

DOUBLE, SINGLE, HALF = LIMITS
ONE, SHARED, SEVERAL = g.LAYOUTS

NUM_CELLS = len(WRONG) * 2  # per seed: each wrong loss twice
# Drawn anew in each slow run.
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, None))]


def bad_outcomes(cells):
    """A line for each cell that is silent, or refused although it is right."""
    lines = []
    for cell in cells:
        outcome, words = cell.outcome()
        if outcome == "silent" or (cell.is_right and outcome == "refused"):
            lines.append(f"{cell}: {outcome}, {words}")
    return lines


def drawn_anew(seed):
    return random.SystemRandom().randrange(2**31) if seed is None else seed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", few_of(LIMITS, [torch.float64]))
@pytest.mark.parametrize("seed", SEEDS)
def test_right_losses_equal_plain_torch(dtype, seed):
    drawn = cells(NUM_CELLS, dtype, drawn_anew(seed), is_right=True)
    assert bad_outcomes(drawn) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", few_of(LIMITS, [torch.float64]))
@pytest.mark.parametrize("seed", SEEDS)
def test_wrong_losses_are_not_silent(dtype, seed):
    drawn = cells(NUM_CELLS, dtype, drawn_anew(seed), is_right=False)
    assert bad_outcomes(drawn) == []


# --- cells that were silent once ---

FOUND = [
    # A step's own parts: another one without a term, or fewer than a look had chosen.
    Cell(g.over_list, (g.equal_rows,), g.by_loss, ONE, SINGLE, 2015352049),
    Cell(
        g.hardest_half, (g.last_rows_without_terms,), g.by_loss, ONE, SINGLE, 1489059667
    ),
    # The pair's look had other parts than the shares, or not all rows.
    Cell(g.over_positive, (g.tiny_weights,), g.by_pair, SEVERAL, DOUBLE, 654010592),
    Cell(g.ratio, (g.few_terms, g.equal_rows), g.by_pair, SHARED, DOUBLE, 1975026822),
    Cell(
        g.over_mask,
        (g.zero_values, g.row_without_terms),
        g.by_pair,
        SHARED,
        DOUBLE,
        383275008,
    ),
    Cell(
        g.over_class_weights,
        (g.equal_rows, g.few_terms),
        g.by_pair,
        SHARED,
        SINGLE,
        1854979016,
    ),
    Cell(
        g.of_classes,
        (g.first_rows_without_terms, g.huge),
        g.by_pair,
        SHARED,
        DOUBLE,
        62864237,
    ),
    # Of several ways to combine a call's loss, one could not be checked.
    Cell(g.largest, (g.no_terms,), g.by_call, SHARED, HALF, 1624052249),
    Cell(g.largest, (g.ordinary, g.no_terms), g.by_call, SEVERAL, SINGLE, 569477888),
    Cell(
        g.median,
        (g.few_terms, g.one_row_of_several_without_terms),
        g.by_call,
        SHARED,
        HALF,
        528946500,
    ),
    Cell(
        g.over_large_or_one,
        (g.tiny_weights, g.ordinary),
        g.by_call,
        SHARED,
        HALF,
        518774208,
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", FOUND, ids=lambda cell: cell.loss.__name__)
def test_found_cells_are_not_silent(cell):
    outcome, words = cell.outcome()
    assert outcome in ("refused", "told"), words


@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE], ids=str)
@pytest.mark.parametrize(
    "loss", [g.over_selected, g.over_list, g.over_positive], ids=lambda f: f.__name__
)
def test_equal_rows_beside_none_with_a_term_refused(devices, loss, dtype):
    """Rows that are equal agree in all parts that have a term: the last has none."""
    with seeded():
        module = Network().to(dtype)
    inputs = randn(1, g.FEATURES).to(dtype).expand(5, -1)
    is_counted = torch.tensor([True, True, True, True, False])
    values = torch.ones(5, g.COLUMNS, dtype=dtype)
    values[~is_counted] = -1  # which over_positive leaves out
    targets = {"values": values, "mask": is_counted}
    engine = ScatterOnceParallel(module, 1, devices(3))
    with engine, pytest.raises(ValueError, match="gradient would be"):
        engine.forward_backward(inputs, targets, loss)
    assert all(parameter.grad is None for parameter in module.parameters())
