"""Runs of a few rows in different ways, each from the same state, computed by hand."""

from __future__ import annotations

import pytest
from harness.small_looks import asked

pytestmark = pytest.mark.filterwarnings("ignore:.*calls.*|.*last.*")


def test_run_begins_and_ends_at_step_state(monkeypatch):
    """Rows 1 and 2 at once: 2 * (1 + 2) + 2 * 1; the call counts one, each time."""

    def question(runs):
        tasks = runs.own_task, runs.replica_task, runs.replica_task
        return [runs.at_once([0, 1], task) for task in tasks]

    for result in asked(monkeypatch, question):
        assert result.loss == 8
        assert [gradient.item() for gradient in result.gradients] == [3]


def test_parts_continue_unless_restarted(monkeypatch):
    """The second part is the second call: 2 * 2 + 2. From the same state: 2 * 2 + 1."""

    def question(runs):
        parts, task = [[0], [1]], runs.replica_task
        moved = runs.run(parts, task)
        return moved, runs.run(parts, task, prepare=runs.user_code.restart)

    moved, same = asked(monkeypatch, question)
    assert (moved.result.loss, same.result.loss) == (3 + 6, 3 + 5)
    states = [state["the buffer 'calls'"][()].item() for state in moved.states]
    assert states == [1, 2]


def test_weight_multiplies_zero_skips(monkeypatch):
    def question(runs):
        return runs.run([[0], [1]], runs.replica_task, [0.5, 0.0])

    run = asked(monkeypatch, question)
    assert (run.result.loss, run.result.gradients[0].item()) == (1.5, 0.5)
    assert run.num_with_gradient == 1


def test_look_leaves_module_and_replicas(monkeypatch):
    """A step on two devices is one call of each; the look's calls do not count."""
    modules = []

    def question(runs):
        modules.append(runs.own_task.module)
        runs.run([[0], [1], [2]], runs.own_task)

    asked(monkeypatch, question)
    assert modules[0].calls == 1


def test_scale_multiplies_gradients_alone(monkeypatch):
    def question(runs):
        task = runs.replica_task
        return [runs.at_once([0], task, scale=scale) for scale in (1.0, 2.0)]

    once, twice = asked(monkeypatch, question)
    assert once.loss == twice.loss
    assert 2 * once.gradients[0] == twice.gradients[0]
