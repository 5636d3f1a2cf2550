"""When a look is due, and what a kind of criterion and batch is."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scatterpar import Rows
from scatterpar.batch.batch import batch_of
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.step.request import Request
from scatterpar.verify.schedule import (
    Kind,
    Kinds,
    Stage,
    informative_tensors,
    may_be_labels,
    names_and_numbers,
    ranges_of,
    read_ranges,
)

LABELS = torch.tensor([0, 3])


def due(kind, details, ranges=()):
    """The numbers of the steps that are looked at, each of which agrees."""
    looked_at = []
    for number, each in enumerate(details, 1):
        if kind.count_step(ranges, each):
            looked_at.append(number)
            kind.looks += 1
            kind.note_agreement()
    return looked_at


def test_steps_1_2_4_8_16_are_looked_at():
    assert due(Kind(), ["same"] * 20) == [1, 2, 4, 8, 16]


def test_step_with_new_details_looked_at():
    assert due(Kind(), ["a"] * 4 + ["b"] * 2 + ["a"] * 2) == [1, 2, 4, 5, 8]


def test_always_new_details_looked_at_8_times():
    assert due(Kind(), range(15)) == [*range(1, 9)]


def test_labels_beyond_range_looked_at():
    kind = Kind()
    for labels, is_due in (
        ([0, 3], True),
        ([1, 2], True),  # step 2
        ([0, 3], False),
        ([0, 4], True),  # step 4
        ([0, 4], False),
        ([0, 5], True),
        ([0, 5], False),
        ([-1, 5], True),
        ([-1, 5], False),
    ):
        ranges = ranges_of([torch.tensor(labels)])
        assert kind.count_step(ranges, "same") == is_due, labels
        kind.note_agreement()


def test_padding_at_other_end_is_news():
    """Padding at the end, which a look had seen, hid padding at the start of later rows."""
    kind = Kind()
    at_end, at_start = torch.tensor([[1, 2, 2]]), torch.tensor([[2, 2, 1]])
    for rows in (at_end, at_end):  # steps 1 and 2 are looked at in any case
        assert kind.count_step(ranges_of([rows]), "same")
        kind.note_agreement()
    assert not kind.count_step(ranges_of([at_end]), "same")
    kind.steps += 1  # not step 4
    assert kind.count_step(ranges_of([at_start]), "same")


def test_inconclusive_news_become_rare():
    """A look that stays inconclusive has seen no range: of a ResNet-50 in bfloat16, whose
    gradient is nothing but rounding there, every step was looked at once a batch had
    larger labels than the first, and took three times as long.
    """
    kind = Kind()
    assert kind.count_step(ranges_of([torch.tensor([0, 3])]), "same")
    kind.looks += 1
    kind.note_agreement()
    looked_at = []
    for step in range(2, 513):
        if kind.count_step(ranges_of([torch.tensor([0, 7])]), "same"):
            looked_at.append(step)
            kind.looks += 1  # and inconclusive
    assert looked_at[:7] == [2, 3, 4, 5, 6, 7, 8]
    assert len(looked_at) < 20


def test_refused_looked_at_until_agreement():
    kind = Kind(steps=4, stage=Stage.REFUSED, details={"same"})
    assert kind.count_step((), "same")
    assert kind.count_step((), "same")
    kind.note_agreement()
    assert not kind.count_step((), "same")


def test_given_up_kind_never_looked_at():
    assert due(Kind(stage=Stage.GIVEN_UP), ["a", "b", "c"]) == []


@pytest.mark.parametrize("before", [Stage.ASKED, Stage.REFUSED])
def test_only_a_final_look_is_the_last(before):
    kind = Kind(stage=before)
    kind.note_inconclusive(Inconclusive("all gradients are zero", 2))
    assert kind.stage is before
    kind.note_inconclusive(Inconclusive("it waits for ever", 1, is_final=True))
    assert kind.stage is Stage.GIVEN_UP


def kind_of(kinds, criterion, inputs=LABELS, **options):
    request = Request([batch_of(inputs, LABELS, 2, 0)], 0, criterion, **options)
    return kinds.kind_of(request, True, "flags")


def factory(factor):
    return lambda output, targets: factor * output.sum()


def test_lambda_keeps_kind_number_is_detail():
    kinds = Kinds()
    first, details = kind_of(kinds, factory(2))
    again, same_details = kind_of(kinds, factory(2))
    other, other_details = kind_of(kinds, factory(3))
    assert first is again is other
    assert details == same_details != other_details


@pytest.mark.parametrize(
    "others",
    [
        {"criterion": lambda output, targets: output.mean()},
        {"inputs": LABELS.double()},
        {"whole_batch": True},
        {"count": len},
        {"reduction": "sum"},
    ],
    ids=lambda others: next(iter(others)),
)
def test_other_criterion_or_dtype_is_new_kind(others):
    kinds = Kinds()
    first, _ = kind_of(kinds, factory(2))
    other, _ = kind_of(kinds, **{"criterion": factory(2), **others})
    assert other is not first


def test_word_in_batch_is_detail():
    kinds = Kinds()
    first, details = kind_of(kinds, factory(2), [LABELS, "train"])
    other, other_details = kind_of(kinds, factory(2), [LABELS, "distil"])
    assert first is other
    assert details != other_details


def test_numbers_of_partial_and_module_found():
    _, numbers = names_and_numbers([partial(F.cross_entropy, label_smoothing=0.25)])
    assert "0.25" in numbers
    _, numbers = names_and_numbers([nn.CrossEntropyLoss(ignore_index=7)])
    assert "7" in numbers


def test_long_list_is_data():
    names, _ = names_and_numbers([[*"ab"]])
    assert {"a", "b"} <= names
    names, _ = names_and_numbers([[f"line {number}" for number in range(33)]])
    assert names == {"list"}


def test_changed_number_of_same_loss_is_detail():
    kinds = Kinds()
    loss = nn.CrossEntropyLoss()
    first, details = kind_of(kinds, loss)
    assert kind_of(kinds, loss) == (first, details)
    loss.label_smoothing = 0.5
    other, other_details = kind_of(kinds, loss)
    assert first is other
    assert details != other_details


FLOATS, LABELS = torch.tensor([[0.5], [1.5]]), torch.tensor([3, -100])


def informative(inputs, targets=None, most_entries=None):
    request = Request([batch_of(inputs, targets, 2, 0)], 0)
    return [each.tolist() for each in informative_tensors(request, most_entries)]


@pytest.mark.parametrize(
    ("dtype", "may_be"),
    [
        (torch.long, True),
        (torch.uint8, True),
        (torch.bool, False),
        (torch.float, False),
    ],
)
def test_integers_may_be_labels(dtype, may_be):
    assert may_be_labels(torch.zeros(2, dtype=dtype)) == may_be


def test_only_targets_and_labels_informative():
    assert informative(FLOATS, LABELS) == [[3, -100]]
    assert informative({"x": FLOATS, "labels": LABELS}) == [[3, -100], [[0.5], [1.5]]]
    assert informative(FLOATS, FLOATS) == [[[0.5], [1.5]]]


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantised_rows_have_ranges():
    rows = torch.quantize_per_tensor(torch.tensor([0.5, 2.0]), 0.5, 0, torch.qint8)
    assert informative(rows) == [[0.5, 2.0]]


def test_sizes_of_rows_informative():
    rows = Rows([torch.zeros(4), torch.zeros(7)], list)
    assert informative(rows) == [[4, 7]]
    assert informative(rows, most_entries=1) == [[4]]


def test_narrow_inputs_informative_not_images():
    """Two dimensions of more than one element after the rows are data, without targets, too."""
    assert informative(torch.zeros(2, 3, 4)) == []
    assert informative(torch.zeros(2, 3, 1)) == torch.zeros(1, 2, 3, 1).tolist()


@pytest.mark.parametrize(
    ("labels", "numbers"),
    [
        ([3, -100], [100, 3]),  # the lowest with the other sign, the highest
        ([[1, 1, 2]], [-1, 2, 1, 0]),  # padding at the start
        ([[1, 2, 2]], [-1, 2, 0, 1]),  # at the end
        ([[7, 7, 7]], [-7, 7, 1, 1]),
        ([[1], [1]], [-1, 1, 0, 0]),
        ([[True, False]], [0, 1]),  # a mask
    ],
)
def test_range_is_lowest_highest_padding(labels, numbers):
    assert read_ranges(ranges_of([torch.tensor(labels)])) == numbers


def test_large_numbers_by_power_of_two():
    def highest(value):
        return read_ranges(ranges_of([torch.tensor([0, value])]))[1]

    assert highest(1000) == 1000
    assert highest(1001) == highest(1023) == 1110  # 2 ** 10, after all labels
    assert highest(1024) == 1111


def test_fractions_by_power_of_two_nan_last():
    low, high = read_ranges(ranges_of([torch.tensor([0.3, 0.4])]))
    assert (low, high) == (-1099, 1099)  # both are between 2 ** -2 and 2 ** -1
    _, high = read_ranges(ranges_of([torch.tensor([math.nan])]))
    assert high == math.inf
