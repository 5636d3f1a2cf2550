import pytest
import torch
from harness.oracle import randint, randn

from scatterpar.calls.numbers import (
    BY_ROWS,
    SUM,
    combined_number,
    rules_for,
    weights_of,
)

ROWS, LABELS = randn(6, 3), randint(4, 6, 5)
PARTS = [range(4), range(4, 6)]


def test_rules_are_of_integer_tensors_with_rows():
    words = [rule.words for rule in rules_for((ROWS, {"labels": LABELS}), 0)]
    assert len(words) == 4
    assert (words[0], words[-1]) == (BY_ROWS.words, SUM.words)
    assert "shifted" in words[2]


def test_weights_count_labels_that_are_not_ignored():
    labels = LABELS.clone()
    labels[0] = -100
    labels[5, 0] = -100
    arguments = ((ROWS,), {"labels": labels})
    weights = [weights_of(rule, arguments, PARTS) for rule in rules_for(arguments, 0)]
    assert weights == [[4, 2], [15, 9], [12, 8], [1, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_mean_ignores_parts_without_terms(dtype):
    numbers = [torch.tensor(value, dtype=dtype) for value in (1.0, torch.nan, 3.0)]
    mean = combined_number(numbers, [1, 0, 3], BY_ROWS)
    assert mean.dtype == dtype
    assert mean.item() == 2.5


def test_mean_of_no_terms_is_that_of_torch():
    numbers = [torch.tensor(torch.nan)] * 2
    assert combined_number(numbers, [0, 0], BY_ROWS).isnan()


def test_sum_adds():
    numbers = [torch.tensor(2), torch.tensor(3)]
    assert combined_number(numbers, [1, 1], SUM).item() == 5
