"""What is restored between the runs of a look, and at its end."""

from __future__ import annotations

import time

import pytest
from harness.small_looks import asked

from scatterpar.numerics.comparison import Inconclusive

pytestmark = pytest.mark.filterwarnings("ignore:.*calls.*|.*last.*")


def test_nothing_runs_after_deadline(monkeypatch):
    def question(runs):
        runs.user_code._deadline = time.monotonic() - 1
        with pytest.raises(Inconclusive, match="it takes too long"):
            runs.at_once([0], runs.replica_task)

    asked(monkeypatch, question)


def test_restart_restores_module_and_replica(monkeypatch):
    def question(runs):
        modules = runs.own_task.module, runs.replica_task.module
        for module in modules:
            module.last = 7
            module.calls += 7
        runs.user_code.restart()
        return [(module.last, module.calls.item()) for module in modules]

    assert asked(monkeypatch, question) == [(0, 0), (0, 0)]


def test_evaluation_ends_with_its_body(monkeypatch):
    def question(runs):
        layer = runs.own_task.module.linear
        with runs.user_code.in_evaluation():
            runs.at_once([0], runs.own_task)
            inside = layer.training
        return inside, layer.training

    assert asked(monkeypatch, question) == (False, True)
