"""What functions close over: a module that only the criterion knows, the model in its own hook."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from helpers.models import CLASSES, FEATURES
from helpers.oracle import assert_close, assert_gradients, build, gradients, randint, randn
from helpers.zoo import Multiplies
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel

ROWS = 12
BATCH = randn(ROWS, FEATURES), randint(CLASSES, ROWS)


# --- what only the criterion knows ---


class Task:
    """Has the loss as a method, and a second module that it trains: as trainers do."""

    def __init__(self):
        self.body = build(lambda: nn.Linear(FEATURES, 4))
        self.head = build(lambda: nn.Linear(4, CLASSES))
        self.seen = []
        self.head.weight.register_hook(lambda gradient: self.seen.append(gradient.clone()))

    def loss(self, output, targets):
        return F.cross_entropy(self.head(output), targets)

    def closure(self):
        held = {"head": [self.head]}
        return lambda output, targets: F.cross_entropy(held["head"][0](output), targets)


@pytest.fixture
def plain():
    """The same in plain torch, on the whole batch."""
    task = Task()
    task.loss(task.body(BATCH[0]), BATCH[1]).backward()
    return task


def assert_trained_like(task, plain):
    assert_gradients(task.body, gradients(plain.body))
    assert_gradients(task.head, gradients(plain.head))
    (seen,) = task.seen
    assert_close(seen, plain.seen[0], "what the hook saw")


@pytest.mark.parametrize("by", ["method", "closure"])
def test_it_is_trained_and_its_hooks_run_once(devices, plain, by):
    """They once ran at every sub-step."""
    task = Task()
    with ScatterOnceParallel(task.body, 2, devices(3), measure_noise=True) as engine:
        engine.forward_backward(*BATCH, task.loss if by == "method" else task.closure())
        assert math.isnan(engine.last_step.noise.noise), "replicas have no gradient of it"
    assert_trained_like(task, plain)


class OutOfMemory(nn.Linear):
    """Runs out of memory with more than two rows, in the last replica alone."""

    def forward(self, rows):
        if len(rows) > 2 and torch.equal(rows[0], BATCH[0][8]):
            raise torch.OutOfMemoryError("not enough")
        return super().forward(rows)


@pytest.mark.filterwarnings("ignore:accum=.auto")
def test_a_second_try_starts_anew(devices):
    """What the first one had added to its gradient once stayed there."""
    task, plain = Task(), Task()
    for one in (task, plain):
        one.body = build(lambda: OutOfMemory(FEATURES, 4))
    plain.loss(F.linear(BATCH[0], plain.body.weight, plain.body.bias), BATCH[1]).backward()
    with ScatterOnceParallel(task.body, "auto", devices(3)) as engine:
        engine.forward_backward(*BATCH, task.loss)
    assert_trained_like(task, plain)


def test_a_failed_step_and_a_check_leave_it_as_it_was(devices):
    """Both once left a gradient."""
    task = Task()
    calls = []

    def failing(output, targets):
        calls.append(1)
        if len(calls) == 5:
            raise ArithmeticError
        return task.loss(output, targets)

    with ScatterOnceParallel(task.body, 2, devices(3)) as engine:
        with pytest.raises(ArithmeticError):
            engine.forward_backward(*BATCH, failing)
        assert engine.check(*BATCH, task.loss).passed
    assert task.head.weight.grad is None
    assert not task.seen


# --- the model's own parameters ---


# --- functions that the module holds ---


def test_a_function_that_torch_compiled_has_a_twin_too():
    """``torch.compile`` returns a function that closes over what it compiles."""

    def compiled(masked):
        masked.linear.register_forward_hook(
            torch.compile(lambda module, args, output: masked.multiply(output), backend="eager")
        )

    model, plain = (build(lambda: Multiplies(compiled)) for _ in range(2))
    F.cross_entropy(plain(BATCH[0]), BATCH[1]).backward()
    with ScatterOnceParallel(model, 1, ["cpu"]) as engine:
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    assert_gradients(model, gradients(plain))


def test_what_else_they_close_over_stays_the_user_s(devices):
    model, rows = build(lambda: nn.Linear(FEATURES, CLASSES)), []
    holder = {"scale": 1.0}

    def attach(scale):
        def hook(module, args, output):
            rows.append(len(output))
            return output * holder["scale"] * scale * (1.0 if model.bias.requires_grad else 0.0)

        def set_scale(value):
            nonlocal scale
            scale = value

        model.register_forward_hook(hook)
        return set_scale

    set_scale = attach(1.0)
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        assert sorted(rows) == [2] * 6
        once = gradients(model)
        model.zero_grad()
        holder["scale"] = 0.5
        set_scale(2.0)
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    assert_gradients(model, once)


def test_another_module_in_a_cell_is_obeyed(devices):
    model = build(lambda: nn.ModuleList([nn.Linear(FEATURES, CLASSES) for _ in range(2)]))

    def choose(chosen):
        def switch(number):
            nonlocal chosen
            chosen = model[number]

        model.forward = lambda rows: chosen(rows)
        return switch

    switch = choose(model[0])
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        for number in (0, 1):
            switch(number)
            model.zero_grad()
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
            used = [part.weight.grad is not None for part in model]
            assert used == [number == 0, number == 1]


def test_what_they_name_of_their_file_is_told(monkeypatch, devices):
    """A twin of a function has the same file, and so runs the user's own module."""
    model = build(lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES)))
    monkeypatch.setitem(globals(), "NAMED", model[0])
    model.forward = lambda rows: NAMED(rows)  # noqa: F821
    with (
        ScatterOnceParallel(model, 2, devices(2)) as engine,
        pytest.warns(UserWarning, match="names 'NAMED' of its file"),
    ):
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())


def crop(features):
    """A criterion that reads what a hook has put aside."""

    def criterion(output, targets):
        losses = F.cross_entropy(output, targets, reduction="none")
        return (losses * features["x"].square().mean(1)).mean()

    return criterion


def test_a_dict_that_a_hook_fills_for_the_criterion_is_told(devices):
    """One replica's criterion silently read another one's features."""
    model, features = build(lambda: nn.Linear(FEATURES, CLASSES)), {}
    model.register_forward_hook(lambda module, args, output: features.update(x=output.detach()))
    with (
        ScatterOnceParallel(model, 2, devices(3)) as engine,
        pytest.warns(
            UserWarning, match="crop.*criterion and a hook of the module share 'features'"
        ),
        contextlib.suppress(ValueError, RuntimeError),  # what it makes of them is a race
    ):
        engine.forward_backward(*BATCH, crop(features))


def test_one_replica_reads_what_its_own_hook_has_put_aside(recwarn):
    model, plain = (build(lambda: nn.Linear(FEATURES, CLASSES)) for _ in range(2))
    features = {}
    for one in (model, plain):
        one.register_forward_hook(lambda module, args, out: features.update(x=out.detach()))
    crop(features)(plain(BATCH[0]), BATCH[1]).backward()
    with ScatterOnceParallel(model, 2, ["cpu"]) as engine:
        engine.forward_backward(*BATCH, crop(features))
    assert_gradients(model, gradients(plain))
    assert not recwarn.list


def test_an_attribute_of_the_forward_pass_is_told_with_one_micro_batch_too():
    """The auxiliary loss was silently left out."""

    class Routed(nn.Linear):
        def forward(self, rows):
            self.extra = self.weight.square().sum()
            return super().forward(rows)

    model = build(lambda: Routed(FEATURES, CLASSES))
    with ScatterOnceParallel(model, 1, ["cpu"]) as engine:
        model.extra = torch.zeros(())
        with pytest.raises(ValueError, match="reads 'extra' of a module that it closes over"):
            engine.forward_backward(
                *BATCH, lambda output, targets: F.cross_entropy(output, targets) + model.extra
            )
