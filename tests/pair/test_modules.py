"""Modules of every kind keep their meaning when their replicas hang in autograd's graph."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.models import CLASSES, FEATURES, TokenClassifier, mlp
from helpers.oracle import assert_close, assert_gradients, build, gradients, randint, randn
from helpers.zoo import MODELS
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from pair.common import Pair, assert_pair
from scatterpar import DataParallelModel

BATCH = randn(9, FEATURES), randint(CLASSES, 9)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "weight norm, old"])
def test_zoo(placed, name):
    pair = Pair(build(MODELS[name]), nn.CrossEntropyLoss(), placed(4))
    for _ in range(2):
        pair.check(*BATCH)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_by_hooks(placed):
    """Its weight is a plain attribute, made anew in every forward pass, and cannot be copied."""
    model, twin = build(MODELS["weight norm, old"]), build(MODELS["weight norm, old"])
    pair = Pair(model, nn.CrossEntropyLoss(), placed(3))
    for _ in range(2):
        nn.CrossEntropyLoss()(twin(BATCH[0]), BATCH[1]).backward()
        pair.loss(*BATCH).backward()
        assert_gradients(model, gradients(twin))


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_spectral_norm_in_training(placed, norm):
    """Every replica takes the same power iteration, and the module keeps it."""
    model = build(lambda: norm(nn.Linear(FEATURES, CLASSES)))
    twin = copy.deepcopy(model)
    pair = Pair(model, nn.CrossEntropyLoss(), placed(3))
    for _ in range(3):
        model.zero_grad()
        twin.zero_grad()
        nn.CrossEntropyLoss()(twin(BATCH[0]), BATCH[1]).backward()
        pair.loss(*BATCH).backward()
        assert_gradients(model, gradients(twin))
    for mine, its in zip(model.buffers(), twin.buffers(), strict=True):
        assert_close(mine, its, "buffer")


def test_sparse_gradients(placed):
    model = build(TokenClassifier)
    model.embedding.sparse = True
    batch = randint(11, 9, 3), randint(CLASSES, 9, 3)
    assert_pair(model, *batch, nn.CrossEntropyLoss(), placed(4))
    assert model.embedding.weight.grad.is_sparse


class BothWays(nn.Module):
    """One weight with a sparse gradient from the embedding, and a dense one from the head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 6, sparse=True)

    def forward(self, ids):
        return self.embedding(ids) @ self.embedding.weight.T


def test_sparse_and_dense_gradients_of_one_weight(placed):
    model = build(BothWays)
    assert_pair(model, randint(CLASSES, 9), BATCH[1], nn.CrossEntropyLoss(), placed(4))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(randn(FEATURES, CLASSES, dtype=torch.complex128))

    def forward(self, inputs):
        return (inputs.to(torch.complex128) @ self.weight).abs()


def test_complex_parameters(placed):
    model = Complex()
    assert_pair(model, *BATCH, nn.CrossEntropyLoss(), placed(4))
    assert model.weight.grad.dtype == torch.complex128


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_half_parameters_beside_double_ones(placed, dtype):
    model = nn.Sequential(mlp()[0].to(dtype), Cast(), *mlp()[1:])
    assert_pair(
        model, BATCH[0].to(dtype), BATCH[1], nn.CrossEntropyLoss(), placed(4), relative=0.02
    )
    assert model[0].weight.grad.dtype == dtype


class Cast(nn.Module):
    def forward(self, inputs):
        return inputs.double()


class TrainedBuffer(nn.Module):
    """A buffer that requires grad, one that the forward pass also writes to, and attributes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("scale", torch.ones(CLASSES))
        self.constant = torch.full((CLASSES,), 0.5).double()

    def forward(self, inputs):
        return self.linear(inputs) * self.scale + self.constant * self.scale.exp()


def trained_buffer():
    model = build(TrainedBuffer)
    model.scale.requires_grad_()
    return model


def test_buffers_that_require_grad(placed):
    model = trained_buffer()
    twin = copy.deepcopy(model)
    pair = Pair(model, nn.CrossEntropyLoss(), placed(4))
    for _ in range(2):
        nn.CrossEntropyLoss()(twin(BATCH[0]), BATCH[1]).backward()
        pair.loss(*BATCH).backward()
    assert_gradients(model, gradients(twin))
    assert_close(model.scale.grad, twin.scale.grad, "scale")
    assert model.scale.is_leaf


@pytest.mark.parametrize("layer", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)])
def test_in_place_first_layers_write_to_nobody_s_tensors(placed, layer):
    inputs = randn(9, FEATURES)
    kept = inputs.clone()
    model = nn.Sequential(layer, mlp())
    pair = Pair(model, nn.CrossEntropyLoss(), placed(4))
    twin = copy.deepcopy(model)
    nn.CrossEntropyLoss()(twin(inputs.clone()), BATCH[1]).backward()
    for _ in range(10):  # replicas that write to each other's share do so in a race
        model.zero_grad()
        pair.loss(inputs, BATCH[1]).backward()
        assert_gradients(model, gradients(twin))
    assert torch.equal(inputs, kept)


def test_a_criterion_that_writes_to_its_targets(placed):
    targets = randn(9, CLASSES, seed=3)
    kept = targets.clone()

    def criterion(output, targets):
        return ((output - targets.mul_(2)) ** 2).mean()

    for _ in range(3):
        assert_pair(mlp(), BATCH[0], targets, criterion, placed(4))
    assert torch.equal(targets, kept)


class Blocks(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(3)])
        self.head = nn.Linear(FEATURES, CLASSES)
        self.use_reentrant = use_reentrant

    def forward(self, inputs):
        inputs = inputs + self.head.bias.sum() * 0  # the reentrant variant needs a gradient
        for block in self.blocks:
            inputs = checkpoint(
                lambda hidden, block=block: block(hidden).tanh(),
                inputs,
                use_reentrant=self.use_reentrant,
            )
        return self.head(inputs)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(placed, use_reentrant):
    model = build(lambda: Blocks(use_reentrant))
    assert_pair(model, *BATCH, nn.CrossEntropyLoss(), placed(4))


class Marked(nn.Module):
    """Reads what somebody has written on a parameter."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs):
        return self.linear(inputs) * self.linear.weight.multiplier


def test_attributes_of_parameters(placed):
    model = build(Marked)
    model.linear.weight.multiplier = 3.0
    outputs = DataParallelModel(model, placed(4))(BATCH[0])
    assert_close(torch.cat(outputs), model(BATCH[0]), "outputs")


def test_replicas_have_their_parameters(placed):
    """``nn.DataParallel``'s replicas say that they have none."""
    found = []

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(FEATURES, CLASSES)

        def forward(self, inputs):
            found.append([name for name, _ in self.named_parameters()])
            return self.linear(inputs) + sum(p.abs().sum() for p in self.parameters())

    assert_pair(build(Looks), *BATCH, nn.CrossEntropyLoss(), placed(3))
    assert found[-3:] == [["linear.weight", "linear.bias"]] * 3


def test_the_module_is_read_anew_in_every_forward(placed):
    model = mlp()
    pair = Pair(model, nn.CrossEntropyLoss(), placed(3))
    pair.check(*BATCH)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    pair.check(*BATCH)
    model[0].weight.data = randn(7, FEATURES, seed=8)
    pair.check(*BATCH)
    model[1] = nn.Sigmoid()
    pair.check(*BATCH)
    model.append(build(lambda: nn.Linear(CLASSES, CLASSES), seed=3))
    pair.check(*BATCH)
