"""Tensors that may hold labels, and how far their numbers go."""

from __future__ import annotations

import math

import pytest
import torch

from scatterpar import Rows
from scatterpar.batch.batch import batch_of
from scatterpar.step.request import Request
from scatterpar.verify.ranges import (
    informative_tensors,
    may_be_labels,
    ranges_of,
    read_ranges,
)

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
        ([3, -100], [100, 3, 0]),  # the lowest with the other sign, the highest
        ([[1, 1, 2]], [-1, 2, 1]),  # padding at the start
        ([[1, 2, 2]], [-1, 2, 2]),  # at the end
        ([[7, 7, 7]], [-7, 7, 3]),
        ([[1], [1]], [-1, 1, 0]),
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
    low, high, _ = read_ranges(ranges_of([torch.tensor([0.3, 0.4])]))
    assert (low, high) == (-1099, 1099)  # both are between 2 ** -2 and 2 ** -1
    _, high, _ = read_ranges(ranges_of([torch.tensor([math.nan])]))
    assert high == math.inf
