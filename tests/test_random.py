"""Random numbers: reproducible to the bit, different in every replica, and nobody else's."""

from __future__ import annotations

import pytest
import torch
from helpers.models import CLASSES, FEATURES, Classifier, mlp
from helpers.noise import BATCH, NUMBERED, ROWS, VARIANTS, Masks, Noisy, dropout_model, equal, step
from helpers.oracle import assert_close, build
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.threads import generators

pytestmark = pytest.mark.draws


@pytest.fixture(autouse=True)
def _forget_masks():
    Masks.drawn.clear()
    yield
    Masks.drawn.clear()
    Masks.replay = False


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_masks_that_were_drawn(devices, variant):
    """Replay the very masks on one device: a recomputation with others would show here."""
    model = build(lambda: Noisy(VARIANTS[variant]))
    twin = build(Noisy)
    with ScatterOnceParallel(model, 3, devices(4)) as engine:
        for seed in range(5):
            Masks.drawn.clear()
            Masks.replay = False
            torch.manual_seed(seed)
            model.zero_grad()
            loss = engine.forward_backward(NUMBERED, BATCH[1], nn.CrossEntropyLoss())
            assert len(Masks.drawn) == ROWS
            Masks.replay = True
            twin.zero_grad()
            expected = nn.CrossEntropyLoss()(twin(NUMBERED), BATCH[1])
            expected.backward()
            assert_close(loss, expected.detach(), "loss")
            for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
                assert_close(mine.grad, its.grad, name)


def test_replicas_draw_different_masks(devices):
    model = build(Noisy)
    with ScatterOnceParallel(model, 2, devices(4)) as engine:
        torch.manual_seed(0)
        engine.forward_backward(NUMBERED, BATCH[1], nn.CrossEntropyLoss())
        masks = [tuple(mask.tolist()) for mask in Masks.drawn.values()]
        assert len(set(masks)) == ROWS


def test_the_seed_decides_the_step_on_an_engine_that_ran_before(devices):
    with ScatterOnceParallel(dropout_model(), 2, devices(3)) as engine:
        first = step(engine, seed=7)
        other = step(engine, seed=8)
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        engine.forward_backward(BATCH[0][:5], BATCH[1][:5], nn.CrossEntropyLoss())
        again = step(engine, seed=7)
    assert equal(first, again)
    assert not equal(first, other)


def test_steps_without_a_new_seed_differ(devices):
    with ScatterOnceParallel(dropout_model(), 2, devices(3)) as engine:
        torch.manual_seed(1)
        losses = {engine.forward_backward(*BATCH, nn.CrossEntropyLoss()).item() for _ in range(6)}
    assert len(losses) == 6


def test_a_replica_other_than_the_first_drawing_moves_the_generator(devices):
    """If only replica 1 drew, the next step must not draw the same again."""

    class OnlyLast(Classifier):
        def forward(self, numbered):
            outputs = self.linear(numbered[:, 1:])
            return outputs * torch.rand_like(outputs) if numbered[-1, 0] == ROWS - 1 else outputs

    with ScatterOnceParallel(build(OnlyLast), 1, devices(2)) as engine:
        torch.manual_seed(1)
        losses = [engine.forward_backward(NUMBERED, BATCH[1], nn.CrossEntropyLoss()) for _ in "ab"]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("model", [mlp, lambda: dropout_model().eval()])
def test_a_model_that_draws_nothing_leaves_the_generator_untouched(devices, model):
    with ScatterOnceParallel(model(), 2, devices(3)) as engine:
        before = torch.get_rng_state()
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        engine.eval()
        engine(BATCH[0])
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("accum", [1, 3])
def test_one_replica_is_the_plain_loop_bit_for_bit(devices, accum):
    ours, plain = dropout_model(), dropout_model()
    criterion = nn.CrossEntropyLoss()
    torch.manual_seed(5)
    with ScatterOnceParallel(ours, accum, devices(1)) as engine:
        for _ in range(3):
            engine.forward_backward(*BATCH, criterion)
    following = torch.rand(3)
    torch.manual_seed(5)
    for _ in range(3):
        twin_gradients = [p.grad for p in plain.parameters()]
        plain.zero_grad()
        for inputs, targets in zip(BATCH[0].chunk(accum), BATCH[1].chunk(accum), strict=True):
            (criterion(plain(inputs), targets) * (len(inputs) / ROWS)).backward()
        for parameter, before in zip(plain.parameters(), twin_gradients, strict=True):
            if before is not None:
                parameter.grad = before + parameter.grad
    assert torch.equal(torch.rand(3), following)
    for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)


def test_replica_0_continues_the_caller_s_stream(devices):
    """Its masks are those that a plain call with the same seed draws."""
    with ScatterOnceParallel(build(Noisy), 1, devices(3)) as engine:
        torch.manual_seed(11)
        engine.forward_backward(NUMBERED, BATCH[1], nn.CrossEntropyLoss())
    share = {row: Masks.drawn[row] for row in range(8)}
    Masks.drawn.clear()
    torch.manual_seed(11)
    expected = torch.bernoulli(torch.full((8, 32), 0.5).double()) * 2
    assert torch.equal(torch.stack([share[row] for row in range(8)]), expected)


ELSEWHERE = {
    "rand": lambda: torch.rand(3, device="meta"),
    "randperm": lambda: torch.randperm(3, device="meta"),
    "rand_like": lambda: torch.rand_like(torch.zeros(3), device="meta"),
    "normal": lambda: torch.normal(torch.zeros(3, device="meta"), 1.0),
    "normal, std": lambda: torch.normal(0.0, torch.ones(3, device="meta")),
    "bernoulli_": lambda: torch.empty(3, device="meta").bernoulli_(0.5),
    "out": lambda: torch.rand(3, out=torch.empty(3, device="meta")),
    "dropout1d": lambda: nn.functional.dropout1d(torch.ones(1, 2, 3, device="meta")),
}


@pytest.mark.parametrize("draw", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_draws_on_another_device_uses_that_device_s_generator(devices, draw, monkeypatch):
    """An accelerator refuses the CPU's generators; ``meta`` stands in for one here."""
    asked = []
    current = generators._current
    monkeypatch.setattr(generators, "_current", lambda: asked.append(1) or current())

    class Draws(nn.Linear):
        def forward(self, inputs):
            draw()
            return super().forward(inputs)

    model = build(lambda: Draws(FEATURES, CLASSES))
    before = torch.get_rng_state()
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    assert not asked
    assert torch.equal(torch.get_rng_state(), before)
