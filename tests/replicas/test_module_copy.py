"""What modules may be, do and return that one device would take, or that is told in words."""

from __future__ import annotations

import pytest
import torch
from harness.models import CLASSES, FEATURES, Classifier, Of, Returns
from harness.oracle import assert_close, assert_step, build, randint, randn, seeded, whole_batch
from torch import nn

from scatterpar import DataParallelModel, ScatterOnceParallel

BATCH = randn(9, FEATURES), randint(CLASSES, 9)
CRITERION = nn.CrossEntropyLoss()


pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:Sparse")]


class Slotted(nn.Linear):
    __slots__ = ("scale",)

    def __init__(self):
        super().__init__(FEATURES, CLASSES)
        self.scale = 2.0


def with_sparse(register):
    model = Classifier()
    register(model, "adjacency", torch.eye(3).to_sparse())
    return model


HELD = {
    "slots": (Slotted, "class Slotted of a module has __slots__"),
    "buffer": (lambda: with_sparse(nn.Module.register_buffer), r"'adjacency', a sparse .*Repl"),
    "attribute": (lambda: with_sparse(setattr), r"sparse tensor of shape \(3, 3\).*Replicated"),
}


@pytest.mark.parametrize("runner", [ScatterOnceParallel, DataParallelModel])
@pytest.mark.parametrize("held", HELD)
def test_sparse_tensors_and_slots_are_refused_with_the_way_out(devices, held, runner):
    make, words = HELD[held]
    model = build(make).eval()
    with pytest.raises(TypeError, match=words):
        runner(model, device_ids=devices(2))(BATCH[0])


class Zeroes(Classifier):
    def forward(self, inputs):
        self.zero_grad()
        self.linear.zero_grad()
        return self.linear(inputs)


def test_zero_grad_in_forward_does_not_wipe_earlier_sub_steps(devices):
    """Each sub-step forgot the ones before it, in silence."""
    model = build(Zeroes)
    with (
        ScatterOnceParallel(model, 3, devices(2)) as engine,
        pytest.warns(UserWarning, match="zero_grad.. inside forward has no effect"),
    ):
        engine.forward_backward(*BATCH, CRITERION)
    _, expected = whole_batch(model, *BATCH, CRITERION)
    assert_close(model.linear.weight.grad, expected["linear.weight"], "gradient")


def test_a_generator_as_an_output_is_refused_in_words(devices):
    model = build(lambda: Returns(lambda logits, _: {"logits": (row for row in logits)})).eval()
    words = "output contains a generator that has not been consumed; return a list"
    with ScatterOnceParallel(model, 2, devices(2)) as engine, pytest.raises(TypeError, match=words):
        engine(BATCH[0])
    with pytest.raises(TypeError, match=words):
        DataParallelModel(model, devices(2))(BATCH[0])
    pair = DataParallelModel(build(lambda: Returns(lambda y, _: map(abs, y))), devices(2))
    with pytest.raises(TypeError, match="output contains a map that has not been consumed"):
        pair(BATCH[0])


def test_lazy_modules_say_what_to_do_and_work_once_initialised(devices):
    with torch.random.fork_rng(devices=[]):
        module = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(CLASSES)).double()
    with ScatterOnceParallel(module, 2, devices(2)) as engine:
        with pytest.raises(
            RuntimeError, match=r"uninitialised lazy parameter, '0.weight': call the module once"
        ):
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        with torch.random.fork_rng(devices=[]):
            module(BATCH[0][:2])
        assert_step(engine, *BATCH, nn.CrossEntropyLoss())


def makes_its_head(model, inputs):
    """Its head comes with the first batch, as wide as that."""
    if model.head is None:
        model.head = nn.Linear(6, 2).double()
    return model.head(model.enter(inputs))


def exchanges_its_weight(model, inputs):
    if model.exchanges:
        model.head.weight = nn.Parameter(model.head.weight * 0.5)
    return model.head(inputs)


MAKERS = {
    "a head": lambda: Of(makes_its_head, enter=nn.Linear(4, 6), head=None),
    "a weight": lambda: Of(exchanges_its_weight, head=nn.Linear(4, 2), exchanges=True),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("whole_batch", [False, True])
def test_parameters_that_a_forward_pass_makes_are_refused_by_name(devices, kind, whole_batch):
    model = build(MAKERS[kind])
    inputs, targets, criterion = randn(9, 4), randn(9, 2), nn.MSELoss()
    engine = ScatterOnceParallel(model, 2, devices(3))
    for _ in range(2):
        words = r"creates the parameter 'head\.weight'"
        with pytest.raises(ValueError, match=f"{words}.*before the first"):
            engine.forward_backward(inputs, targets, criterion, whole_batch=whole_batch)
        with pytest.raises(ValueError, match=words), torch.no_grad():
            engine(inputs)
        assert all(parameter.grad is None for parameter in model.parameters())
    model.exchanges = False
    with seeded():
        model(inputs)
    assert_step(engine, inputs, targets, criterion)
