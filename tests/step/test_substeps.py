"""What a sub-step runs beside the model, and in which thread."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter

import pytest
import torch
from harness.models import CLASSES, FEATURES, linear
from harness.oracle import assert_gradients, build, randint, randn, whole_batch
from torch import nn

from scatterpar import ScatterOnceParallel

ROWS, LABELS = randn(13, FEATURES), randint(CLASSES, 13)
LOSS = nn.CrossEntropyLoss()


def test_one_replica_steps_in_the_thread_of_the_caller():
    """So a debugger stops in the user's own lines."""
    threads = set()

    def criterion(output, targets):
        threads.add(threading.current_thread())
        return LOSS(output, targets)

    with ScatterOnceParallel(linear(), 3, ["cpu"]) as engine:
        engine.forward_backward(ROWS, LABELS, criterion)
    assert threads == {threading.current_thread()}


@pytest.mark.contract
def test_micro_batches_without_terms_still_run_forward(devices):
    model = build(lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)))
    targets = torch.full((12,), -100)
    targets[0] = 1
    with ScatterOnceParallel(model, 3, devices(1)) as engine:
        engine.forward_backward(randn(12, FEATURES), targets, LOSS)
    assert model[0].num_batches_tracked == 3


# --- what a sub-step runs besides the model, with the GIL, times all replicas: once 56 calls ---

SUBSTEPS = 16


def calls(work):
    """How many functions ``work()`` calls in this thread, those written in C among them."""
    found = Counter()

    def note(frame, event, argument):
        found[event] += 1

    before = sys.getprofile()
    gc.disable()  # finalizers of others are no calls of this
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found["call"] + found["c_call"]


def per_substep(work):
    """What one sub-step more adds to ``work(substeps)``, whose first call may prepare things."""
    work(SUBSTEPS), work(2 * SUBSTEPS)
    return (calls(lambda: work(2 * SUBSTEPS)) - calls(lambda: work(SUBSTEPS))) / SUBSTEPS


def test_a_substep_calls_few_functions_besides_the_model_and_its_backward_pass():
    model, inputs, targets = linear(), randn(2 * SUBSTEPS, FEATURES), randint(CLASSES, 2 * SUBSTEPS)
    engines = {n: ScatterOnceParallel(model, n, ["cpu"]) for n in (SUBSTEPS, 2 * SUBSTEPS)}

    def plain(substeps):
        for row in range(substeps):
            LOSS(model(inputs[row : row + 1]), targets[row : row + 1]).backward()

    def ours(substeps):
        engines[substeps].forward_backward(inputs[:substeps], targets[:substeps], LOSS)

    more = per_substep(ours) - per_substep(plain)
    assert more < 56 / 2, f"{more} calls more than a plain loop"


class Seen(torch.Tensor):
    """A tensor that is asked before torch does anything with it."""

    asked: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.asked.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("accum", [1, 3])
def test_a_loss_of_the_users_own_class_is_asked_at_its_backward_pass(devices, accum):
    """The short way into the backward pass is for plain tensors alone."""
    model = linear()

    def criterion(output, targets):
        return LOSS(output, targets).as_subclass(Seen)

    Seen.asked = []
    torch.autograd.backward([criterion(model(ROWS), LABELS)])
    in_torch = Seen.asked.count(torch.autograd.backward)  # not in all its versions
    Seen.asked = []
    model.zero_grad()
    with ScatterOnceParallel(model, accum, devices(2)) as engine:
        engine.forward_backward(ROWS, LABELS, criterion)
    assert_gradients(model, whole_batch(model, ROWS, LABELS, LOSS)[1])
    assert Seen.asked.count(torch.autograd.backward) == 2 * accum * in_torch
