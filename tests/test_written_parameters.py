"""A forward pass that writes parameters is refused by name, and they are as they were."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.models import CLASSES, FEATURES
from helpers.oracle import assert_close, assert_step, build, randint, randn
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

TOKENS = torch.arange(9)[:, None] * torch.tensor([2, 1]) % 13
BATCH = randn(9, FEATURES), randint(CLASSES, 9)
CRITERION = nn.CrossEntropyLoss()
LABELS = BATCH[1], CRITERION


class Writer(nn.Module):
    """``write`` does something to the weight, before it is used."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.enter = nn.Linear(FEATURES, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, inputs):
        self.write(self.head.weight)
        return self.head(self.enter(inputs).tanh())


def clip_data(weight):
    weight.data.clamp_(-0.2, 0.2)


def clip(weight):
    with torch.no_grad():
        weight.clamp_(-0.2, 0.2)


def exchange(weight):
    weight.data = nn.functional.normalize(weight.data, dim=1)


def decay(weight):
    with torch.no_grad():
        weight.mul_(0.9)


def set_decayed(weight):
    with torch.no_grad():
        weight.set_(weight * 0.9)


class FunctionalTable(nn.Module):
    """torch renormalises what is looked up, and no attribute says so."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, CLASSES))

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.table, max_norm=0.7).mean(1)


class MovingAverage(nn.Module):
    """A copy of the encoder follows it, as MoCo's does: parameters that nothing trains."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(FEATURES, CLASSES)
        self.key = nn.Linear(FEATURES, CLASSES).requires_grad_(False)

    def forward(self, inputs):
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1
        return self.query(inputs) + self.key(inputs)


MODELS = {
    "functional max_norm": (FunctionalTable, TOKENS, "table"),
    "clip": (lambda: Writer(clip), BATCH[0], "head.weight"),
    "clip .data": (lambda: Writer(clip_data), BATCH[0], "head.weight"),
    "exchanged .data": (lambda: Writer(exchange), BATCH[0], "head.weight"),
    "decay": (lambda: Writer(decay), BATCH[0], "head.weight"),
    "set_": (lambda: Writer(set_decayed), BATCH[0], "head.weight"),
    "moving average": (MovingAverage, BATCH[0], "key.weight"),
}
each_model = pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)


def state(model):
    return {name: (t, t.detach().clone(), t.grad) for name, t in model.named_parameters()}


def assert_untouched(model, before):
    for name, tensor in model.named_parameters():
        same, value, gradient = before[name]
        assert tensor is same
        assert torch.equal(tensor, value), name
        assert tensor.grad is gradient, name


def refused(name):
    return pytest.raises(ValueError, match=rf"parameter '{name}', which all .*register_buffer")


def lost(name):
    return pytest.raises(RuntimeError, match=rf"parameter '{name}'.* earlier values are lost")


@each_model
@pytest.mark.parametrize(
    ("replicas", "whole_batch"),
    [(2, False), (2, True), pytest.param(1, False, marks=pytest.mark.slow)],
)
def test_a_step_is_refused_every_time(devices, case, whole_batch, replicas):
    make, inputs, name = case
    model = build(make)
    before = state(model)
    with ScatterOnceParallel(model, 2, devices(replicas)) as engine:
        for _ in range(2):
            with refused(name):
                engine.forward_backward(inputs, BATCH[1], CRITERION, whole_batch=whole_batch)
            assert_untouched(model, before)


def test_a_write_in_one_pass_of_two_is_refused_too(devices):
    """The second pass begins as the step did: what the first one exchanged was undone unseen."""

    class Last(Writer):
        def forward(self, inputs):
            if (inputs == BATCH[0][-1]).all(1).any():  # a replica's last rows are computed once
                self.write(self.head.weight)
            return self.head(self.enter(inputs).tanh())

    model = build(lambda: Last(exchange))
    before = state(model)
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        for _ in range(2):
            with refused(r"head\.weight"):
                engine.forward_backward(*BATCH, CRITERION, whole_batch=True)
            assert_untouched(model, before)


@each_model
def test_inference_is_refused_too(devices, case):
    make, inputs, name = case
    model = build(make).eval()
    before = state(model)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        for _ in range(2):
            with refused(name):
                engine(inputs)
            assert_untouched(model, before)


@each_model
def test_a_step_that_fails_otherwise_leaves_them_as_they_were_too(devices, case):
    make, inputs, name = case
    model = build(make)
    before = state(model)

    def criterion(output, targets):
        raise ArithmeticError("boom")

    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        with pytest.raises(ArithmeticError) as caught:
            engine.forward_backward(inputs, BATCH[1], criterion)
        assert any(f"writes the parameter '{name}'" in note for note in caught.value.__notes__)
        assert_untouched(model, before)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_max_norm_is_refused_with_what_to_write(kind):
    model = build(lambda: nn.Sequential(kind(16, 5, max_norm=0.7), nn.Linear(5, CLASSES)))
    words = (
        r"'0\.weight' in its forward pass.* max_norm to None.* 0\.weight\.renorm_\(2\.0, 0, 0\.7\)"
    )
    with pytest.raises(ValueError, match=words):
        ScatterOnceParallel(model, 2, ["cpu"] * 2)
    with pytest.raises(ValueError, match=words):
        DataParallelModel(model, ["cpu"] * 2)
    model[0].max_norm = None
    with ScatterOnceParallel(model, 2, ["cpu"] * 2) as engine:
        engine.forward_backward(TOKENS if kind is nn.EmbeddingBag else TOKENS[:, 0], *LABELS)
        model[0].max_norm = 0.7
        with refused(r"0\.weight"):
            engine.forward_backward(TOKENS if kind is nn.EmbeddingBag else TOKENS[:, 0], *LABELS)


def test_renormalising_after_the_step_is_what_max_norm_does(devices):
    """The lines of the error and of the docs."""
    plain = build(lambda: nn.Sequential(nn.Embedding(16, 5, max_norm=0.7), nn.Linear(5, CLASSES)))
    model = copy.deepcopy(plain)
    model[0].max_norm = None
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, plain)]
    with torch.no_grad():
        model[0].weight.renorm_(2.0, 0, 0.7)
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        for shift in range(3):
            tokens = TOKENS[:, 0] + shift
            loss = engine.forward_backward(tokens, *LABELS)
            expected = CRITERION(plain(tokens), BATCH[1])
            expected.backward()
            assert_close(loss, expected.detach(), "loss")
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(one.grad, other.grad, "gradient")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                model[0].weight.renorm_(2.0, 0, 0.7)


class WritesLate(Writer):
    """Nothing that the engine can see turns it on, but ``is_on``."""

    on = False

    def __init__(self, write):
        super().__init__(write)
        self.is_on = False

    def forward(self, inputs):
        if WritesLate.on or self.is_on:
            self.write(self.head.weight)
        return self.head(self.enter(inputs).tanh())


@pytest.mark.parametrize("write", [clip, clip_data, exchange, decay])
def test_a_flag_that_turns_writing_on(devices, write):
    """Who did not write with other flags is looked at again; that which is known is remembered."""
    model = build(lambda: WritesLate(write))
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert_step(engine, *BATCH, CRITERION)
        before = state(model)
        for _ in range(2):
            model.is_on = True
            with refused("head.weight"):
                engine.forward_backward(*BATCH, CRITERION)
            assert_untouched(model, before)
            model.is_on = False
            model.zero_grad()
            assert_step(engine, *BATCH, CRITERION)
            before = state(model)


@pytest.mark.parametrize("write", [clip, exchange, decay])
def test_a_late_write_is_told(devices, monkeypatch, write):
    """What is written elsewhere leaves nothing behind. In place, no copy is there any more."""
    monkeypatch.setattr(WritesLate, "on", False)
    model = build(lambda: WritesLate(write))
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(*BATCH, CRITERION)
        model.zero_grad()
        before = state(model)
        monkeypatch.setattr(WritesLate, "on", True)
        with (refused if write is exchange else lost)("head.weight"):
            engine.forward_backward(*BATCH, CRITERION)
        assert all(p.grad is None for p in model.parameters())
        if write is exchange:
            assert_untouched(model, before)
        before = state(model)
        with refused("head.weight"):
            engine.forward_backward(*BATCH, CRITERION)
        assert_untouched(model, before)
        monkeypatch.setattr(WritesLate, "on", False)
        assert_step(engine, *BATCH, CRITERION)


def test_a_late_write_before_the_user_s_own_error_is_noted(monkeypatch):
    def criterion(output, targets):
        if WritesLate.on:
            raise ArithmeticError
        return CRITERION(output, targets)

    monkeypatch.setattr(WritesLate, "on", False)
    model = build(lambda: WritesLate(decay))
    with ScatterOnceParallel(model, 2, ["cpu"] * 2) as engine:
        engine.forward_backward(*BATCH, criterion)
        monkeypatch.setattr(WritesLate, "on", True)
        with pytest.raises(ArithmeticError) as caught:
            engine.forward_backward(*BATCH, criterion)
        assert any("values are lost" in note for note in caught.value.__notes__)


class Proxies(nn.Module):
    """A criterion that normalises its own weights."""

    def __init__(self):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, output, targets):
        exchange(self.proxies)
        return nn.functional.cross_entropy(output @ self.proxies.T, targets)


def test_a_criterion_that_writes_its_own_is_refused(devices):
    model, criterion = build(lambda: nn.Linear(FEATURES, CLASSES)), build(Proxies, seed=1)
    before = state(model), state(criterion)
    with ScatterOnceParallel(model, 2, devices(2)) as engine, refused("proxies"):
        engine.forward_backward(*BATCH, criterion)
    outputs = DataParallelModel(model, devices(2))(BATCH[0])
    with refused("proxies"):
        DataParallelCriterion(criterion)(outputs, BATCH[1])
    assert_untouched(model, before[0])
    assert_untouched(criterion, before[1])


@pytest.mark.parametrize("good_steps", [0, 1])
def test_a_criterion_that_writes_the_model_s_is_refused(devices, good_steps):
    """By its closure, and so the user's own tensor."""
    model = build(lambda: nn.Linear(FEATURES, CLASSES))
    steps = []

    def criterion(output, targets):
        if len(steps) == good_steps:
            decay(model.weight)
        return CRITERION(output, targets)

    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        for step in range(good_steps):
            engine.forward_backward(*BATCH, criterion)
            steps.append(step)
        before = state(model)
        with (lost if good_steps else refused)("weight"):
            engine.forward_backward(*BATCH, criterion)
        if not good_steps:
            assert_untouched(model, before)


@each_model
def test_the_pair_refuses_every_time(devices, case):
    make, inputs, name = case
    model = build(make)
    before = state(model)
    pair = DataParallelModel(model, devices(2))
    for _ in range(2):
        with refused(name):
            pair(inputs)
        assert_untouched(model, before)


@pytest.mark.parametrize("write", [clip, exchange])
def test_a_late_write_in_the_pair_is_told(devices, monkeypatch, write):
    monkeypatch.setattr(WritesLate, "on", False)
    model = build(lambda: WritesLate(write))
    pair = DataParallelModel(model, devices(2))
    pair(BATCH[0])
    monkeypatch.setattr(WritesLate, "on", True)
    with (refused if write is exchange else lost)("head.weight"):
        pair(BATCH[0])
    with refused("head.weight"):
        pair(BATCH[0])
    monkeypatch.setattr(WritesLate, "on", False)
    assert_close(torch.cat(pair(BATCH[0])), model(BATCH[0]), "outputs")
