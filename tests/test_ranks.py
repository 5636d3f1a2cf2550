"""Ranks: the gradient of the union of all batches, the same bits everywhere, few collectives."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from helpers.gang import Counted, gang
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import (
    assert_close,
    assert_gradients,
    build,
    gradients,
    randint,
    randn,
    whole_batch,
)
from torch import nn

from scatterpar import ScatterOnceParallel

# How many rows each rank has: uneven on purpose, some fewer than there are replicas.
ROWS = {2: (9, 4), 3: (7, 1, 5)}
IGNORED = -100


class Summed(nn.Module):
    reduction = "sum"

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="sum")


class Counting(nn.Module):
    """A mean over the positive entries of the outputs, which only ``count=`` can tell."""

    def forward(self, outputs, weights):
        return (outputs.square().sum(1) * weights).sum() / weights.sum()


def weights_of(_, weights):
    return weights.sum()


def ignoring(rows):
    """Class weights and ignored targets: all of rank 1's, the last 4, are ignored."""
    targets = randint(CLASSES, rows)
    targets[::3] = IGNORED
    targets[-4:] = IGNORED
    return targets


def class_weighted():
    return nn.CrossEntropyLoss(weight=randn(CLASSES, seed=5).abs() + 0.1)


LOSSES = {
    "mean": (nn.CrossEntropyLoss, lambda rows: randint(CLASSES, rows), {}),
    "sum": (Summed, lambda rows: randint(CLASSES, rows), {}),
    "weighted": (class_weighted, ignoring, {}),
    "counted": (Counting, lambda rows: randn(rows, seed=4).abs() + 0.1, {"count": weights_of}),
}


def part(group, tensor, rows):
    return tensor.split(rows)[group.rank()]


def step(group, devices, accum, loss):
    rows = ROWS[group.size()]
    criterion, targets_of, options = LOSSES[loss]
    model = build(mlp, seed=group.rank())  # rank 0's weights are taken over
    inputs, targets = randn(sum(rows), FEATURES), targets_of(sum(rows))
    mine = part(group, inputs, rows), part(group, targets, rows)
    with (
        ScatterOnceParallel(model, accum, devices, process_group=group) as engine,
        Counted() as collectives,
    ):
        value = engine.forward_backward(*mine, criterion(), **options)
        assert engine.last_step.loss == value.item()
    return value, gradients(model), collectives


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_a_step_is_that_of_all_batches_together(devices, size, replicas, loss):
    found = gang()(size, step, devices(replicas), 2, loss)
    rows = sum(ROWS[size])
    criterion, targets_of, _ = LOSSES[loss]
    model = build(mlp, seed=0)
    expected = whole_batch(model, randn(rows, FEATURES), targets_of(rows), criterion())
    for value, grads, collectives in found:
        assert_close(value, expected[0], "loss")
        for name, gradient in expected[1].items():
            assert_close(grads[name], gradient, name)
            assert torch.equal(grads[name], found[0][1][name]), f"{name} differs between ranks"
        assert torch.equal(value, found[0][0])
        (small, *_, small_bytes), *large = collectives
        assert small == "all_reduce"
        assert small_bytes < 1024
        assert [(name, dtype) for name, dtype, _ in large] == [("all_reduce", torch.float64)]
        elements = sum(p.numel() for p in model.parameters())
        assert large[0][2] <= 8 * (elements + 100)


def two_steps(group, **options):
    model = build(mlp)
    inputs, targets = (part(group, t, ROWS[2]) for t in (randn(13, FEATURES), randint(CLASSES, 13)))
    with ScatterOnceParallel(
        model, 2, ["cpu:0", "cpu:1"], process_group=group, verify=False, **options
    ) as engine:
        losses = [engine.forward_backward(inputs, targets, nn.CrossEntropyLoss()) for _ in range(2)]
    return losses, gradients(model)


def test_captured_sub_steps_give_the_same_bits():
    for (losses, found), (others, expected) in zip(
        gang()(2, functools.partial(two_steps, graphs=True)), gang()(2, two_steps), strict=True
    ):
        assert losses == others
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class Mixed(nn.Module):
    """Parameters of several dtypes, tied, frozen, sparse, and some that only some ranks use."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, FEATURES, sparse=True)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.tied = self.first
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.single = nn.Parameter(torch.randn(FEATURES))
        self.turn = nn.Parameter(torch.randn(FEATURES, dtype=torch.complex128))
        self.sometimes = nn.Linear(FEATURES, FEATURES)
        self.never = nn.Linear(2, 2)
        self.norm = nn.Conv2d(2, 3, (2, 2)).to(memory_format=torch.channels_last)

    def forward(self, words):
        rows = self.frozen(self.tied(self.first(self.table(words)))) * self.single
        rows = rows + torch.view_as_real(rows * self.turn).sum(-1)
        chosen = (words == 0).unsqueeze(1)
        if chosen.any():
            rows = rows + self.sometimes(rows) * chosen
        image = torch.stack([rows, rows.tanh(), rows.sin(), rows.cos()], 1)
        return rows + self.norm(image.unflatten(1, (2, 2))).flatten(1).sum(1, keepdim=True)


def mixed_step(group):
    words = torch.tensor([1, 2, 2, 3, 6, 5, 4, 0, 0, 3, 1])
    rows = {2: (7, 4), 3: (3, 4, 4)}[group.size()]
    model = build(Mixed)
    targets = randn(11, FEATURES)
    expected = whole_batch(model, words, targets, nn.MSELoss())
    with (
        ScatterOnceParallel(model, 2, ["cpu"] * 2, process_group=group) as engine,
        Counted() as collectives,
    ):
        batch = part(group, words, rows), part(group, targets, rows)
        loss = engine.forward_backward(*batch, nn.MSELoss())
    assert_close(loss, expected[0], "loss")
    assert_gradients(model, expected[1])
    assert model.table.weight.grad.is_sparse
    assert model.never.weight.grad is None
    assert model.frozen.weight.grad is None
    assert model.sometimes.weight.grad is not None
    assert model.norm.weight.grad.is_contiguous(memory_format=torch.channels_last)
    dtypes = [dtype for _, dtype, _ in collectives[1:]]
    assert sorted(map(str, dtypes)) == ["torch.complex128", "torch.float64", "torch.float64"]
    return {name: None if g is None else g.to_dense() for name, g in gradients(model).items()}


@pytest.mark.parametrize("size", [2, 3])
def test_every_kind_of_parameter(size):
    first, *others = gang()(size, mixed_step)
    for other in others:
        for name, gradient in first.items():
            assert gradient is None or torch.equal(gradient, other[name]), name


class Predicting(nn.Module):
    """Sparse tables: one gives the logits too, one where word 0 comes, one and one never do."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(CLASSES, 4, sparse=True) for _ in range(4))

    def forward(self, words):
        tied, sometimes, looked_up, only_read = self.tables
        rows = tied(words) + sometimes(words) + looked_up(words)
        chosen = (words == 0).unsqueeze(1)
        if chosen.any():
            rows = rows + chosen * (rows @ sometimes.weight.T @ sometimes.weight)
        return rows @ tied.weight.T + rows @ only_read.weight.T


def predicting(group):
    words, targets = torch.tensor([1, 2, 0, 2, 1, 0, 0, 1, 2, 2, 1, 2, 1]), randint(CLASSES, 13)
    model = build(Predicting)
    _, expected = whole_batch(model, words, targets, nn.CrossEntropyLoss())
    with ScatterOnceParallel(model, 1, ["cpu"], process_group=group) as engine:
        mine = part(group, words, ROWS[2]), part(group, targets, ROWS[2])
        engine.forward_backward(*mine, nn.CrossEntropyLoss())
    assert_gradients(model, expected)
    layouts = [table.weight.grad.layout for table in model.tables]
    assert layouts == [torch.strided, torch.strided, torch.sparse_coo, torch.strided]


def test_a_sparse_table_that_is_used_densely_too_has_a_dense_gradient():
    """It was sparse, which Adam refuses."""
    gang()(2, predicting)


def scaled(group):
    model = build(mlp)
    twin = copy.deepcopy(model)
    inputs, targets, criterion = randn(13, FEATURES), randint(CLASSES, 13), nn.CrossEntropyLoss()
    batch = part(group, inputs, ROWS[2]), part(group, targets, ROWS[2])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ScatterOnceParallel(model, process_group=group) as engine:
        engine.forward_backward(*batch, criterion, scaler=scaler)
    criterion(twin(inputs), targets).backward()
    assert_gradients(model, {name: 8 * g for name, g in gradients(twin).items()})
    scaler.unscale_(optimizer)
    assert_gradients(model, gradients(twin))
    scaler.step(optimizer)
    scaler.update()


def test_a_scaler_scales_the_gradients_of_all():
    gang()(2, scaled)


def several_engines(group):
    models = [build(mlp, seed) for seed in (1, 2)]
    batch = randn(13, FEATURES), randint(CLASSES, 13)
    mine = [part(group, tensor, ROWS[2]) for tensor in batch]
    expected = [whole_batch(model, *batch, nn.CrossEntropyLoss())[1] for model in models]
    engines = [ScatterOnceParallel(model, process_group=group) for model in models]
    for _ in range(2):
        for engine, gradient in zip(engines, expected, strict=True):
            engine.module.zero_grad()
            engine.forward_backward(*mine, nn.CrossEntropyLoss())
            assert_gradients(engine.module, gradient)
    for engine in engines:
        engine.close()


def test_several_engines_share_a_group():
    gang()(2, several_engines)
