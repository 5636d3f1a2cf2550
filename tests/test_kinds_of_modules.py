"""What modules may be, do and return that one device would take, or that is told in words."""

from __future__ import annotations

import pytest
import torch
from helpers.models import CLASSES, FEATURES, Classifier, Returns
from helpers.module_cases import Graph, small
from helpers.oracle import assert_close, assert_step, build, randint, randn, whole_batch
from torch import nn

from scatterpar import DataParallelModel, ScatterOnceParallel

BATCH = randn(9, FEATURES), randint(CLASSES, 9)
CRITERION = nn.CrossEntropyLoss()


pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def test_a_sparse_tensor_travels_once():
    with ScatterOnceParallel(
        build(lambda: Graph(torch.sparse_csr)), 1, ["cpu:0", "cpu:1"]
    ) as engine:
        for _ in range(2):
            engine.forward_backward(*BATCH, CRITERION)
        assert engine.last_step.bytes["replicate"] == 0


def test_a_trained_sparse_tensor_is_refused_in_words():
    model = build(small)
    model.table = torch.eye(3).to_sparse().requires_grad_()
    with (
        ScatterOnceParallel(model, 1, ["cpu"]) as engine,
        pytest.raises(ValueError, match=r"sparse tensor of shape \(3, 3\) that requires grad"),
    ):
        engine.forward_backward(*BATCH, CRITERION)


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
