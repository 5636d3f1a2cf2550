"""What becomes of the other replicas when one fails."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from harness.notes import note_of
from harness.oracle import build
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

ACCUM = 40
SECONDS = 120


class Meeting(nn.Linear):
    """Replica 0's first sub-step fails once every other replica is in its own first sub-step."""

    def forward(self, inputs):
        replica = int(inputs[0, 0]) // ACCUM
        self.visits.append(replica)
        if self.visits.count(replica) == 1:
            self.barrier.wait(SECONDS)
            if replica == self.failing:
                raise self.error
            for _ in range(100 * SECONDS):
                if hasattr(self.error, "__notes__"):
                    break
                time.sleep(0.01)
            time.sleep(0.2)  # for the cancellation to get around: it is the next thing
        return super().forward(inputs)


class Shared(list):
    """A list that replicas share, as they share any object that is not a plain container."""


def meeting(replicas, failing):
    model = build(lambda: Meeting(2, 1))
    model.visits, model.failing = Shared(), failing
    model.barrier, model.error = threading.Barrier(replicas), ValueError("boom")
    return model


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_siblings_stop_at_their_next_sub_step(devices, failing):
    model = meeting(3, failing)
    inputs = torch.arange(3.0 * ACCUM, dtype=torch.float64).repeat(2, 1).T.contiguous()
    with ScatterOnceParallel(model, ACCUM, devices(3), verify=False) as engine:
        with pytest.raises(ValueError, match="boom") as caught:
            engine.forward_backward(inputs, criterion=lambda output, _: output.mean())
        assert sorted(model.visits) == [0, 1, 2]
        device = devices(3)[failing]
        rows = (failing * ACCUM,)
        assert caught.value.__notes__ == [note_of(failing, device, 0, ACCUM, rows)]


class Together(nn.Linear):
    def forward(self, inputs):
        replica = int(inputs[0, 0]) // 4
        self.barrier.wait(SECONDS)
        raise self.errors[replica]


def error_of_all(devices, errors):
    """What arrives when three replicas raise these at once."""
    model = build(lambda: Together(2, 1))
    model.barrier, model.errors = threading.Barrier(3), tuple(errors)
    inputs = torch.arange(12.0, dtype=torch.float64).repeat(2, 1).T.contiguous()
    engine = ScatterOnceParallel(model, 2, devices(3), verify=False)
    with engine, pytest.raises(type(errors[0])) as caught:
        engine.forward_backward(inputs, criterion=lambda output, _: output.mean())
    assert caught.value is errors[0]
    return caught.value


@pytest.mark.contract
@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_the_lowest_replica_speaks_and_the_others_are_noted(devices, kind):
    errors = [kind(f"from {i}") for i in range(3)]
    assert error_of_all(devices, errors).__notes__ == [
        note_of(0, devices(3)[0], 0, of=2, rows=range(2)),
        f"replica 1 failed too: {errors[1]!r}",
        f"replica 2 failed too: {errors[2]!r}",
    ]


def test_one_exception_object_raised_by_all(devices):
    error_of_all(devices, [ValueError("shared")] * 3)


def test_an_eternal_exception_does_not_grow(devices):
    """A module that raises one object again and again collects no notes without end."""
    model = build(lambda: nn.Linear(2, 1))
    error = ValueError("one for all")

    def criterion(output, targets):
        raise error

    inputs = torch.ones(8, 2, dtype=torch.float64)
    with ScatterOnceParallel(model, 1, devices(2), verify=False) as engine:
        for _ in range(20):
            with pytest.raises(ValueError, match="one for all"):
                engine.forward_backward(inputs, criterion=criterion)
    assert len(error.__notes__) <= 2 + 2
