"""Runs of a step on splits of a batch: what they give, and what they leave."""

from dataclasses import replace

import pytest
import torch
from splitting.loop_models import Net, images, new
from torch import nn

from scatterpar.splitting.split_arguments import SplitArguments
from scatterpar.splitting.split_runs import SplitRuns, sizes_in_words

ROWS = list(range(8))


def train(model, batches):
    train.calls = getattr(train, "calls", 0) + 1
    for inputs, labels in batches:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        (loss / len(batches)).backward()


def train_one(model, batch):
    inputs, labels = batch
    nn.functional.cross_entropy(model(inputs), labels).backward()


def runs_of(step):
    inputs, labels = images()
    batch = inputs[:8], labels[:8]
    options = {"ranks": 1, "equal": None, "timeout": 60.0}
    return SplitRuns(SplitArguments(step, new(Net), batch, **options), len(ROWS))


@pytest.fixture
def runs():
    train.calls = 0
    return runs_of(train)


def test_whole_batch_is_computed_once(runs):
    first = runs.reference(ROWS)
    first.gradients = {}  # of a copy
    again = runs.reference(ROWS)
    assert again.gradients
    runs.leave_numbers()
    assert train.calls == 1


def test_equal_parts_give_the_whole_gradient(runs):
    (in_parts,) = runs.results([[ROWS[:4], ROWS[4:]]])
    whole = runs.reference(ROWS)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(in_parts.gradients[name], gradient)


def test_runs_leave_no_number_but_the_last(runs):
    runs.reference(ROWS)
    assert train.calls == 0
    runs.leave_numbers()
    assert train.calls == 1


def test_results_get_zeros_for_what_they_lack(runs):
    name = "of_another_part"
    runs.zeros = {name: torch.zeros(2)}
    result = runs.reference(ROWS)
    assert [*result.gradients] == [name]
    assert result.uncompared


def test_settings_hold_and_changes_for_one_run(runs):
    """Without float64 the gradient is in the parameters' own dtype: it is rounded."""

    def rounding(result):
        exact = runs.reference(ROWS, in_double=True).gradients
        pairs = zip(result.gradients.values(), exact.values(), strict=True)
        return max(float((one - other).abs().max()) for one, other in pairs)

    assert rounding(runs.reference(ROWS, in_double=False)) > 1e-10
    assert rounding(runs.reference(ROWS)) == 0
    runs.settings = replace(runs.settings, in_double=False)
    assert rounding(runs.reference(ROWS)) > 1e-10
    (in_parts,) = runs.results([[ROWS]])
    assert rounding(in_parts) > 1e-10
    assert runs.gradients_of([[ROWS]]).keys() == in_parts.gradients.keys()


@pytest.mark.parametrize("step", [train, train_one])
def test_step_of_one_batch_is_told_apart(step):
    takes_one_batch = runs_of(step).takes_one_batch(ROWS)
    assert takes_one_batch == (step is train_one)


def test_sizes_of_ranks_are_described():
    assert sizes_in_words([[[0, 1, 2], [3]], [[4, 5]]]) == "3 + 1 | 2"
