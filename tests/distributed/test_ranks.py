"""Ranks: the gradient of the union of all batches, the same bits everywhere, few collectives."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of, mlp
from harness.module_cases import CASES
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    gradients,
    randint,
    randn,
    whole_batch,
)
from harness.rank_processes import Counted, run_on_ranks
from torch import nn

from scatterpar import Replicated, Rows, ScatterOnceParallel

# How many rows each rank has: uneven on purpose, some fewer than there are replicas.
ROWS = {2: (9, 4), 3: (7, 1, 5)}
IGNORED = -100


class Summed(nn.Module):
    reduction = "sum"

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def counting(outputs, weights):
    """A mean over the positive entries of the outputs, which only ``count=`` can tell."""
    return (outputs.square().sum(1) * weights).sum() / weights.sum()


def positive(rows):
    return randn(rows, seed=4).abs() + 0.1


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
    "counted": (lambda: counting, lambda rows: randn(rows, seed=4) ** 2, {"count": weights_of}),
}


def part(group, tensor, rows):
    return tensor.split(rows)[group.rank()]


def step(group, devices, accum, loss):
    rows = ROWS[group.size()]
    criterion, targets_of, options = LOSSES[loss]
    model = mlp(group.rank())  # rank 0's weights are taken over
    inputs, targets = randn(sum(rows), FEATURES), targets_of(sum(rows))
    mine = part(group, inputs, rows), part(group, targets, rows)
    engine = ScatterOnceParallel(model, accum, devices, process_group=group)
    with engine, Counted() as collectives:
        value = engine.forward_backward(*mine, criterion(), **options)
        assert engine.last_step.loss == value.item()
    return value, gradients(model), collectives


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_a_step_is_that_of_all_batches_together(devices, size, replicas, loss):
    found = run_on_ranks(size, step, devices(replicas), 2, loss)
    rows = sum(ROWS[size])
    criterion, targets_of, _ = LOSSES[loss]
    model = mlp()
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
    options |= {"process_group": group, "verify": False}
    with ScatterOnceParallel(model, 2, ["cpu:0", "cpu:1"], **options) as engine:
        losses = [engine.forward_backward(inputs, targets, nn.CrossEntropyLoss()) for _ in range(2)]
    return losses, gradients(model)


def test_captured_sub_steps_give_the_same_bits():
    for (losses, found), (others, expected) in zip(
        run_on_ranks(2, functools.partial(two_steps, graphs=True)),
        run_on_ranks(2, two_steps),
        strict=True,
    ):
        assert losses == others
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def collectives_of(group):
    model = CASES["several dtypes"].build()
    batch = randn(9, FEATURES).split((5, 4))[group.rank()], randint(CLASSES, 9).split((5, 4))
    with ScatterOnceParallel(model, process_group=group) as engine, Counted() as collectives:
        engine.forward_backward(batch[0], batch[1][group.rank()], nn.CrossEntropyLoss())
    return sorted(str(dtype) for _, dtype, _ in collectives[1:])


def test_there_is_one_large_collective_for_each_dtype():
    assert run_on_ranks(2, collectives_of) == [["torch.float32", "torch.float64"]] * 2


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


def several_engines(group):
    models = [mlp(seed) for seed in (1, 2)]
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


def masks(group, replicas):
    torch.manual_seed(7)
    if replicas is None:  # of each rank others
        replicas = 3 - group.rank()
    options = {"process_group": group, "verify": False}  # a sum, taken for a mean
    parts = {"weight": nn.Parameter(torch.ones(64)), "dropout": nn.Dropout()}
    module = Of(lambda m, inputs: m.dropout(m.weight * inputs), **parts)  # puts out the mask
    with ScatterOnceParallel(module, 1, ["cpu"] * replicas, **options) as engine:
        seen = []
        for _ in range(2):
            _, outputs = engine.forward_backward(
                torch.ones(replicas, 64), criterion=lambda out, _: out.sum(), return_outputs=True
            )
            seen += [output.flatten().tolist() for output in outputs]
    return seen


@pytest.mark.parametrize("replicas", [1, 2, None])
def test_every_replica_of_every_rank_draws_masks_of_its_own(replicas):
    found = run_on_ranks(3, masks, replicas)
    drawn = [tuple(mask) for seen in found for mask in seen]
    assert len(set(drawn)) == len(drawn) == 3 * 2 * (replicas or 2)
    assert found == run_on_ranks(3, masks, replicas)


def lists_and_windows(group):
    """Each rank's own batches: of another number, of other lengths, with a table for all."""
    rank = group.rank()
    model = build(lambda: nn.Embedding(9, CLASSES))
    table = randn(CLASSES, CLASSES)

    def looks(module, ids, table):
        return torch.stack([module.words(sentence).sum(0) for sentence in ids]) @ table

    module = Of(looks, words=model)

    def batches(rank):
        return [[randint(9, n + 1, seed=n + rank) for n in range(2 + b)] for b in range(2 - rank)]

    labels = [randint(CLASSES, 5, seed=3), randint(CLASSES, 2, seed=4)]
    window = [(Rows(batch), Replicated(table)) for batch in batches(rank)]
    with ScatterOnceParallel(module, 2, ["cpu:0", "cpu:1"], process_group=group) as engine:
        engine.forward_backward(Rows.from_batches(window), labels[rank], nn.CrossEntropyLoss())
        actual = model.weight.grad.clone()
        model.zero_grad()
        everything = [sentence for r in range(2) for batch in batches(r) for sentence in batch]
        output = copy.deepcopy(engine.module)
        loss = nn.functional.cross_entropy(output(everything, table), torch.cat(labels))
        loss.backward()
    assert_close(actual, output.words.weight.grad, "weight")


@pytest.mark.contract
@pytest.mark.parametrize("case", [scaled, several_engines, lists_and_windows])
def test_two_ranks_are_one_device_with(case):
    run_on_ranks(2, case)
