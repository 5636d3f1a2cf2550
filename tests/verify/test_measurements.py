"""What is measured of a few rows, beside loss and gradients, computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from harness.small_looks import ROWS, asked

from scatterpar.verify.measurements import (
    attributes_that_calls_move,
    bytes_per_row,
    losses_of_parts,
    outputs_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*calls.*|.*last.*")


def test_outputs_without_graph_same_state(monkeypatch):
    first, second = asked(monkeypatch, lambda runs: outputs_of(runs, [[0], [2]]))
    assert (first.item(), second.item()) == (3, 7)
    assert first.grad_fn is second.grad_fn is None
    assert first.requires_grad  # a criterion may ask for a gradient of it


def test_attributes_moved_by_calls_named(monkeypatch):
    names = asked(monkeypatch, lambda runs: attributes_that_calls_move(runs, [0]))
    assert names == ["the attribute 'last'"]


def test_memory_of_a_row_without_parameters(monkeypatch):
    """The product with the weight keeps its input: a number of 8 bytes."""
    assert asked(monkeypatch, lambda runs: bytes_per_row(runs, [0, 1])) == 8


def test_memory_unknown_if_code_fails(monkeypatch):
    rows = [len(ROWS)]  # there is no such row
    assert asked(monkeypatch, lambda runs: bytes_per_row(runs, rows)) == math.inf


def test_losses_of_parts_differentiate_output(monkeypatch):
    """Of two rows and of one: their sum of squares."""
    output = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)

    def squares(rows, _):
        return rows.square().sum()

    def question(runs):
        return losses_of_parts(runs, output, [[0, 1], [2]])

    first, second = asked(monkeypatch, question, squares)
    assert (first.loss, second.loss) == (5, 9)
    assert first.gradients[0].tolist() == [2, 4, 0]
    assert second.gradients[0].tolist() == [0, 0, 6]
