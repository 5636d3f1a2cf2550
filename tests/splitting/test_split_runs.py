"""Runs of a step on splits of a batch: what they give, and what they leave."""

import pytest
import torch
from splitting.loop_models import Net, images, new
from torch import nn

from scatterpar.splitting.split_arguments import SplitArguments
from scatterpar.splitting.split_runs import SplitRuns, described
from scatterpar.splitting.step_run import Settings

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
    first = runs.of_whole(ROWS, Settings())
    first.gradients = {}  # of a copy
    again = runs.of_whole(ROWS, Settings())
    assert again.gradients
    runs.leave_numbers()
    assert train.calls == 1


def test_equal_parts_give_the_whole_gradient(runs):
    (in_parts,) = runs.of_parts([[ROWS[:4], ROWS[4:]]], Settings())
    whole = runs.of_whole(ROWS, Settings())
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(in_parts.gradients[name], gradient)


def test_runs_leave_no_number_but_the_last(runs):
    runs.of_whole(ROWS, Settings())
    assert train.calls == 0
    runs.leave_numbers()
    assert train.calls == 1


def test_results_get_zeros_for_what_they_lack(runs):
    name = "of_another_part"
    runs.zeros = {name: torch.zeros(2)}
    result = runs.of_whole(ROWS, Settings())
    assert [*result.gradients] == [name]
    assert result.uncompared


@pytest.mark.parametrize("step", [train, train_one])
def test_step_of_one_batch_is_told_apart(step):
    takes_one_batch = runs_of(step).takes_one_batch(ROWS, Settings())
    assert takes_one_batch == (step is train_one)


def test_sizes_of_ranks_are_described():
    assert described([[[0, 1, 2], [3]], [[4, 5]]]) == "3 + 1 | 2"
