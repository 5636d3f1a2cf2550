"""Notes on the user's errors, restores after one, and where a warning points to."""

from __future__ import annotations

import copy
import functools
import traceback
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import scatterpar.errors
from scatterpar import ScatterOnceParallel
from scatterpar.errors import (
    Told,
    add_note,
    leave_out_own_frames,
    restore_after,
    restored,
    warn,
)

pytestmark = pytest.mark.core


def notes(error):
    return getattr(error, "__notes__", [])


def test_note_is_added_once():
    error = ValueError()
    add_note(error, "replica 1")
    add_note(error, "replica 1")
    add_note(error, "replica 2")
    assert notes(error) == ["replica 1", "replica 2"]


class WithoutNotes(Exception):
    def add_note(self, _):
        raise TypeError


def test_error_refusing_notes_left_alone():
    error = WithoutNotes()
    add_note(error, "replica 1")
    assert not notes(error)


def failing():
    raise OSError("device lost")


@pytest.mark.parametrize("fails", [True, False])
def test_restores_run_in_order_after_body(fails):
    order = []
    try:
        with restored(lambda: order.append(1), lambda: order.append(2)):
            order.append(0)
            if fails:
                raise ValueError
    except ValueError:
        order.append("raised")
    assert order == [0, 1, 2, *["raised"] * fails]


def test_failed_restore_after_body_is_raised():
    with pytest.raises(OSError, match="device lost"), restored(failing):
        pass


def test_failed_restore_after_error_is_noted():
    order = []
    with (
        pytest.raises(ValueError, match="step") as caught,
        restored(failing, lambda: order.append(1)),
    ):
        raise ValueError("step")
    (note,) = notes(caught.value)
    assert note.endswith("could not be put back: OSError('device lost')")
    assert order == [1]


def test_interrupt_during_restore_is_raised():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore_after(ValueError(), interrupted)


def test_warning_points_to_users_line(recwarn):
    warn("a text")
    (warning,) = recwarn.list
    assert (str(warning.message), warning.filename) == ("a text", __file__)


def test_warning_passes_over_a_library(recwarn):
    """A library's loop that calls the package is no line of the user's."""
    loop = compile("def fit(step):\n    step()", "/venv/site-packages/loop.py", "exec")
    library = {}
    exec(loop, library)
    library["fit"](lambda: functools.reduce(lambda *_: warn("a text"), [0, 1]))
    (warning,) = recwarn.list
    assert warning.filename == __file__
    library["fit"](functools.partial(warn, "a text"))
    assert recwarn.list[-1].filename == __file__


def test_told_is_new_once_per_subject_and_copy():
    told = Told()
    assert [told.mark("a"), told.mark("b"), told.mark("a")] == [True, True, False]
    assert copy.deepcopy(told).mark("a")


class Activation:
    """What a call of the package has in a local variable."""


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 1))

    def forward(self, rows):
        return rows @ self.weight


class Failing(Product):
    def forward(self, rows):
        raise KeyError("mine")


def error_of(model, replicas, criterion=functional.mse_loss):
    """What a step of the model on that many replicas raises."""
    with ScatterOnceParallel(model, device_ids=["cpu"] * replicas) as engine:
        try:
            engine.forward_backward(torch.ones(4, 2), torch.ones(4, 1), criterion)
        except Exception as error:
            return error


@pytest.mark.parametrize("replicas", [1, 2])
def test_few_frames_between_step_and_users_line(replicas):
    error = error_of(Failing(), replicas)
    assert isinstance(error, KeyError)
    (step, *between, line) = traceback.extract_tb(error.__traceback__)
    assert (step.name, line.line) == ("error_of", 'raise KeyError("mine")')
    # two of them are torch's, one keeps torch's compiler away
    assert len(between) <= 11  # of which one is torch's, once its compiler is there


@pytest.mark.parametrize("replicas", [1, 2])
def test_error_of_the_package_keeps_its_frames(replicas):
    error = error_of(Product(), replicas, lambda output, target: "no loss")
    assert isinstance(error, TypeError)
    frames = traceback.extract_tb(error.__traceback__)
    assert {"parallel_apply", "forward"} <= {frame.name for frame in frames}


def test_left_out_frames_keep_nothing():
    source = Path(scatterpar.errors.__file__).with_name("between.py")
    lines = "def call(function):\n    kept = Activation()\n    function(kept)\n"
    namespace = {"Activation": Activation}
    exec(compile(lines, source, "exec"), namespace)  # a file of the package
    activations = []

    def users_line(activation):
        activations.append(weakref.ref(activation))
        del activation
        raise OSError("mine")

    try:
        namespace["call"](users_line)
    except OSError as error:
        leave_out_own_frames(error)
        frames = traceback.extract_tb(error.__traceback__)
    assert [frame.name for frame in frames] == ["users_line"]
    assert activations[0]() is None
