"""On virtual devices, no operation ever mixes tensors of two memories."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from helpers.contrastive import clip, two_views
from helpers.isolation import MixedMemories, guarded
from helpers.models import CLASSES, FEATURES, mlp, token_classifier
from helpers.oracle import assert_close, assert_gradients, build, randint, randn, whole_batch
from helpers.weighted import CASES
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from scatterpar import ScatterOnceParallel

VIRTUAL = [f"cpu:{i}" for i in range(4)]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(FEATURES, FEATURES)
        self.two = nn.Linear(FEATURES, FEATURES)
        self.two.weight = self.one.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs):
        return self.head(self.two(self.one(inputs).tanh()))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, inputs):
        states, _ = self.lstm(inputs[:, None].repeat(1, 3, 1))
        return self.attention(states, states, states)[0].mean(1)


class UnregisteredList(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(2)])
        self.order = [self.layers[1], self.layers[0]]
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs):
        for layer in self.order:
            inputs = layer(inputs).tanh()
        return self.head(inputs)


MODELS = {
    "mlp": mlp,
    "tied": Tied,
    "recurrent": Recurrent,
    "unregistered list": UnregisteredList,
    "batch norm": lambda: nn.Sequential(
        nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES).eval()
    ),
    "weight norm": lambda: weight_norm(nn.Linear(FEATURES, CLASSES)),
    "spectral norm": lambda: spectral_norm(nn.Linear(FEATURES, CLASSES)).eval(),
    "forward is a partial": lambda: forward_is_a_partial(),
}


def forward_is_a_partial():
    model = nn.Linear(FEATURES, CLASSES)
    model.forward = functools.partial(type(model).forward, model)
    return model


def check(monkeypatch, model, batch, criterion, accum=2, devices=VIRTUAL, **options):
    expected_loss, expected = whole_batch(model, *batch, criterion)
    modules = [model, *([criterion] if isinstance(criterion, nn.Module) else [])]
    with (
        ScatterOnceParallel(model, accum, devices, **options) as engine,
        guarded(monkeypatch, *modules) as memories,
    ):
        for _ in range(2):
            model.zero_grad()
            loss = engine.forward_backward(*batch, criterion)
    assert_close(loss, expected_loss, "loss")
    assert_gradients(model, expected)
    assert set(memories.checked) == {torch.device(device) for device in devices}


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_models(monkeypatch, model, accum):
    batch = randn(9, FEATURES), randint(CLASSES, 9)
    check(monkeypatch, build(MODELS[model]), batch, nn.CrossEntropyLoss(), accum)


@pytest.mark.parametrize("case", CASES)
def test_losses(monkeypatch, case):
    batch = randn(9, FEATURES), CASES[case].targets(9)
    check(monkeypatch, mlp(), batch, CASES[case].criterion())


def test_criterion_on_the_master_is_replicated(monkeypatch):
    """Class weights lie on the master; every replica needs them in its own memory."""
    batch = randn(9, FEATURES), CASES["class weights, padded"].targets(9)
    check(monkeypatch, mlp(), batch, CASES["class weights, padded"].criterion())


def test_replicas_that_share_some_memories(monkeypatch):
    batch = randn(9, FEATURES), randint(CLASSES, 9)
    devices = ["cpu:0", "cpu:2", "cpu:2", "cpu:0"]
    check(monkeypatch, mlp(), batch, nn.CrossEntropyLoss(), devices=devices)


def test_sparse_gradients(monkeypatch):
    model = build(token_classifier)
    model.embedding.sparse = True
    check(monkeypatch, model, (randint(11, 9, 3), randint(CLASSES, 9, 3)), nn.CrossEntropyLoss())


def test_averaged_buffers(monkeypatch):
    model = build(lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)))
    batch = randn(16, FEATURES), randint(CLASSES, 16)
    with (
        ScatterOnceParallel(model, 2, VIRTUAL, buffers="mean") as engine,
        guarded(monkeypatch, model) as memories,
    ):
        engine.forward_backward(*batch, nn.CrossEntropyLoss())
    assert len(memories.checked) == 4


def test_inference_and_outputs(monkeypatch):
    model = mlp()
    inputs = randn(9, FEATURES)
    expected = model(inputs).detach()
    with (
        ScatterOnceParallel(model, 2, VIRTUAL) as engine,
        guarded(monkeypatch, model) as memories,
    ):
        _, outputs = engine.forward_backward(
            inputs, randint(CLASSES, 9), nn.CrossEntropyLoss(), return_outputs=True
        )
        assert [memories.owner(output) for output in outputs] == [
            torch.device(device) for device in VIRTUAL
        ]
        engine.eval()
        gathered = engine(inputs)
        assert memories.owner(gathered) == torch.device("cpu:0")
    assert_close(gathered, expected, "outputs")


class Smuggler(nn.Module):
    """Replica 0 leaves a tensor where replica 1 picks it up: an error on GPUs."""

    passed: list = []  # noqa: RUF012
    ready = threading.Event()

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.number = 0

    def forward(self, inputs):
        outputs = self.linear(inputs)
        if inputs[0, 0] == 0:
            Smuggler.passed.append(outputs.detach())
            Smuggler.ready.set()
            return outputs
        Smuggler.ready.wait(120)
        return outputs + Smuggler.passed[0]


def test_the_guard_can_fail(monkeypatch):
    Smuggler.passed.clear()
    Smuggler.ready.clear()
    model = build(Smuggler)
    inputs = randn(4, FEATURES)
    inputs[:, 0] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    with (
        ScatterOnceParallel(model, 1, VIRTUAL[:2]) as engine,
        guarded(monkeypatch, model),
        pytest.raises(MixedMemories, match=r"aten.add.*on cpu:1 mixes tensors of") as caught,
    ):
        engine.forward_backward(inputs, randint(CLASSES, 4), nn.CrossEntropyLoss())
    assert "in replica 1 on cpu:1, sub-step 0 of 1" in caught.value.__notes__[0]
    Smuggler.passed.clear()


def test_the_guard_sees_a_forgotten_copy(monkeypatch):
    """A tensor that hides from replication, in an object the engine cannot look into."""

    class Hidden:
        def __init__(self):
            self.scale = torch.ones(CLASSES).double()

    class Forgets(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(FEATURES, CLASSES)
            self.hidden = Hidden()

        def forward(self, inputs):
            return self.linear(inputs) * self.hidden.scale

    with pytest.raises(MixedMemories, match=r"aten\.mul"):
        check(
            monkeypatch,
            build(Forgets),
            (randn(4, FEATURES), randint(CLASSES, 4)),
            nn.CrossEntropyLoss(),
        )


@pytest.mark.parametrize("accum", [1, 3])
def test_a_criterion_of_the_whole_batch(monkeypatch, accum):
    model = two_views()
    rows, views = 11, (randn(11, 5, seed=3), randn(11, 5, seed=4))
    expected = whole_batch(model, views, torch.arange(rows), clip)
    with (
        ScatterOnceParallel(model, accum, VIRTUAL) as engine,
        guarded(monkeypatch, model) as memories,
    ):
        engine.forward_backward(views, torch.arange(rows), clip, whole_batch=True)
    assert_gradients(model, expected[1])
    assert len(memories.checked) == len(VIRTUAL)
