"""What was appended to an array, a tuple or a text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scatterpar.integrations import growth

ROWS = torch.arange(6.0).reshape(3, 2)
APPENDED = {  # before, after, whether a statement appends; what was appended
    "rows": (ROWS[:1], ROWS, False, ROWS[1:]),
    "rows of numpy": (ROWS[:2].numpy(), ROWS.numpy(), False, ROWS[2:].numpy()),
    "rows to nothing": (torch.zeros(0), ROWS, True, ROWS),
    "entries": ((1,), (1, 2), False, (2,)),
    "text": ("a", "ab", True, "b"),
    "a new tensor": (torch.zeros(0), ROWS, False, None),
    "a new tuple": ((), (1, 2), False, None),
    "other rows": (ROWS[1:2], ROWS, True, None),
    "fewer rows": (ROWS, ROWS[:2], True, None),
    "another text": ("a", "ba", True, None),
    "another dtype": (ROWS[:1], ROWS.double(), True, None),
    "a tensor without dimensions": (ROWS[0, 0], ROWS, True, None),
}


@pytest.mark.parametrize("name", APPENDED)
def test_what_follows_is_appended(name):
    before, now, is_said, expected = APPENDED[name]
    piece = growth.appended(before, now, is_said=is_said)
    if expected is None:
        assert piece is None
    else:
        assert np.array_equal(np.asarray(piece), np.asarray(expected))
        whole = growth.extended(before, piece)
        assert np.array_equal(np.asarray(whole), np.asarray(now))


def test_equal_values_have_one_class_and_dtype():
    assert growth.is_equal(ROWS, ROWS.clone())
    assert not growth.is_equal(ROWS, ROWS.double())
    assert not growth.is_equal(1, 1.0)
    assert not growth.is_equal([1], [1])
