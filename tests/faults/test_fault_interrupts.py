"""Ctrl-C at any moment, twice too: prompt, whole or not at all, and the next step is exact."""

from __future__ import annotations

import json

import pytest

from faults.forked import run_forked
from faults.processes import run

pytestmark = pytest.mark.core

LAYOUTS = ("shared", "virtual", "alone", "accelerator")
TWO_PASSES = "whole batch: forward, either pass"


def strikes(quick, few, many, layouts=LAYOUTS):
    """Few strikes on some layouts; with ``-m slow`` many on each."""
    slow = [pytest.param(layout, many, marks=pytest.mark.slow) for layout in layouts]
    return pytest.mark.parametrize(("layout", "times"), [*((name, few) for name in quick), *slow])


@pytest.fixture
def lines_of(request, layout):
    """What a script says line by line on a layout, after it was seen to have come to its end."""
    variables = {}
    if layout == "accelerator":
        variables = request.getfixturevalue("simulated_accelerator")
        if not variables:
            pytest.skip("there is no g++ to build the simulated accelerator")

    def lines(module, *arguments):
        script = ("-m", module, layout, *arguments)
        outcome = run(*script, **variables) if variables else run_forked(*script)
        assert outcome.code == 0, outcome.err
        assert outcome.out.endswith("end\n"), outcome.err
        found = [json.loads(line) for line in outcome.out.splitlines()[:-1]]
        wrong = [line for line in found if line["wrong"]]
        assert not wrong, "\n".join(map(str, wrong))
        return found

    return lines


@strikes(["shared", "alone"], few="16", many="160")
def test_between_any_two_instructions(lines_of, layout, times):
    found = lines_of("faults.everywhere", times)
    assert len(found) > int(times) // 2
    assert not all(line["whole"] for line in found)


@strikes(["virtual"], few="14", many="160")
def test_between_any_two_instructions_of_two_passes(lines_of, layout, times):
    found = lines_of("faults.everywhere", times, TWO_PASSES)
    assert len(found) > 7
    assert not all(line["whole"] for line in found)


@strikes(["shared"], few="24", many="160", layouts=["accelerator"])
def test_between_any_two_instructions_of_the_generators(lines_of, layout, times):
    """A criterion of all rows draws in the main thread, from a generator that is put in there.

    An interrupt in the middle of that left it in for good, or a lock taken.
    """
    found = lines_of("faults.everywhere", times, TWO_PASSES, "threads/generators.py")
    assert len(found) > 12
    assert {line["where"].partition(":")[0] for line in found} == {"generators.py"}


@strikes(["virtual", "alone"], few="16", many="48")
def test_real_signals_at_random_moments_once_and_twice(lines_of, layout, times):
    found = lines_of("faults.ctrl_c", times)
    assert len(found) == int(times)
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

heard = threading.Semaphore(0)

def hear(*given):
    heard.release()
    signal.default_int_handler(*given)

def interrupt(times):
    while len(visits) < {at_once}:
        time.sleep(0.01)
    for _ in range(times):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        heard.acquire()  # two that wait are one

torch.manual_seed(0)
model = Slow(2, 1)
inputs = torch.arange(240.0).reshape(120, 2)
engine = ScatterOnceParallel(model, 60, {devices}, verify=False)  # one replica looks
signal.signal(signal.SIGINT, hear)
threading.Thread(target=interrupt, args=({times},)).start()
begun = time.monotonic()
try:
    engine.forward_backward(inputs, criterion=lambda output, _: output.mean())
    print("finished")
except KeyboardInterrupt:
    print("interrupted", len(visits), model.weight.grad)
took = time.monotonic() - begun
assert took < 100, took
late = [t for t in threading.enumerate() if t.name.startswith("scatterpar replica")]

def forward_while_late_ones_end(self, inputs):
    release.set()
    for thread in late:
        thread.join(60)
    return nn.Linear.forward(self, inputs)

Slow.forward = {then}
engine.forward_backward(inputs, criterion=lambda output, _: output.mean())
expected, = torch.autograd.grad(model(inputs).mean(), model.weight)
assert torch.allclose(model.weight.grad, expected)
print("exact")
"""


SHARED, ALONE = '["cpu"] * 2', '["cpu"]'
VIRTUAL = '["cpu:0", "cpu:1"]'


@pytest.mark.contract
@pytest.mark.parametrize("devices", [SHARED, ALONE, pytest.param(VIRTUAL, marks=pytest.mark.slow)])
def test_a_long_step_ends_at_its_next_sub_step(devices):
    script = LONG.format(
        pause="time.sleep(0.1)", devices=devices, times=1, at_once=1, then="nn.Linear.forward"
    )
    outcome = run_forked("-c", script)
    assert outcome.code == 0, outcome.err
    first, last = outcome.out.splitlines()
    assert last == "exact"
    word, visits, gradient = first.split()
    assert (word, gradient) == ("interrupted", "None")
    assert int(visits) < 60


@pytest.mark.parametrize("devices", [VIRTUAL, pytest.param(SHARED, marks=pytest.mark.slow)])
def test_the_second_time_does_not_wait_for_a_replica_that_is_stuck(devices):
    """The sub-steps that were stuck end during the next step, which they do not change."""
    options = {"times": 2, "at_once": 2, "then": "forward_while_late_ones_end"}
    script = LONG.format(pause="release.wait(1000)", devices=devices, **options)
    outcome = run_forked("-c", script)
    assert outcome.code == 0, outcome.err
    assert "terminate called" not in outcome.err
    assert outcome.out.splitlines() == ["interrupted 2 None", "exact"]
