"""What becomes of the other replicas when one fails."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from harness.models import Of
from harness.notes import note_of
from harness.oracle import build
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

SECONDS = 120


def raised(calls, devices, kind, *, accum, rows):
    """What a step of three replicas raises; ``calls`` gets the number of each share it
    begins.
    """
    function = lambda module, inputs: module.linear(calls(inputs))  # noqa: E731
    model = build(lambda: Of(function, linear=nn.Linear(2, 1)))
    inputs = torch.arange(3.0 * rows, dtype=torch.float64).repeat(2, 1).T.contiguous()
    engine = ScatterOnceParallel(model, accum, devices(3), verify=False)
    with engine, pytest.raises(kind) as caught:
        engine.forward_backward(inputs, criterion=lambda output, _: output.mean())
    return caught.value


@pytest.mark.parametrize("failing", [0, 2])
def test_siblings_stop_at_next_sub_step(devices, failing):
    """A replica's first sub-step fails once every other replica is in its own first
    sub-step.
    """
    accum, visits, barrier, error = 40, [], threading.Barrier(3), ValueError("boom")

    def meet(inputs):
        replica = int(inputs[0, 0]) // accum
        visits.append(replica)
        if visits.count(replica) == 1:
            barrier.wait(SECONDS)
            if replica == failing:
                raise error
            while not hasattr(error, "__notes__"):
                time.sleep(0.01)
            time.sleep(0.2)  # for the cancellation to get around: it is the next thing
        return inputs

    assert raised(meet, devices, ValueError, accum=accum, rows=accum) is error
    assert sorted(visits) == [0, 1, 2]
    rows = (failing * accum,)
    assert error.__notes__ == [note_of(failing, devices(3)[failing], 0, accum, rows)]


@pytest.mark.contract
@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_lowest_error_raised_others_noted(devices, kind):
    errors, barrier = [kind(f"from {i}") for i in range(3)], threading.Barrier(3)

    def fail(inputs):
        barrier.wait(SECONDS)
        raise errors[int(inputs[0, 0]) // 4]

    for _ in range(3):  # the same exceptions
        assert raised(fail, devices, kind, accum=2, rows=4) is errors[0]
        assert errors[0].__notes__ == [
            note_of(0, devices(3)[0], 0, sub_steps=2, rows=range(2)),
            f"replica 1 failed too: {errors[1]!r}",
            f"replica 2 failed too: {errors[2]!r}",
        ]
