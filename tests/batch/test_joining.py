"""Pieces of a result are joined in the order of the batch's rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from scatterpar.batch.joining import entries_per_row, join_rows, require_same_or_rows

ROWS = [2, 1]  # of the two pieces
TWO, ONE = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])
CODEBOOK = torch.arange(12.0).reshape(4, 3)


def as_lists(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: as_lists(item) for name, item in value.items()}
    return value


@pytest.mark.parametrize(
    ("pieces", "joined"),
    [
        ((TWO, ONE), [[1, 2], [3, 4], [5, 6]]),
        (({"y": TWO}, {"y": ONE}), {"y": [[1, 2], [3, 4], [5, 6]]}),
        ((torch.tensor(3.0), torch.tensor(6.0)), 4),
        ((torch.tensor(3), torch.tensor(6)), 4),
        ((CODEBOOK, CODEBOOK.clone()), CODEBOOK.tolist()),
        (("a word", "a word"), "a word"),
        (("a word", "another"), ["a word", "another"]),
        ((["a", "b"], ["c"]), [["a", "b"], ["c"]]),
    ],
)
def test_pieces_joined_by_kind(pieces, joined):
    assert as_lists(join_rows(pieces, 0, ROWS, ROWS)) == joined


def test_lists_concatenated_on_request():
    assert join_rows((["a", "b"], ["c"]), 0, ROWS, ROWS, lists="always") == [*"abc"]
    layers = ({"layers": [TWO, TWO]}, {"layers": [ONE]})  # each may have the rows
    joined = join_rows(layers, 0, ROWS, ROWS, lists="if clear")
    assert [len(outputs) for outputs in joined["layers"]] == [2, 1]


def test_other_dimensions_padded_at_end():
    wide = torch.ones(1, 3)
    joined = join_rows((TWO, wide), 0, ROWS, ROWS, pad=-1.0)
    assert joined.tolist() == [[1, 2, -1], [3, 4, -1], [1, 1, 1]]
    constants = [torch.zeros(5, 3), torch.zeros(5, 4)]  # no rows
    joined = join_rows(constants, 0, [1, 1], [2, 2], pad=0.0)
    assert joined.shape == (5, 4)


def test_single_piece_is_returned_as_it_is():
    piece = torch.ones(3, 2)
    assert join_rows([piece], 0, [1], [2]) is piece


def test_constant_returned_once_whatever_its_size():
    """Twice as many entries as rows, and values that rows would not have."""
    assert join_rows([CODEBOOK, CODEBOOK.clone()], 0, [2, 2], [2, 2]) is CODEBOOK


def test_equal_entries_of_rows_are_no_constant():
    """A head that starts at zero: two entries per row, the same bits in all pieces."""
    zeros = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"\.reshape\(rows, 2, …\)"):
        join_rows([zeros, zeros.clone()], 0, [2, 2], [2, 2])
    zeros = torch.zeros(2, 2, 3)
    assert join_rows([zeros, zeros.clone()], 0, [2, 2], [2, 2]).shape == (4, 2, 3)


def test_pieces_of_other_memories_compared():
    pieces = [{"y": TWO}, {"y": ONE}]
    require_same_or_rows(pieces, ROWS, 0)
    require_same_or_rows([CODEBOOK, CODEBOOK.clone()], ROWS, 0)
    with pytest.raises(ValueError, match="cannot be joined"):
        require_same_or_rows([CODEBOOK, CODEBOOK + 1], ROWS, 0)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (
            (torch.ones(3, 2), torch.ones(2, 2)),
            r"shape \(3, 2\) for 2 rows and \(2, 2\) for 1 row cannot .* k entries per",
        ),
        ((TWO.repeat(2, 1), ONE.repeat(2, 1)), r"2 entries per .*\(rows, 2, …\)"),
        ((CODEBOOK, CODEBOOK + 1), r"\(4, 3\) for 2 rows and \(4, 3\) for 1 row"),
        (({"a": TWO}, {"b": ONE}), "mappings with different keys"),
        (
            (pack_sequence([TWO[0], TWO[1]]), pack_sequence([ONE[0]])),
            "PackedSequences cannot be joined",
        ),
    ],
)
def test_unjoinable_pieces_refused(pieces, words):
    with pytest.raises(ValueError, match=words):
        join_rows(pieces, 0, ROWS, ROWS)


def test_pieces_of_weight_zero_left_out():
    numbers = (torch.tensor(float("nan")), torch.tensor(6.0))
    assert join_rows(numbers, 0, [0, 3], ROWS) == 6


@pytest.mark.parametrize(
    ("shape", "dim", "entries"),
    [
        ((6, 2), 0, 2),
        ((3,), 0, 1),
        ((4, 3), 1, 1),
        ((4,), 0, 0),
        ((), 0, 0),
        ((3,), 1, 0),
    ],
)
def test_entries_per_row_of_three_rows(shape, dim, entries):
    assert entries_per_row(torch.zeros(shape), 3, dim) == entries
