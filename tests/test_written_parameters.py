"""Parameters that a forward pass writes: as one device has them after the whole batch, or told.

Replicas shared the master's storage, or had one per device: a failed step left the weights
changed, and rows that only one device saw were renormalised on that device alone.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.models import CLASSES, FEATURES
from helpers.oracle import assert_close, build, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel

TOKENS = torch.arange(9)[:, None] * torch.tensor([2, 1]) % 13
BATCH = randn(9, FEATURES), randint(CLASSES, 9)
CRITERION = nn.CrossEntropyLoss()


class Renormalised(nn.Module):
    """Each row of the batch touches two rows of the table, and not all of the table's."""

    def __init__(self, kind=nn.Embedding, **options):
        super().__init__()
        self.table = kind(16, 5, max_norm=0.7, **options)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, tokens):
        hidden = self.table(tokens)
        return self.head(hidden.mean(1) if hidden.ndim == 3 else hidden)


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


def normalize(weight):
    weight.data = nn.functional.normalize(weight.data, dim=1)


def decay(weight):
    with torch.no_grad():
        weight.mul_(0.9)


def set_decayed(weight):
    with torch.no_grad():
        weight.set_(weight * 0.9)


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
    "max_norm": (Renormalised, TOKENS),
    "max_norm, sparse": (lambda: Renormalised(sparse=True), TOKENS),
    "max_norm, bag": (lambda: Renormalised(nn.EmbeddingBag), TOKENS),
    "clip": (lambda: Writer(clip), BATCH[0]),
    "clip .data": (lambda: Writer(clip_data), BATCH[0]),
    "normalize .data": (lambda: Writer(normalize), BATCH[0]),
    "decay": (lambda: Writer(decay), BATCH[0]),
    "set_": (lambda: Writer(set_decayed), BATCH[0]),
    "moving average": (MovingAverage, BATCH[0]),
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


@each_model
@pytest.mark.parametrize("accum", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_parameters_and_gradients_are_those_of_one_device(devices, case, accum):
    make, inputs = case
    model = build(make)
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, plain)]
    with ScatterOnceParallel(model, accum, devices(3)) as engine:
        for _ in range(3):
            engine.forward_backward(inputs, BATCH[1], CRITERION)
            CRITERION(plain(inputs), BATCH[1]).backward()
            for (name, one), (_, other) in zip(
                model.named_parameters(), plain.named_parameters(), strict=True
            ):
                assert_close(one.detach(), other.detach(), name)
                assert (one.grad is None) == (other.grad is None)
                if one.grad is not None:
                    assert one.grad.layout == other.grad.layout
                    assert_close(one.grad.to_dense(), other.grad.to_dense(), f"{name}.grad")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@each_model
@pytest.mark.parametrize("accum", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_loss_over_the_whole_batch(case, accum):
    """Two passes, each of which writes: once is what counts."""
    make, inputs = case
    model = build(make)
    plain = copy.deepcopy(model)
    with ScatterOnceParallel(model, accum, ["cpu:0", "cpu:1"]) as engine:
        engine.forward_backward(inputs, BATCH[1], CRITERION, whole_batch=True)
    CRITERION(plain(inputs), BATCH[1]).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(one.detach(), other.detach(), "parameter")
        if other.grad is not None:
            assert_close(one.grad.to_dense(), other.grad.to_dense(), "gradient")


@each_model
@pytest.mark.parametrize("good_steps", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_failed_step_leaves_them_as_they_were(devices, case, good_steps):
    make, inputs = case
    model = build(make)
    pieces = iter(range(10**6))

    def criterion(output, targets):
        if next(pieces) % 4 == 3:
            raise ArithmeticError("boom")
        return CRITERION(output, targets)

    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        for _ in range(good_steps):
            engine.forward_backward(inputs, BATCH[1], CRITERION)
        before = state(model)
        with pytest.raises(ArithmeticError):
            engine.forward_backward(inputs, BATCH[1], criterion)
        assert_untouched(model, before)


@each_model
def test_inference_writes_as_one_device_does(devices, case):
    make, inputs = case
    model = build(make).eval()
    plain = copy.deepcopy(model)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert_close(engine(inputs), plain(inputs).detach(), "output")
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(one.detach(), other.detach(), "parameter")


def test_hooks_on_parameters_see_what_was_written(devices):
    """An optimizer in a hook steps from the values that one device would have."""
    model = build(lambda: Writer(clip))
    seen = []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.detach().clone()))
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(*BATCH, CRITERION)
    assert len(seen) == 1
    assert seen[0].abs().max() == 0.2


class TiedTable(nn.Module):
    """Rows that one micro-batch renormalises are another's output weights."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 5, max_norm=0.1)

    def forward(self, tokens):
        return self.table(tokens).mean(1) @ self.table.weight.T


def noise(weight):
    with torch.no_grad():
        weight.add_(torch.randn_like(weight))


class Remembers(nn.Module):
    """What it writes depends on the rows that it sees."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.mean = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)

    def forward(self, inputs):
        self.mean.data.copy_(inputs.mean(0))
        return self.linear(inputs - self.mean)


@pytest.mark.draws
@pytest.mark.parametrize(
    ("make", "inputs", "name", "words"),
    [
        (TiedTable, TOKENS, "table.weight", "another micro-batch computed with their old values"),
        (lambda: Writer(noise), BATCH[0], "head.weight", "different values to the same elements"),
        (Remembers, BATCH[0], "mean", "different values to the same elements"),
    ],
    ids=["tied", "noise", "mean"],
)
@pytest.mark.parametrize(("replicas", "accum"), [(2, 1), (1, 2)])
def test_what_depends_on_the_cut_is_refused_by_name(
    devices, make, inputs, name, words, replicas, accum
):
    model = build(make)
    before = state(model)
    with ScatterOnceParallel(model, accum, devices(replicas)) as engine:
        for _ in range(2):
            with pytest.raises(ValueError, match=f"parameter '{name}'") as caught:
                engine.forward_backward(inputs, BATCH[1], CRITERION)
            assert words in str(caught.value)
            assert_untouched(model, before)


@each_model
def test_in_one_piece_nothing_is_refused(case):
    make, inputs = case
    model = build(make)
    plain = copy.deepcopy(model)
    with ScatterOnceParallel(model, 1, ["cpu"]) as engine:
        engine.forward_backward(inputs, BATCH[1], CRITERION)
    plain(inputs)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_switch_that_turns_writing_on(devices):
    """Whoever did not write before is looked at again when an option of the module changes."""
    model = build(Renormalised)
    model.table.max_norm = None
    plain = copy.deepcopy(model)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(TOKENS, BATCH[1], CRITERION)
        model.table.max_norm = plain.table.max_norm = 0.3
        engine.forward_backward(TOKENS, BATCH[1], CRITERION)
    plain(TOKENS)
    assert_close(model.table.weight.detach(), plain.table.weight.detach(), "table")


class WritesLate(Writer):
    """Nothing that the engine can see turns it on."""

    on = False

    def forward(self, inputs):
        if WritesLate.on:
            self.write(self.head.weight)
        return self.head(self.enter(inputs).tanh())


def normalize_in_place(weight):
    with torch.no_grad():
        weight.div_(weight.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("write", [clip, normalize, normalize_in_place])
@pytest.mark.parametrize("ids", [["cpu"], ["cpu:0", "cpu:1"]], ids=",".join)
def test_a_late_write_is_that_of_one_device(ids, monkeypatch, write):
    """A single replica has no copy of the earlier values: it starts again from what it wrote."""
    monkeypatch.setattr(WritesLate, "on", False)
    model = build(lambda: WritesLate(write))
    plain = copy.deepcopy(model)
    with ScatterOnceParallel(model, 2, ids) as engine:
        engine.forward_backward(*BATCH, CRITERION)
        monkeypatch.setattr(WritesLate, "on", True)
        model.zero_grad()
        for _ in range(2):
            engine.forward_backward(*BATCH, CRITERION)
            CRITERION(plain(BATCH[0]), BATCH[1]).backward()
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(one.detach(), other.detach(), "parameter")
                assert_close(one.grad, other.grad, "gradient")


def halve(weight):
    with torch.no_grad():
        weight.mul_(0.5)


@pytest.mark.parametrize(
    ("write", "ids"),
    [(halve, ["cpu"]), (clip, ["cpu"] * 2), (halve, ["cpu:0", "cpu:1"])],
    ids=["again other values", "two at a time", "again other values, two devices"],
)
def test_a_late_write_that_cannot_be_undone_is_told(ids, monkeypatch, write):
    """No copy is kept after the first step: it would take as much memory as the model."""
    monkeypatch.setattr(WritesLate, "on", False)
    model = build(lambda: WritesLate(write))
    with ScatterOnceParallel(model, 1, ids) as engine:
        engine.forward_backward(*BATCH, CRITERION)
        monkeypatch.setattr(WritesLate, "on", True)
        model.zero_grad()
        with pytest.raises(RuntimeError, match=r"'head\.weight'.* earlier values are lost"):
            engine.forward_backward(*BATCH, CRITERION)
        assert all(p.grad is None for p in model.parameters())
        plain = copy.deepcopy(model)
        engine.forward_backward(*BATCH, CRITERION)
    CRITERION(plain(BATCH[0]), BATCH[1]).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(one.detach(), other.detach(), "parameter")
        assert_close(one.grad, other.grad, "gradient")


def test_a_late_write_before_the_user_s_own_error_is_noted(monkeypatch):
    def criterion(output, targets):
        if WritesLate.on:
            raise ArithmeticError
        return CRITERION(output, targets)

    monkeypatch.setattr(WritesLate, "on", False)
    model = build(lambda: WritesLate(halve))
    with ScatterOnceParallel(model, 2, ["cpu"] * 2) as engine:
        engine.forward_backward(*BATCH, criterion)
        monkeypatch.setattr(WritesLate, "on", True)
        with pytest.raises(ArithmeticError) as caught:
            engine.forward_backward(*BATCH, criterion)
        assert any("'head.weight'" in note for note in caught.value.__notes__)
        monkeypatch.setattr(WritesLate, "on", False)
        engine.forward_backward(*BATCH, criterion)


def test_parameters_that_nothing_writes_are_still_shared():
    model = build(lambda: Writer(clip))
    with ScatterOnceParallel(model, 2, ["cpu"] * 2) as engine:
        engine.forward_backward(*BATCH, CRITERION)
        for replica in engine.replicas:
            assert replica.enter.weight.data_ptr() == model.enter.weight.data_ptr()
            assert replica.head.weight.data_ptr() != model.head.weight.data_ptr()


def test_a_criterion_that_normalises_its_own_weights(devices):
    class Proxies(nn.Module):
        def __init__(self):
            super().__init__()
            self.proxies = nn.Parameter(torch.randn(CLASSES, CLASSES))

        def forward(self, output, targets):
            normalize(self.proxies)
            return nn.functional.cross_entropy(output @ self.proxies.T, targets)

    model, criterion = build(lambda: nn.Linear(FEATURES, CLASSES)), build(Proxies, seed=1)
    plain, plain_criterion = copy.deepcopy(model), copy.deepcopy(criterion)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        for _ in range(2):
            engine.forward_backward(*BATCH, criterion)
            plain_criterion(plain(BATCH[0]), BATCH[1]).backward()
    assert_close(criterion.proxies.detach(), plain_criterion.proxies.detach(), "proxies")
    assert_close(criterion.proxies.grad, plain_criterion.proxies.grad, "gradient")
