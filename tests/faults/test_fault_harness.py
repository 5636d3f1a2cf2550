"""The grid can fail: an engine that does any one thing wrong is caught, by name."""

from __future__ import annotations

import gc

import pytest
import torch

from faults import grid
from faults.grid import LAYOUTS, Bench
from faults.places import PLACES
from scatterpar import ScatterOnceParallel

pytestmark = [pytest.mark.core, pytest.mark.draws]

PLACE = PLACES["backward of a Function"]
kept = []


@pytest.fixture
def bench():
    bench = Bench(LAYOUTS["shared"])
    with bench.engine:
        bench.back_to_start(bench.subject, accumulate=True)
        yield bench
    kept.clear()
    gc.collect()


def sabotaged(monkeypatch, bench, before=lambda engine: None, after=lambda error: error):
    """What the grid says of a step that does ``before`` first, and raises ``after``'s error."""
    honest = ScatterOnceParallel.forward_backward

    def step(self, *args, **kwargs):
        before(self)
        try:
            return honest(self, *args, **kwargs)
        except BaseException as error:
            made = after(error)
            if made is None:
                return None
            try:
                raise made from None
            finally:
                del made  # the traceback holds this frame

    with monkeypatch.context() as patch:
        patch.setattr(ScatterOnceParallel, "forward_backward", step)
        return bench.bad_step(PLACE, "ValueError", positions=[(2, 2)])


def exchange(engine):
    engine.module.leave.bias.grad = engine.module.leave.bias.grad.clone()


CHANGES = {
    "norm._buffers['running_mean']": lambda engine: engine.module.norm.running_mean.add_(1),
    "leave.bias.grad": lambda engine: engine.module.leave.bias.grad.add_(1),
    "leave.bias.grad (another object)": exchange,
    "torch's generator": lambda engine: torch.rand(()),
    "root.calls (another object)": lambda engine: setattr(engine.module, "calls", 99),
    "norm._forward_hooks": lambda engine: engine.module.norm.register_forward_hook(print),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_failed_step_changes_is_named(bench, monkeypatch, what):
    wrong = sabotaged(monkeypatch, bench, CHANGES[what])
    assert any(word.startswith(f"changed: {what}") for word in wrong), wrong


def forget(error):
    error.__notes__.clear()
    return error


def keep(error):
    kept.append(error)
    return error


ERRORS = {
    "another error: ValueError": lambda error: type(error)(*error.args),
    "notes: []": forget,
    "nothing was raised": lambda error: None,
    "activations alive": keep,
}


@pytest.mark.parametrize("words", ERRORS)
def test_what_becomes_of_the_error_is_said(bench, monkeypatch, words):
    monkeypatch.setattr(grid, "LEAK_SECONDS", 1)  # of which nobody else needs to be sure
    (wrong,) = sabotaged(monkeypatch, bench, after=ERRORS[words])
    assert wrong.endswith(words)


def test_an_honest_engine_passes_and_a_next_step_that_is_not_exact_does_not(bench, monkeypatch):
    assert sabotaged(monkeypatch, bench) == []
    assert bench.good_step(PLACE, True) == []
    bench.back_to_start(bench.subject, accumulate=True)
    honest = ScatterOnceParallel.forward_backward

    def step(self, *args, **kwargs):
        honest(self, *args, **kwargs)
        gradient = self.module.leave.bias.grad
        gradient[0] = torch.nextafter(gradient[0], gradient[0] + 1)

    monkeypatch.setattr(ScatterOnceParallel, "forward_backward", step)
    assert bench.good_step(PLACE, True) == ["leave.bias.grad"]
