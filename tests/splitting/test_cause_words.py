"""What factors and weights mean, and the order of the hypotheses.

Whole loops are in ``test_check.py``.
"""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from harness.oracle import seeded
from splitting.hidden_mistakes import HIDDEN
from splitting.loop_models import (
    Net,
    Tagger,
    average,
    class_loss,
    images,
    info_nce_of_pairs,
    new,
    num_rows,
    pairs,
    tokens,
)
from torch import nn
from torch.nn.functional import cross_entropy, softplus

from scatterpar import splitcheck
from scatterpar.splitting import cause_words

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
    meaning, remedy = cause_words._meaning(factor, ranks=2, parts=3)
    assert meaning.removeprefix(": it is ") == words
    assert remedy.endswith(".")


def test_one_rank_explains_no_factor():
    assert cause_words._meaning(1, ranks=1, parts=2)[0] == ""


def test_all_readings_of_a_factor_are_listed():
    meaning, remedy = cause_words._meaning(1 / 4, ranks=2, parts=2)
    assert "number of ranks twice too often, or " in meaning
    assert meaning.endswith("divided by ranks and parts once too often")
    meaning, remedy = cause_words._meaning(2, ranks=2, parts=2)
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
    found = cause_words._ratio_of_neighbours(torch.tensor(weights), ranks)
    assert found == (None if ratio is None else pytest.approx(ratio))


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


class Meeting(nn.Module):
    """Rows meet in ``head.norm``, which subtracts their mean."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(10, 8)
        self.head = nn.ModuleDict({"norm": RowMean(), "last": nn.Linear(8, 4)})

    def forward(self, pixels):
        hidden = torch.relu(self.body(pixels))
        return self.head["last"](self.head["norm"](hidden))


class RowMean(nn.Module):
    def forward(self, hidden):
        return hidden - hidden.mean(0)


def summed(model, batches):
    for pixels, classes in batches:
        loss = cross_entropy(model(pixels), classes, reduction="sum")
        (loss / num_rows(batches)).backward()


def contrastive(model, batches):
    for batch in batches:
        (info_nce_of_pairs(model, batch) / len(batches)).backward()


def test_module_where_rows_first_meet_is_named():
    report = splitcheck(summed, new(Meeting), images(), equal=True)
    assert report.cause == "rows are compared"
    assert "rows first meet in head.norm" in report.why
    report = splitcheck(contrastive, new(Net), pairs(), equal=True)
    assert "the loss compares rows with each other (no module does)" in report.why


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Net()
        self.second = Net()
        self.scale = nn.Parameter(torch.tensor([2.0, 1.0, 0.5]))


def scale_of_whole_loss(model, batches):
    """GradCache, in which the scale gets the gradient of the whole loss each time."""
    with torch.no_grad():
        firsts = [model.first(first) for first, _ in batches]
        seconds = [model.second(second) for _, second in batches]
    for number, (first, second) in enumerate(batches):
        all_firsts = torch.cat(
            [*firsts[:number], model.first(first), *firsts[number + 1 :]]
        )
        all_seconds = torch.cat(
            [*seconds[:number], model.second(second), *seconds[number + 1 :]]
        )
        logits = (all_firsts @ all_seconds.T) * model.scale.sum()
        cross_entropy(logits, torch.arange(len(logits))).backward()


def test_scale_of_the_whole_loss_has_its_remedy():
    report = splitcheck(scale_of_whole_loss, new(TwoTowers), pairs(), equal=True)
    assert report.cause == "constant factor"
    assert "In scale the gradient is 4 times" in report.why
    assert "dividing the loss would make the others wrong" in report.remedy


def entropy_bonus(model, batches):
    """The policy's loss is a mean over tokens; the bonus, over rows."""
    for ids, labels in batches:
        logits = model(ids)
        policy = cross_entropy(logits.flatten(0, 1), labels.flatten())
        entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
        ((policy - 0.1 * entropy) / len(batches)).backward()


def test_mean_of_means_in_one_of_two_terms():
    report = splitcheck(entropy_bonus, new(Tagger), tokens(), equal=True)
    assert report.cause == "mean of means"
    assert "labels that are not -100" in report.why
    assert "GradCache" not in report.remedy


def test_weights_that_the_step_moves_are_named():
    """SAM on each part: that rows are compared, or state, would lead astray."""
    step = HIDDEN["weights_perturbed_by_each_part"].step
    report = splitcheck(step, new(Net), images(), equal=True)
    assert "at weights that it has moved, as SAM does" in report.why
    assert "move the weights once" in report.remedy


def nearly_equal(model, batches):
    """The loss compares rows, though so little that weights print alike."""
    for pixels, _ in batches:
        outputs = model(pixels)
        centred = outputs - 1e-3 * outputs.detach().mean()
        (softplus(centred).square().mean() / len(batches)).backward()


def test_weights_that_print_alike_are_no_cause():
    report = splitcheck(nearly_equal, new(Net), images(), equal=True)
    assert report.cause == "rows are compared"
    assert "0.25, 0.25" not in report.why


SEEDS = {
    "torch": lambda: torch.manual_seed(42),
    "Python": lambda: random.seed(42),
    "NumPy": lambda: numpy.random.seed(42),
}


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS.keys())
def test_seeding_is_not_drawing(seed):
    def step(model, batches):
        seed()
        for batch in batches:
            class_loss(model, batch).backward()

    report = splitcheck(step, new(Net), images())
    assert report.cause == "sum of means"
    assert "draws" not in report.why


def test_adam_hides_a_factor():
    def twice(model, batches):
        for batch in batches:
            (class_loss(model, batch) / 2).backward()

    report = splitcheck(twice, new(Net), images(), equal=True)
    assert "Adam hides this factor, and so does clipping" in report.why
    report = splitcheck(entropy_bonus, new(Tagger), tokens(), equal=True)
    assert "Adam does not hide the difference" in report.why


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
def test_penalty_of_each_part_of_each_rank(parts):
    def step(model, batches):
        world = torch.distributed.get_world_size()
        for batch in batches:
            loss = class_loss(model, batch) / len(batches)
            penalty = sum(weight.square().sum() for weight in model.parameters())
            (loss + 0.1 * world * penalty).backward()
        average(model)

    report = splitcheck(step, new(Net), images(36), ranks=2, parts=parts, equal=True)
    assert report.cause == "once per part"


@pytest.mark.slow
def test_error_of_a_rank_begins_with_exception():
    def step(model, batches):
        raise ZeroDivisionError("of a rank")

    with pytest.raises(RuntimeError, match=r"of 1: ZeroDivisionError: of a rank\n"):
        splitcheck(step, new(Net), images(), ranks=2)
