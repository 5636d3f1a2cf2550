"""What each question answers for a model whose gradient is the sum of the rows.

In loops the causes and their words are in ``test_cause_words.py``.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from splitting.linear_trials import ROWS, linear, mean_of_means, results_of, sum_of_sums
from torch import nn

from scatterpar.causes.counts import Count
from scatterpar.causes.evidence import CauseKind
from scatterpar.splitting import row_parts, split_causes
from scatterpar.splitting.split_results import SplitResults


def test_factor_of_all_named_parameters():
    def thrice(model, batches):
        for batch in batches:
            (len(batches) * model(batch).sum()).backward()

    results = results_of(thrice, parts=3)
    finding = split_causes.constant_factor(results, ["weight"])
    assert finding.kind is CauseKind.CONSTANT_FACTOR
    assert finding.factor == pytest.approx(3)
    assert split_causes.constant_factor(results_of(mean_of_means), ["weight"]) is None
    # A right gradient is one times itself.
    assert split_causes.constant_factor(results_of(sum_of_sums), ["weight"]) is None


def test_factor_of_zero_has_a_kind_of_its_own():
    def detached(model, batches):
        outputs = [model(batch).sum() for batch in batches]
        loss = sum(outputs) if len(batches) == 1 else 0 * sum(outputs)
        loss.backward()

    results = results_of(detached)
    assert (
        split_causes.constant_factor(results, ["weight"]).kind is CauseKind.NO_GRADIENT
    )


def test_gradient_of_two_numbers_has_no_factor():
    results = results_of(sum_of_sums, linear(2), torch.ones(6, 2))
    actual = {"weight": 3 * results.expected["weight"]}
    results = replace(results, tolerance=1e-12, actual=actual)
    assert split_causes.constant_factor(results, ["weight"]) is None


def test_one_part_compared_with_a_loss():
    def half(model, batches):
        for batch in batches:
            (model(batch).sum() / 2).backward()

    results = results_of(half, loss=lambda model, batch: model(batch).sum())
    assert split_causes.is_wrong_with_one_part(results)
    right = results_of(sum_of_sums, loss=lambda model, batch: model(batch).sum())
    assert not split_causes.is_wrong_with_one_part(right)


class Counter(nn.Module):
    """Multiplies by the number of its calls."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows):
        self.calls += 1
        return self.calls * self.linear(rows)


@pytest.mark.parametrize(("model", "matters"), [(linear, False), (Counter, True)])
def test_order_matters_if_calls_are_counted(model, matters):
    assert (
        split_causes.depends_on_earlier_parts(results_of(sum_of_sums, model()))
        == matters
    )


def test_penalty_per_part_doubles_at_3_parts():
    def step(model, batches):
        for batch in batches:
            (model(batch).sum() + model.weight.sum()).backward()

    (growth,) = split_causes.growths(results_of(step))
    assert growth.factor == pytest.approx(2)
    assert growth.expected == 2
    assert growth.cosine == pytest.approx(1)


def test_no_growth_without_difference_or_rows():
    assert split_causes.once_per_part(results_of(sum_of_sums)) is None
    assert split_causes.growths(results_of(mean_of_means, batch=ROWS[:5])) == []


def test_wrong_parameters_are_named():
    model = nn.ModuleDict({"right": linear(), "wrong": linear()})

    def step(model, batches):
        for batch in batches:
            model["right"](batch).sum().backward()
            (len(batches) * model["wrong"](batch).sum()).backward()

    results = results_of(step, model)
    assert results.wrong == ["wrong.weight"]
    assert not results.is_everything(results.wrong)
    finding = split_causes.factor_or_weights(results)
    assert finding.names == ["wrong.weight"]
    assert finding.factor == pytest.approx(2)
    assert results.is_everything(["wrong.weight", "right.weight"])


# --- results that are known ---


class KnownRuns:
    """Runs of a step whose gradient for a split is known, as that of the rows at
    once is.
    """

    def __init__(self, of_split, of_rows):
        self._of_split = of_split
        self._of_rows = of_rows
        self.splits = []

    def gradients_of(self, split):
        self.splits.append(split)
        return {"weight": torch.tensor(self._of_split(split)).double()}

    def reference(self, rows):
        gradient = torch.tensor(self._of_rows(rows)).double()
        return SimpleNamespace(gradients={"weight": gradient})


class KnownTrial:
    """A trial of such runs."""

    limit = 1e-9

    def __init__(self, of_split, of_rows=None, num_rows=12, ranks=1, parts=2):
        self.runs = KnownRuns(of_split, of_rows or (lambda rows: of_split([[rows]])))
        self.rows = list(range(num_rows))
        self.ranks = ranks
        self.num_parts = parts
        self.arguments = SimpleNamespace(loss=None)

    def cut(self, rows, ranks, parts, equal):
        shares = row_parts.cut_into_parts(rows, ranks, equal=equal)
        return [row_parts.cut_into_parts(share, parts, equal=equal) for share in shares]

    def differing(self, actual, expected):
        return [
            name for name in actual if not torch.equal(actual[name], expected[name])
        ]

    def invisible(self, gradients):
        return [name for name in gradients if not gradients[name].any()]


def known(trial, actual=(1.0, 2, 3), expected=(1.0, 2, 3), **fields):
    defaults = {
        "others": [],
        "names": ["weight"],
        "wrong": ["weight"],
        "parts": [[0, 1], [2, 3]],
        "tolerance": 1e-6,
        "moves_weights": False,
        "moved": (),
    }
    gradients = {
        "actual": {"weight": torch.tensor(actual).double()},
        "expected": {"weight": torch.tensor(expected).double()},
    }
    return SplitResults(trial, **gradients, **(defaults | fields))


def nothing(split):
    return [0.0, 0, 0]


@pytest.mark.parametrize(("factor", "is_told"), [(3, True), (2, False)])
def test_one_number_has_the_factor_of_the_parts_alone(factor, is_told):
    """A temperature gets the gradient of the whole loss in each of three parts."""
    results = known(KnownTrial(nothing, parts=3), [float(factor)], [1.0])
    finding = split_causes.constant_factor(results, ["weight"])
    assert (finding is not None) == is_told


def counted(*per_row):
    return Count("labels", "batch", tuple(map(float, per_row)))


@pytest.mark.parametrize(
    ("ranks", "per_row", "expected"),
    [
        # The largest two groups; rows without terms show nothing.
        (1, [0] * 5 + [1] * 4 + [2] * 2 + [3], [[5, 6, 7, 8], [9, 10]]),
        (1, [1] * 3 + [2] * 5 + [3] * 4, [[3, 4, 5, 6], [8, 9, 10, 11]]),
        # A part for each rank.
        (3, [1] * 5 + [2] * 7, [[5, 6, 7, 8, 9, 10], [0, 1, 2]]),
        (1, [*range(12)], []),
    ],
)
def test_largest_groups_with_equal_counts(ranks, per_row, expected):
    results = known(KnownTrial(nothing, ranks=ranks))
    groups = split_causes._groups_with_equal(results, counted(*per_row))
    assert groups == expected


@pytest.mark.parametrize("labels", [[1] * 6 + [3] * 6, [1, 3, 3, 1] * 3])
def test_count_whose_equal_rows_are_right_is_found(labels):
    """A mean of the labels in each part: right if all rows have equally many.

    In the second table halves of all rows have equally many, too, by chance: that is no
    reason to count rows.
    """

    def mean_of_means(split):
        parts = [part for share in split for part in share]
        means = [sum(part) / sum(labels[row] for row in part) for part in parts]
        return [sum(means) / len(means)] * 3

    trial = KnownTrial(mean_of_means)
    trial.counts = [counted(*[1] * 12), counted(*labels)]
    finding = split_causes.mean_of_means_in_a_term(known(trial))
    assert finding.count is trial.counts[1]
    assert {len(split[0]) for split in trial.runs.splits} == {2}  # parts, of one rank
    # Right is only what has a gradient.
    trial = KnownTrial(nothing)
    trial.counts = [counted(*labels)]
    assert split_causes.mean_of_means_in_a_term(known(trial)) is None
    # No group of two rows shows anything.
    trial.counts = [counted(*range(12))]
    assert split_causes.mean_of_means_in_a_term(known(trial)) is None


def test_each_rank_gets_one_part_of_a_group():
    trial = KnownTrial(nothing, lambda rows: [1.0, 1, 1], ranks=2)
    trial.counts = [counted(*[1] * 6, *[3] * 6)]
    split_causes.mean_of_means_in_a_term(known(trial))
    assert [len(share) for share in trial.runs.splits[0]] == [1, 1]


@pytest.mark.parametrize(
    ("ranks", "parts", "expected"),
    [
        (1, 2, [("part", 2.0)]),
        (2, 1, [("rank", 2.0)]),
        # In each part of all ranks: from 4 to 6 parts, 3 and 5 times too often.
        (2, 2, [("rank", 2.0), ("rank", 5 / 3), ("part", 2.0), ("part", 5 / 3)]),
    ],
)
def test_growths_that_a_term_may_have(ranks, parts, expected):
    trial = KnownTrial(lambda split: [1.0, 2, 3], ranks=ranks, parts=parts)
    growths = split_causes.growths(known(trial))
    assert [(growth.unit, growth.expected) for growth in growths] == expected


def test_parts_of_a_growth_are_dealt():
    """Each part has rows of all kinds, and no row is left over."""
    trial = KnownTrial(lambda split: [1.0, 2, 3], num_rows=14)
    split_causes.growths(known(trial))
    halves, thirds = trial.runs.splits
    assert halves == [[[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]]
    assert thirds == [[[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]]


def test_ranks_that_differ_are_named():
    other = {"weight": torch.tensor([1.0, 2, 4]).double()}
    results = known(KnownTrial(nothing))
    assert split_causes.differing_ranks(results) is None
    finding = split_causes.differing_ranks(replace(results, others=[other]))
    assert finding.names == ["weight"]


PARTS = [[1.0, 0, 0, 2], [0.0, 1, 1, 0]]


@pytest.mark.parametrize(
    ("actual", "expected", "do_meet"),
    [
        # The weights of the loop are those of the batch: something else differs.
        ([1.0, 1, 1, 2], [1.0, 1, 1, 2], True),
        ([3.0, 1, 1, 6], [1.0, 1, 1, 2], False),
        # No weights make up the loop's gradient, or that of the batch.
        ([1.0, 2, 3, 4], [1.0, 1, 1, 2], False),
        ([1.0, 1, 1, 2], [1.0, 2, 3, 4], True),
        # Of too few numbers, any weights would do.
        ([1.0, 1, 1], [1.0, 2, 3], False),
    ],
)
def test_rows_meet_if_no_weights_explain_it(actual, expected, do_meet):
    def of_split(split):
        return PARTS[split[0][0][0] // 2][: len(actual)]

    results = known(KnownTrial(of_split), actual, expected)
    assert split_causes.do_rows_meet(results) == do_meet


def test_undefined_part_says_nothing_of_rows():
    def of_split(split):
        return [float("nan")] * 4 if split[0][0][0] else PARTS[0]

    results = known(KnownTrial(of_split), [1.0, 1, 1, 2], [1.0, 2, 3, 4])
    assert not split_causes.do_rows_meet(results)


def test_causes_that_are_asked_for():
    results = known(KnownTrial(nothing))
    order = {CauseKind.STATE_BETWEEN_PARTS, CauseKind.ROWS_ARE_COMPARED}
    questions = split_causes.questions_of(results)
    assert order < questions.keys()
    moved = split_causes.questions_of(replace(results, moves_weights=True))
    assert questions.keys() - moved.keys() == order
