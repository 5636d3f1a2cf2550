"""Pieces of a result are joined in the order of the batch's rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from scatterpar.batch.joining import (
    Entries,
    KnownTensors,
    NumberWeights,
    combined_number,
    entries_per_row,
    join_rows,
    require_same_or_rows,
)

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
            r"shape \(3, 2\) for 2 rows and \(2, 2\) for 1 row cannot .* has k entries",
        ),
        ((TWO.repeat(2, 1), ONE.repeat(2, 1)), r"2 entries.*\(rows, 2, …\)"),
        # The states of recurrent layers: layers, rows, features.
        (
            (torch.ones(1, 2, 3), torch.ones(1, 1, 3)),
            r"return state\.transpose\(0, 1\)",
        ),
        ((torch.ones(3, 2), torch.ones(3, 1)), r"return state\.transpose\(0, 1\)"),
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


# --- numbers ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_mean_ignores_parts_without_terms(dtype):
    numbers = [torch.tensor(value, dtype=dtype) for value in (1.0, torch.nan, 3.0)]
    mean = combined_number(numbers, NumberWeights([1, 0, 3]))
    assert mean.dtype == dtype
    assert mean.item() == 2.5


def test_mean_of_no_terms_is_that_of_torch():
    numbers = [torch.tensor(torch.nan)] * 2
    assert combined_number(numbers, NumberWeights([0, 0])).isnan()


def test_mean_of_equal_numbers_keeps_their_bits():
    numbers = [torch.tensor(0.1, dtype=torch.float64)] * 3
    assert combined_number(numbers, NumberWeights([1, 1, 1])) == 0.1


def test_sum_adds_in_its_dtype():
    numbers = [torch.tensor(2), torch.tensor(3)]
    found = combined_number(numbers, NumberWeights([1, 2], is_sum=True))
    assert found.item() == 5
    assert found.dtype == torch.int64


def test_numbers_of_some_positions_are_added():
    pieces = [
        (TWO, torch.tensor(2), torch.tensor(1.0)),
        (ONE, *map(torch.tensor, (3, 4.0))),
    ]
    known = KnownTensors({1: NumberWeights(ROWS, is_sum=True)})
    _, total, mean = join_rows(pieces, 0, ROWS, ROWS, known=known)
    assert (total.item(), mean.item()) == (5, 2.0)


# --- tensors whose sizes may be those of rows ---


def test_fixed_entries_are_returned_once_or_refused():
    known = KnownTensors(entries={1: Entries.FIXED})
    pieces = [(TWO, torch.arange(2)), (TWO, torch.arange(2))]
    rows, entries = join_rows(pieces, 0, [2, 2], [2, 2], known=known)
    assert rows.shape == (4, 2)
    assert entries.tolist() == [0, 1]
    pieces[1] = TWO, torch.arange(2) + 1
    with pytest.raises(ValueError, match="2 entries for any number of rows"):
        join_rows(pieces, 0, [2, 2], [2, 2], known=known)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(4, 1), r"\.reshape\(rows, 2, …\)"),
        (torch.tensor([[1.0], [1.0], [3.0], [3.0]]), r"\.reshape\(rows, 2, …\)"),
        (torch.ones(2, 2), "a matrix of all pairs of rows"),
    ],
)
def test_equal_pieces_without_rows_are_refused(tensor, words):
    known = KnownTensors(entries={0: Entries.OTHERS})
    with pytest.raises(ValueError, match=words):
        join_rows([tensor, tensor.clone()], 0, [2, 2], [2, 2], known=known)
