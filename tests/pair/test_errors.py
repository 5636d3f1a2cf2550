"""Errors of the user's, noted where they happened, and calls inside of calls.

What is refused is in ``tests/faults/bad_inputs.txt``.
"""

from __future__ import annotations

import threading
import traceback

import pytest
from harness.models import CLASSES, FEATURES
from harness.notes import beginning_of_note
from harness.oracle import randint, randn
from torch import nn

from pair.common import Shared
from scatterpar import DataParallelCriterion, DataParallelModel

pytestmark = pytest.mark.core

INPUTS, TARGETS = randn(9, FEATURES), randint(CLASSES, 9)


class Unusual(Exception):
    """Cannot be made from a message alone, as torch's own ``parallel_apply`` would."""

    def __init__(self, code, reason):
        super().__init__(code, reason)


class Fails(nn.Module):
    """Fails for the shares that start with some rows."""

    def __init__(self, *rows):
        super().__init__()
        self.rows, self.raised = {float(INPUTS[row, 0]) for row in rows}, Shared()

    def forward(self, output, targets=None):
        if float(output.flatten()[0]) in self.rows:
            self.fail()
        return output if targets is None else output.mean()

    def fail(self):
        error = Unusual(42, "a reason")
        self.raised.found.append(error)
        raise error


def run(part, module, device_ids):
    if part == "model":
        return DataParallelModel(module, device_ids)(INPUTS)
    outputs = DataParallelModel(nn.Identity(), device_ids)(INPUTS)
    return DataParallelCriterion(module, device_ids)(outputs, TARGETS)


@pytest.mark.parametrize("part", ["model", "criterion"])
@pytest.mark.parametrize(("replicas", "row", "replica"), [(4, 5, 2), (4, 0, 0), (1, 0, 0)])
def test_the_user_s_exception_object_traceback_and_a_note(devices, part, replicas, row, replica):
    module = Fails(row)
    devices = devices(replicas)
    with pytest.raises(Unusual) as caught:
        run(part, module, devices)
    assert caught.value is module.raised.found[0]
    assert caught.value.args == (42, "a reason")
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-2:] == ["forward", "fail"]
    assert caught.value.__notes__[0].startswith(beginning_of_note(replica, devices[replica]))


def test_the_lowest_replica_s_error_a_note_of_the_others_and_the_next_call_works(devices):
    module = Fails(3, 7)
    model = DataParallelModel(module, devices(4))
    with pytest.raises(Unusual) as caught:
        model(INPUTS)
    assert caught.value.__notes__[0].startswith(beginning_of_note(1, devices(4)[1]))
    assert len(caught.value.__notes__) == 1 or "replica 3 failed too" in caught.value.__notes__[1]
    module.rows.clear()
    assert len(model(INPUTS)) == 4


@pytest.mark.parametrize("part", ["model", "criterion"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_call_from_inside_a_call_is_an_error_and_no_hang(devices, part, replicas):
    class Again(nn.Module):
        def forward(self, *_):
            return wrapper[0](*given)

    kind = DataParallelModel if part == "model" else DataParallelCriterion
    wrapper = [kind(Again(), devices(replicas))]
    outputs = DataParallelModel(nn.Identity(), devices(replicas))(INPUTS)
    given = (INPUTS,) if part == "model" else (outputs, TARGETS)
    words = rf"this {kind.__name__} is in the middle of a step: another cannot start from inside"
    with pytest.raises(RuntimeError, match=words):
        wrapper[0](*given)
    wrapper.clear()


def test_a_call_from_another_thread_meanwhile(devices):
    inside, done, found = threading.Event(), threading.Event(), []

    class Waits(nn.Module):
        def forward(self, inputs):
            inside.set()
            assert done.wait(120)
            return inputs

    pair = DataParallelModel(Waits(), devices(2))

    thread = threading.Thread(target=lambda: found.append(pair(INPUTS)))
    thread.start()
    assert inside.wait(120)
    with pytest.raises(RuntimeError, match="nor from a second thread"):
        pair(INPUTS)
    done.set()
    thread.join()
    assert len(found[0]) == 2
