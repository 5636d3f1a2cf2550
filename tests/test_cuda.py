"""What only a GPU can show; one is enough: ``device_ids=[0, 0]``."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.oracle import seeded
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel, gather

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]
ROWS, FEATURES, CLASSES = 37, 8, 3
PLACES = pytest.mark.parametrize("device_ids", [[0], [0, 0], [0, 0, 0]])


def problem(*layers, dtype=torch.float64):
    with seeded():
        first, last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        inputs, targets = torch.randn(ROWS, FEATURES), torch.randint(CLASSES, (ROWS,))
    model = nn.Sequential(first, *layers, nn.Tanh(), last).to("cuda", dtype)
    return model, inputs.to(dtype), targets


def whole_batch(model, inputs, targets):
    """Loss and gradients of a copy of the model, on the one card."""
    other = copy.deepcopy(model)
    loss = nn.CrossEntropyLoss()(other(inputs.cuda()), targets.cuda())
    loss.backward()
    return loss.detach(), gradients(other)


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_close(found, expected, **tolerances):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerances)


@PLACES
@pytest.mark.parametrize("place", ["host", "pinned", "cuda"])
def test_exact_from_any_memory(device_ids, place):
    model, inputs, targets = problem()
    loss, expected = whole_batch(model, inputs, targets)
    move = {"host": lambda t: t, "pinned": lambda t: t.pin_memory(), "cuda": lambda t: t.cuda()}
    batch = [move[place](tensor) for tensor in (inputs, targets)]
    with ScatterOnceParallel(model, 3, device_ids) as engine:
        for _ in range(3):
            model.zero_grad()
            found = engine.forward_backward(*batch, nn.CrossEntropyLoss())
            assert_close(gradients(model), expected, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(found, loss, rtol=1e-10, atol=1e-12)
        crossed = sum(tensor.nbytes for tensor in batch) if place != "cuda" else 0
        bytes_counted = {"scatter": crossed, "replicate": 0, "compute": 0, "reduce": 0}
        assert engine.last_step.bytes == bytes_counted


def test_a_pinned_batch_may_be_overwritten_after_the_step():
    model, inputs, targets = problem()
    _, expected = whole_batch(model, inputs, targets)
    inputs, targets = inputs.pin_memory(), targets.pin_memory()
    with ScatterOnceParallel(model, 3, [0, 0]) as engine:
        engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
        inputs.zero_()
        assert_close(gradients(model), expected, rtol=1e-10, atol=1e-12)


@PLACES
def test_on_a_stream_of_the_users(device_ids):
    model, inputs, targets = problem()
    _, expected = whole_batch(model, inputs, targets)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with ScatterOnceParallel(model, 3, device_ids) as engine, torch.cuda.stream(stream):
        engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
        found = gradients(model)
    stream.synchronize()
    assert_close(found, expected, rtol=1e-10, atol=1e-12)


@PLACES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_reaches_every_replica(device_ids, dtype):
    model, inputs, targets = problem(dtype=torch.float32)
    _, expected = whole_batch(model, inputs, targets)
    seen = []

    def criterion(scores, labels):
        seen.append(scores.dtype)
        return nn.functional.cross_entropy(scores, labels)

    with ScatterOnceParallel(model, 2, device_ids) as engine, torch.autocast("cuda", dtype):
        engine.forward_backward(inputs, targets, criterion)
    assert seen == [dtype] * 2 * len(device_ids)
    assert_close(gradients(model), expected, rtol=0.1, atol=0.02)


@PLACES
def test_the_scaler_takes_its_factor_out_again(device_ids):
    model, inputs, targets = problem(dtype=torch.float32)
    _, expected = whole_batch(model, inputs, targets)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with ScatterOnceParallel(model, 2, device_ids) as engine:
        loss = nn.CrossEntropyLoss()
        engine.forward_backward(inputs, targets, loss, scaler=scaler)
    assert_close(gradients(model), [1024 * gradient for gradient in expected], rtol=1e-4, atol=1e-3)
    scaler.step(optimizer)
    scaler.update()
    after = [one - 0.1 * gradient for one, gradient in zip(before, expected, strict=True)]
    assert_close(list(model.parameters()), after, rtol=1e-4, atol=1e-5)


@pytest.mark.draws
def test_the_same_seed_gives_the_same_gradients_on_one_card():
    model, inputs, targets = problem(nn.Dropout(0.5))
    found = []
    with ScatterOnceParallel(model, 3, [0]) as engine:
        for seed in (1, 1, 2):
            model.zero_grad()
            torch.manual_seed(seed)
            engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
            found.append(gradients(model))
    assert_close(found[0], found[1], rtol=0, atol=0)
    assert any(not torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))


class Draws(nn.Module):
    """With operators that take a generator, which must be the card's own."""

    def forward(self, features):
        noise = torch.rand(len(features), 1, device=features.device) - 0.5
        order = torch.randperm(len(features), device=features.device)
        kept = nn.functional.dropout1d(features.unsqueeze(0), 0.5, self.training).squeeze(0)
        return kept + noise[order] * torch.randn_like(features)


@PLACES
@pytest.mark.draws
def test_every_kind_of_draw_works_on_the_card(device_ids):
    model, inputs, targets = problem(Draws())
    before = torch.get_rng_state()
    with ScatterOnceParallel(model, 3, device_ids) as engine:
        engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
    assert all(gradient.isfinite().all() for gradient in gradients(model))
    assert torch.equal(torch.get_rng_state(), before)


@PLACES
def test_the_pair(device_ids):
    model, inputs, targets = problem()
    loss, expected = whole_batch(model, inputs, targets)
    parallel = DataParallelModel(model, device_ids)
    outputs = parallel(inputs)
    found = DataParallelCriterion(nn.CrossEntropyLoss())(outputs, targets)
    found.backward()
    torch.testing.assert_close(found.detach(), loss, rtol=1e-10, atol=1e-12)
    assert_close(gradients(model), expected, rtol=1e-10, atol=1e-12)
    together = gather(outputs, "cpu")
    torch.testing.assert_close(together, model(inputs.cuda()).cpu(), rtol=1e-10, atol=1e-12)


@PLACES
def test_inference(device_ids):
    model, inputs, _ = problem()
    with ScatterOnceParallel(model, 3, device_ids).eval() as engine:
        torch.testing.assert_close(engine(inputs), model(inputs.cuda()), rtol=1e-10, atol=1e-12)
