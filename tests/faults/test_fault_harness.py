"""The grid can fail: an engine that does any one thing wrong is caught, by name."""

from __future__ import annotations

import contextlib

import pytest
import torch

from faults.grid import LAYOUTS, Bench
from faults.places import PLACES
from scatterpar import ScatterOnceParallel

pytestmark = [pytest.mark.core, pytest.mark.draws]

PLACE = PLACES["backward of a Function"]
honest = ScatterOnceParallel.forward_backward


@pytest.fixture
def bench():
    bench = Bench(LAYOUTS["shared"])
    with bench.engine:
        bench.back_to_start(bench.subject, accumulate=True)
        yield bench


# What an engine does to its module before it fails, and to the error afterwards.


def exchange(module):
    module.leave.bias.grad = module.leave.bias.grad.clone()


CHANGES = {
    "changed: norm._buffers['running_mean']": lambda module: module.norm.running_mean.add_(1),
    "changed: leave.bias.grad": lambda module: module.leave.bias.grad.add_(1),
    "changed: leave.bias.grad (another object)": exchange,
    "changed: torch's generator": lambda module: torch.rand(()),
    "changed: root.calls (another object)": lambda module: setattr(module, "calls", 99),
    "changed: norm._forward_hooks": lambda module: module.norm.register_forward_hook(print),
}


def another(error):
    raise type(error)(*error.args)


ERRORS = {
    "another error: ValueError": another,
    "notes: []": lambda error: error.__notes__.clear(),
}


@pytest.mark.parametrize("words", [*CHANGES, *ERRORS, "nothing was raised"])
def test_an_engine_that_does_one_thing_wrong_is_caught(bench, monkeypatch, words):
    def step(self, *args, **kwargs):
        if words in CHANGES:
            CHANGES[words](self.module)
        with contextlib.suppress(*[ValueError] * (words == "nothing was raised")):
            try:
                honest(self, *args, **kwargs)
            except ValueError as error:
                if words in ERRORS:
                    ERRORS[words](error)
                raise

    monkeypatch.setattr(ScatterOnceParallel, "forward_backward", step)
    wrong = bench.bad_step(PLACE, "ValueError", positions=[(2, 2)])
    assert any(words in each for each in wrong), wrong


def test_an_honest_engine_passes_and_a_next_step_that_is_not_exact_does_not(bench, monkeypatch):
    assert bench.bad_step(PLACE, "ValueError", positions=[(2, 2)]) == []
    assert bench.good_step(PLACE, True) == []
    bench.back_to_start(bench.subject, accumulate=True)

    def step(self, *args, **kwargs):
        honest(self, *args, **kwargs)
        gradient = self.module.leave.bias.grad
        gradient[0] = torch.nextafter(gradient[0], gradient[0] + 1)

    monkeypatch.setattr(ScatterOnceParallel, "forward_backward", step)
    assert bench.good_step(PLACE, True) == ["leave.bias.grad"]
