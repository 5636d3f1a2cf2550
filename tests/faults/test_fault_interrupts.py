"""Ctrl-C at any moment, twice too: prompt, whole or not at all, and the next step is exact."""

from __future__ import annotations

import json

import pytest

from faults.processes import of, run, run_on_layouts, with_slow_accelerator

LAYOUTS = ("shared", "virtual", "alone", "accelerator")
STRIKES = "24"


@pytest.fixture(scope="module", params=["40", pytest.param("160", marks=pytest.mark.slow)])
def positions(request):
    return request.param


@pytest.fixture(scope="module")
def everywhere(request, positions):
    return run_on_layouts(request, LAYOUTS, positions == "160", "faults.everywhere", positions)


@pytest.fixture(scope="module")
def struck(request, positions):
    return run_on_layouts(request, LAYOUTS, positions == "160", "faults.ctrl_c", STRIKES)


@pytest.fixture(scope="module", params=["20", pytest.param("160", marks=pytest.mark.slow)])
def in_two_passes(request):
    place, many = "whole batch: forward, either pass", request.param == "160"
    return run_on_layouts(request, LAYOUTS, many, "faults.everywhere", request.param, place)


def judged(outcome):
    """Every line of a script, after it was seen to have come to its end."""
    assert outcome.code == 0, outcome.err
    assert outcome.out.endswith("end\n"), outcome.err
    found = [json.loads(line) for line in outcome.out.splitlines()[:-1]]
    wrong = [line for line in found if line["wrong"]]
    assert not wrong, "\n".join(map(str, wrong))
    return found


@pytest.mark.parametrize("layout", with_slow_accelerator(LAYOUTS))
def test_between_any_two_instructions(everywhere, positions, layout):
    found = judged(of(everywhere, layout))
    assert len(found) > int(positions) // 2
    assert not all(line["whole"] for line in found)


@pytest.mark.parametrize("layout", with_slow_accelerator(LAYOUTS))
def test_between_any_two_instructions_of_two_passes(in_two_passes, layout):
    found = judged(of(in_two_passes, layout))
    assert len(found) > 10
    assert not all(line["whole"] for line in found)


@pytest.mark.parametrize("layout", with_slow_accelerator(("shared", "accelerator")))
def test_between_any_two_instructions_of_the_random_streams(request, layout):
    """A criterion of all rows draws in the main thread, from a stream that is opened there.

    An interrupt in the middle of opening it left it open for good, or its lock taken.
    """
    place, file = "whole batch: forward, either pass", "threads/randomness.py"
    many = layout == "accelerator"
    outcomes = run_on_layouts(
        request, [layout], many, "faults.everywhere", "160" if many else "40", place, file
    )
    found = judged(of(outcomes, layout))
    assert len(found) > 20
    assert {line["where"].partition(":")[0] for line in found} == {"randomness.py"}


@pytest.mark.parametrize("layout", with_slow_accelerator(LAYOUTS))
def test_real_signals_at_random_moments_once_and_twice(struck, layout):
    found = judged(of(struck, layout))
    assert len(found) == int(STRIKES)
    assert any(line["inside"] for line in found)


LONG = """
import os, signal, threading, time
import torch
from torch import nn
from scatterpar import ScatterOnceParallel

visits, release = [], threading.Event()

class Slow(nn.Linear):
    def forward(self, inputs):
        visits.append(int(inputs[0, 0]))
        {pause}
        return super().forward(inputs)

def interrupt(times):
    while len(visits) < {at_once}:
        time.sleep(0.01)
    for _ in range(times):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

# torch imports parts of itself in its first backward; an import that is cut in half stays so.
torch.ones(1, requires_grad=True).sum().backward(torch.ones(()))
torch.manual_seed(0)
model = Slow(2, 1)
inputs = torch.arange(240.0).reshape(120, 2)
engine = ScatterOnceParallel(model, 60, {devices})
threading.Thread(target=interrupt, args=({times},)).start()
begun = time.monotonic()
try:
    engine.forward_backward(inputs, criterion=lambda output, _: output.mean())
    print("finished")
except KeyboardInterrupt:
    print("interrupted", len(visits), model.weight.grad)
took = time.monotonic() - begun
assert took < 100, took
Slow.forward = nn.Linear.forward
engine.forward_backward(inputs, criterion=lambda output, _: output.mean())
expected, = torch.autograd.grad(model(inputs).mean(), model.weight)
assert torch.allclose(model.weight.grad, expected)
print("exact")
"""


@pytest.mark.parametrize("devices", ['["cpu"] * 2', '["cpu:0", "cpu:1"]', '["cpu"]'])
def test_a_long_step_ends_at_its_next_sub_step(devices):
    script = LONG.format(pause="time.sleep(0.1)", devices=devices, times=1, at_once=1)
    outcome = run("-c", script)
    assert outcome.code == 0, outcome.err
    first, last = outcome.out.splitlines()
    assert last == "exact"
    word, visits, gradient = first.split()
    assert (word, gradient) == ("interrupted", "None")
    assert int(visits) < 60


@pytest.mark.parametrize("devices", ['["cpu"] * 2', '["cpu:0", "cpu:1"]'])
def test_the_second_time_does_not_wait_for_a_replica_that_is_stuck(devices):
    script = LONG.format(pause="release.wait(1000)", devices=devices, times=2, at_once=2)
    outcome = run("-c", script)
    assert outcome.code == 0, outcome.err
    assert "terminate called" not in outcome.err
    assert outcome.out.splitlines() == ["interrupted 2 None", "exact"]
