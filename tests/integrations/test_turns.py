"""Hooks that write what all replicas share: these run in turn."""

from __future__ import annotations

import time
import warnings
from functools import partial

import pytest
import torch
from harness.models import FEATURES
from harness.oracle import assert_close, randn, seeded
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.integrations import kept, loop
from scatterpar.integrations.changes import standing_in
from scatterpar.integrations.turns import Turns

ROWS = randn(12, FEATURES)
FILE = {}  # a global variable that a hook fills
IN_TURN = "forward hooks keep values in an object that replicas share"


class Keeps:
    def hook(self, layer, inputs, output):
        self.output = output


class Owner:
    """Has a student and a teacher, whose hidden features the loss reads."""

    def __init__(self, *, of_file=False, is_hooked_by=None):
        with seeded():
            self.student = nn.Linear(FEATURES, 4).double()
            self.teacher = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh()).double()
        self.features = FILE if of_file else {}
        self.keeps = Keeps()
        self.settings = {"unused": 1}
        self.teacher.requires_grad_(False)
        is_hooked_by(self)

    def loss(self, rows):
        mine = self.student(rows)
        self.teacher(rows)
        time.sleep(0.002)  # a GPU's kernels would take longer
        return (mine - self.read()).square().mean()

    def read(self):
        output = getattr(self.keeps, "output", None)
        output = self.features.get("hidden", output)
        return output if output is not None else self.teacher.features["hidden"]


def closes_over_owner(owner):
    owner.teacher[0].register_forward_hook(
        lambda _, __, output: owner.features.update(hidden=output)
    )


def closes_over_dict(owner):
    features = owner.features
    owner.teacher[0].register_forward_hook(
        lambda _, __, output: features.update(hidden=output)
    )


def is_a_partial(owner):
    """Replicas of the hook bind copies of the dict."""
    hook = partial(keep_hidden, owner.features)
    owner.teacher[0].register_forward_hook(hook)


def keep_hidden(features, layer, inputs, output):
    features["hidden"] = output


def is_a_method(owner):
    owner.teacher[0].register_forward_hook(owner.keeps.hook)


def names_a_global(owner):
    owner.teacher[0].register_forward_hook(
        lambda _, __, output: FILE.update(hidden=output)
    )


def replaces_forward(owner):
    layer, features = owner.teacher[0], owner.features
    old = layer.forward

    def forward(rows):
        features["hidden"] = old(rows)
        return features["hidden"]

    layer.forward = forward


def closes_over_module(owner):
    """The remedy that the warning names."""
    teacher = owner.teacher
    teacher.features = {}
    teacher[0].register_forward_hook(
        lambda _, __, output: teacher.features.update(hidden=output)
    )


def only_reads(owner):
    """It leads to an object that nothing writes: no turns, after the first step."""
    closes_over_module(owner)
    settings = owner.__class__, {"scale": 1.0}
    owner.teacher[1].register_forward_hook(
        lambda _, __, output: output * settings[1]["scale"]
    )


def train(owner, engine, turns):
    """The loss of a step, and whether replicas ran in turn."""
    parts = [owner.student, owner.teacher]

    def call(work, batch):
        replicas = dict(zip(map(id, parts), work, strict=True))
        replicas |= turns.copies_in(work, engine.module)
        copies = kept.CallCopies(torch.device("cpu"), replicas, turns.pinned)
        with standing_in(owner, (), copies, {}, in_place=False) as stand_in:
            return stand_in.loss(batch)

    with turns.in_step(engine, owner, vars(owner), Owner.loss):
        serial = engine.loop.takes_turns
        inputs = {"work": call, "batch": ROWS}
        return engine.forward_backward(inputs), serial


HOOKS = {
    "an object": (is_a_method, {}, True),
    "the owner's dict": (closes_over_dict, {}, True),
    "a partial": (is_a_partial, {}, False),
    "a global dict": (names_a_global, {"of_file": True}, True),
    "a replaced forward": (replaces_forward, {}, True),
    "the hooked module": (closes_over_module, {}, False),
    "settings": (only_reads, {}, False),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hook_values_read_by_own_replica(name, devices):
    hook, options, is_told = HOOKS[name]
    FILE.clear()
    plain = Owner(is_hooked_by=hook, **options)
    expected = plain.loss(ROWS)
    expected.backward()
    FILE.clear()
    owner = Owner(is_hooked_by=hook, **options)
    work = loop.Modules([owner.student, owner.teacher])
    turns = Turns()
    with (
        ScatterOnceParallel(work, 2, devices(2), verify=False) as engine,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        for step in range(3):
            engine.zero_grad()
            loss, is_serial = train(owner, engine, turns)
            assert_close(loss, expected.detach(), f"loss of step {step}")
            gradient = owner.student.weight.grad
            assert_close(gradient, plain.student.weight.grad, f"step {step}")
    assert is_serial is is_told
    assert sum(IN_TURN in str(each.message) for each in told) == is_told
