"""Looks tell what they have found once the step has succeeded."""

from __future__ import annotations

import pytest
import torch
from faults.state import nothing_changes
from harness.looks import VALUES, step
from harness.models import mlp
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel


class Breaks(nn.Module):
    """Fails from a step on."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.is_broken = False

    def forward(self, rows):
        if self.is_broken:
            raise LookupError("no such expert")
        return self.body(rows)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("accum", [2, 50])
@pytest.mark.parametrize("step_number", [0, 1, 3])
def test_failing_step_says_one_thing(devices, step_number, accum):
    """A warning that the check could not be made came before the user's error."""
    model = Breaks()
    with ScatterOnceParallel(model, accum, devices(2)) as engine:
        for _ in range(step_number):
            step(engine, F.mse_loss, VALUES)
        model.is_broken = True
        with pytest.raises(LookupError, match="no such expert"):
            step(engine, F.mse_loss, VALUES)


def count(module, *_):
    module.calls += 1


def test_warning_of_a_failed_step_is_told_later(devices):
    """Of state that forward passes move."""
    model = Breaks()
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(count)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        with pytest.raises(ZeroDivisionError):
            step(engine, lambda o, t: F.mse_loss(o, t) if len(o) > 6 else 1 / 0, VALUES)
        with pytest.warns(UserWarning, match="forward passes move the buffer"):
            step(engine, F.mse_loss, VALUES)


@pytest.mark.filterwarnings("error")
def test_refused_outputs_say_one_thing(devices):
    """The warning of its look came before the error of the join."""
    model = Breaks()
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(count)

    def odd(output):
        return output.flatten()[: len(output) // 2 + 1]

    with (
        ScatterOnceParallel(model, 2, devices(2)) as engine,
        pytest.raises(ValueError, match=r"torch\.stack"),
    ):
        step(engine, F.mse_loss, VALUES, return_outputs=odd)


@pytest.mark.filterwarnings("error")
def test_warning_that_is_an_error_changes_nothing(devices):
    """It was raised after the step's gradients had been added."""
    model = Breaks()
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(count)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        words = "forward passes move the buffer"
        with nothing_changes(model), pytest.raises(UserWarning, match=words):
            step(engine, F.mse_loss, VALUES)
        step(engine, F.mse_loss, VALUES)
