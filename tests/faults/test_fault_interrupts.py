"""Ctrl-C at any moment, twice too: prompt, whole or not at all, and the next step is
exact.
"""

from __future__ import annotations

import json
import re
import sys

import pytest

from faults.processes import run, run_forked

pytestmark = pytest.mark.core

TWO_PASSES = "whole batch: forward, either pass"
# A criterion of all rows draws in the main thread, from a generator that is put in
# there. An interrupt in the middle of that left it in for good, or a lock taken.
OF_GENERATORS = TWO_PASSES, "threads/generators.py"
CASES = [  # the layout, how often Ctrl-C strikes, and where
    *(
        ("shared", 16),
        ("alone", 8),
    ),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            *((name, 160) for name in ("shared", "virtual", "alone", "accelerator")),
            # a step in two passes takes six times as long
            ("virtual", 8, TWO_PASSES),
            ("shared", 16, *OF_GENERATORS),
            ("virtual", 64, TWO_PASSES),
            ("accelerator", 64, TWO_PASSES),
            ("accelerator", 64, *OF_GENERATORS),
        )
    ),
]


def interrupted(request, layout, *arguments):
    """What the script found, a line of each interrupted step; nothing is wrong."""
    script = ("-m", "faults.interrupts", *map(str, arguments))
    if layout != "accelerator":
        outcome = run_forked(*script)
    elif variables := request.getfixturevalue("simulated_accelerator"):
        outcome = run(*script, **variables)
    else:
        pytest.skip("there is no g++ to build the simulated accelerator")
    assert outcome.code == 0, outcome.err
    assert outcome.out.endswith("end\n"), outcome.err
    found = [json.loads(line) for line in outcome.out.splitlines()[:-1]]
    wrong = [line for line in found if line["wrong"]]
    assert not wrong, "\n".join(map(str, wrong))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_interrupted_step_is_whole_or_undone(request, case):
    layout, times, *place = case
    found = interrupted(request, layout, *case)
    assert len(found) > times // 2
    if len(place) > 1:
        assert {line["where"].partition(":")[0] for line in found} == {"generators.py"}
    else:
        assert not all(line["whole"] for line in found)


SEVERAL = [
    *(("shared", 12), ("virtual", 12)),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            ("shared", 96),
            ("virtual", 96),
            ("alone", 96),
            ("accelerator", 96),
        )
    ),
]


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12),
    reason="Python 3.12 runs the handler in the trace function: the first one ends it",
)
@pytest.mark.parametrize("case", SEVERAL, ids=lambda case: "-".join(map(str, case)))
def test_engine_after_several_interrupts_is_exact(request, case):
    """Two and three in one step, some instructions apart: a second one does not wait for
    threads that compute, and what they leave is no next engine's.
    """
    found = interrupted(request, case[0], "again", *case)
    assert {line["struck"] for line in found} >= {2, 3}
    assert not all(line["whole"] for line in found)


LONG = """
import os, signal, sys, threading, time
import torch
from torch import nn
from scatterpar import ScatterOnceParallel
from scatterpar.step.turns import Scope

visits, release, heard = [], threading.Event(), threading.Semaphore(0)

class Errors:
    told, stream = threading.Event(), sys.stderr

    def write(self, text):
        self.stream.write(text)
        if "Ctrl-C" in text:
            self.told.set()

    def flush(self):
        self.stream.flush()

sys.stderr = Errors()

class Slow(nn.Linear):
    def forward(self, inputs):
        visits.append(int(inputs[0, 0]))
        {pause}
        return super().forward(inputs)

def hear(*given):
    heard.release()
    signal.default_int_handler(*given)

def interrupt(times):
    while len(visits) < times:
        time.sleep(0.01)
    for _ in range(times):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        heard.acquire()  # two that wait are one

torch.manual_seed(0)
model = Slow(2, 1)
inputs = torch.arange(240.0).reshape(120, 2)
engine = ScatterOnceParallel(model, 60, {devices}, verify=False)  # one replica looks

class Finds:
    def look_if_due(self, attempt, task):
        return Scope.FUNCTION
    def tell(self):
        pass

if {in_turns}:
    engine._verifier = Finds()
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

def forward(self, inputs):
    release.set()
    if {times} == 2:  # sub-steps that were stuck end during this step, which they do not change
        for thread in late:
            thread.join(60)
    return nn.Linear.forward(self, inputs)

Slow.forward = forward
engine.forward_backward(inputs, criterion=lambda output, _: output.mean())
expected, = torch.autograd.grad(model(inputs).mean(), model.weight)
assert torch.allclose(model.weight.grad, expected)
print("exact")
"""
SHARED, ALONE, VIRTUAL = '["cpu"] * 2', '["cpu"]', '["cpu:0", "cpu:1"]'


def visits_before(times, devices, pause, *, in_turns=False):
    """How many sub-steps had begun when Ctrl-C had come so often; the next step is
    exact.
    """
    script = LONG.format(pause=pause, devices=devices, times=times, in_turns=in_turns)
    outcome = run_forked("-c", script)
    assert outcome.code == 0, outcome.err
    assert "terminate called" not in outcome.err
    first, last = outcome.out.splitlines()
    word, visits, gradient = first.split()
    assert (word, gradient, last) == ("interrupted", "None", "exact")
    return int(visits)


@pytest.mark.contract
@pytest.mark.parametrize(
    "devices", [SHARED, ALONE, pytest.param(VIRTUAL, marks=pytest.mark.slow)]
)
def test_long_step_ends_at_next_sub_step(devices):
    assert visits_before(1, devices, "time.sleep(0.1)") < 60


@pytest.mark.parametrize(
    "devices", [VIRTUAL, pytest.param(SHARED, marks=pytest.mark.slow)]
)
def test_second_ctrl_c_leaves_stuck_replica(devices):
    assert visits_before(2, devices, "release.wait(1000)") == 2


@pytest.mark.parametrize(
    "devices", [SHARED, pytest.param(VIRTUAL, marks=pytest.mark.slow)]
)
def test_replica_that_waits_for_its_turn_ends(devices):
    assert visits_before(1, devices, "time.sleep(0.1)", in_turns=True) < 60


def test_first_ctrl_c_names_stuck_replica():
    """Some seconds later: its number, its device, and the line that waits."""
    pause = "len(visits) == 1 or sys.stderr.told.wait(60)"
    script = LONG.format(pause=pause, devices=VIRTUAL, times=1, in_turns=False)
    outcome = run_forked("-c", script)
    assert outcome.code == 0, outcome.err
    assert re.search(r"Ctrl-C: the step waits for replica [01], cpu:[01]", outcome.err)
    assert " forward. A second Ctrl-C does not wait" in outcome.err


def test_second_ctrl_c_leaves_stuck_turn():
    """The other replica waits for it, and ends at the first Ctrl-C."""
    pause = "len(visits) == 1 or release.wait(1000)"
    assert visits_before(2, VIRTUAL, pause, in_turns=True) == 2
