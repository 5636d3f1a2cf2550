"""How far rounding may change results: by dtype, by autocast, by TF32 inside operators."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from harness.looks import step
from harness.models import CLASSES, FEATURES
from harness.oracle import build, randn
from harness.weighted import classes, padded
from torch import nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel
from scatterpar.verify import rounding
from scatterpar.verify.rounding import BFLOAT16, FLOAT32, FLOAT64, TF32, Rounding

ROWS = 24
INPUTS = randn(ROWS, FEATURES).float()
IMAGES = randn(ROWS, 3, 5, 5).float()
TARGETS = randn(ROWS, CLASSES).float()


class Prepared(nn.Module):
    """Enters autocast inside of its forward pass, as accelerate's models do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)
        )

    def forward(self, inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(inputs).float()


def test_check_follows_autocast_in_forward(devices):
    """A right gradient was NOT the same, with a limit of 1e-4, and count= was advised."""
    with ScatterOnceParallel(build(Prepared).float(), 3, devices(2)) as engine:
        report = engine.check(INPUTS, classes(ROWS), nn.CrossEntropyLoss())
        assert report.limit == BFLOAT16.limit
        assert report.passed
        assert report.worst > FLOAT32.limit
        wrong = engine.check(INPUTS, padded(ROWS), lambda o, t: F.cross_entropy(o, t))
        assert not wrong.passed


class Convolutions(nn.Module):
    """Its convolution rounds to 10 bits, in another way for each number of rows."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.first = nn.Conv2d(3, 4, 3)
        self.last = nn.Linear(36, CLASSES)

    def forward(self, images):
        error = self.size * TF32.eps * (len(images) % 7) / 7
        return self.last(self.first(images * (1 + error)).tanh().flatten(1))


def use_tf32(monkeypatch, operation):
    formats = {operation: TF32}
    monkeypatch.setattr(rounding, "formats_inside_operators", lambda _: formats)


@pytest.mark.parametrize("is_tf32", [False, True])
def test_tf32_convolutions_not_refused(devices, monkeypatch, is_tf32):
    if is_tf32:
        use_tf32(monkeypatch, "convolution")
    model = build(lambda: Convolutions(size=16.0)).float()
    refusal = pytest.raises(ValueError, match="would be off by")
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        with nullcontext() if is_tf32 else refusal:
            step(engine, F.mse_loss, TARGETS, IMAGES)
        with pytest.raises(ValueError, match='reduction="sum"'):
            step(engine, lambda o, t: (o - t).square().sum(), TARGETS, IMAGES)


@pytest.mark.parametrize("is_tf32", [False, True])
def test_check_has_the_limit_of_tf32(devices, monkeypatch, is_tf32):
    if is_tf32:
        use_tf32(monkeypatch, "convolution")
    model = build(lambda: Convolutions(size=2.0)).float()
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        report = engine.check(IMAGES, TARGETS, F.mse_loss)
    assert report.limit == (TF32 if is_tf32 else FLOAT32).limit
    assert report.passed == is_tf32


def test_tf32_rounds_float32_operators_only(monkeypatch):
    use_tf32(monkeypatch, "product")
    limits = []
    for layer, inputs in (
        (build(lambda: nn.Linear(3, 2)).float(), randn(4, 3).float()),
        (build(lambda: nn.Linear(3, 2)), randn(4, 3)),
        (build(lambda: nn.Conv2d(3, 2, 1)).float(), IMAGES),
    ):
        seen = Rounding(torch.device("cpu"))
        loss = layer(inputs).sum()
        seen.watch(loss)
        loss.backward()
        limits.append(seen.limit)
    assert limits == [TF32.limit, FLOAT64.limit, FLOAT32.limit]


def test_no_rounding_in_operators_on_cpu():
    assert rounding.formats_inside_operators(torch.device("cpu")) == {}
