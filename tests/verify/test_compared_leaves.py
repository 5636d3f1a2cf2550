"""Whose gradients a look compares, and their sums over copies."""

from __future__ import annotations

import pytest
import torch
from harness.small_looks import asked

pytestmark = pytest.mark.filterwarnings("ignore:.*calls.*|.*last.*")


def test_leaf_of_the_user_and_its_copy(monkeypatch):
    leaves, copies, weights = asked(
        monkeypatch,
        lambda runs: (
            runs.leaves.all(),
            runs.leaves.copies(),
            [task.module.linear.weight for task in (runs.own_task, runs.replica_task)],
        ),
    )
    assert leaves[0] is weights[0]
    assert copies[0] is weights[1]


def test_gradients_of_copies_are_added(monkeypatch):
    def question(runs):
        gradients = [torch.ones(1, 1), None]
        sums = runs.leaves.sums(gradients), runs.leaves.sums(())
        runs.leaves.clear()
        return *sums, runs.leaves.sums(())

    some, zeros, none = asked(monkeypatch, question)
    assert [total.item() for total in some] == [1]
    assert [total.item() for total in zeros] == [0]
    assert none == []
