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
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel
from scatterpar.numerics import rounding
from scatterpar.numerics.rounding import BFLOAT16, FLOAT32, FLOAT64, TF32, Rounding
from scatterpar.verify import look

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


def tf32(tensor):
    """The tensor, rounded to 10 bits of mantissa."""
    return (tensor.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


class Product(torch.autograd.Function):
    """A product that rounds its operands to TF32 if torch's setting says so.

    As on a GPU, kernels for few rows use no tensor cores.
    """

    @staticmethod
    def forward(context, inputs, weight):
        context.save_for_backward(inputs, weight)
        context.round = lambda tensor: tensor
        if torch.backends.cuda.matmul.allow_tf32 and len(inputs) > 3:
            context.round = tf32
        return context.round(inputs) @ context.round(weight).T

    @staticmethod
    def backward(context, gradient):
        inputs, weight = map(context.round, context.saved_tensors)
        gradient = context.round(gradient)
        return gradient @ weight, gradient.T @ inputs


class Deep(nn.Module):
    """Many layers that enlarge rounding, as those of a DenseNet do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(24))
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs):
        features = inputs
        for layer in self.layers:
            features = Product.apply(features, layer.weight).sin() * 3
        return self.last(features)


@pytest.fixture
def allowed_tf32(monkeypatch):
    use_tf32(monkeypatch, "product")
    formats = {"product": TF32}
    monkeypatch.setattr(look, "formats_inside_operators", lambda _: formats)
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


def test_looks_compute_without_tf32(devices, monkeypatch, allowed_tf32):
    """Two right gradients differed by 6 %, where 3 % are allowed."""
    differences = []
    judged = look._judged

    def recorded(results, run):
        differences.append(results.difference)
        return judged(results, run)

    monkeypatch.setattr(look, "_judged", recorded)
    for rounds in (False, True):
        if rounds:
            monkeypatch.setattr(look, "_without_tf32", lambda _: nullcontext())
        with ScatterOnceParallel(build(Deep).float(), 3, devices(2)) as engine:
            step(engine, F.mse_loss, TARGETS, INPUTS)
        assert torch.backends.cuda.matmul.allow_tf32
    # The one that is not refused is then of the step's own parts, too.
    exact, _, rounded = differences
    assert exact < FLOAT32.tolerance
    assert rounded > TF32.tolerance


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


def test_check_leaves_no_hook_on_parameters(monkeypatch):
    """A leaf's node stays while anything refers to it, such as the hooks of calls."""
    net = build(lambda: nn.Linear(FEATURES, CLASSES))
    nodes = [get_gradient_edge(parameter).node for parameter in net.parameters()]
    with ScatterOnceParallel(net, device_ids=["cpu"] * 2) as engine:
        step(engine, nn.CrossEntropyLoss(), classes(ROWS), randn(ROWS, FEATURES))
        engine(randn(ROWS, FEATURES)).sum().backward()
    added = []
    monkeypatch.setattr(Rounding, "add", lambda self, dtype: added.append(dtype))
    net(randn(ROWS, FEATURES)).sum().backward()
    assert len(nodes) == 2
    assert added == []
