"""Ranks in training: masks of their own, and twenty steps beside ``DistributedDataParallel``."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.gang import gang
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import assert_close, build, randint, randn
from torch import nn

from scatterpar import Replicated, Rows, ScatterOnceParallel


class Masks(nn.Module):
    """Its output is the mask that dropout drew."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.dropout = nn.Dropout()

    def forward(self, inputs):
        return self.dropout(self.weight * inputs)


def masks(group, replicas):
    torch.manual_seed(7)
    options = {"process_group": group, "verify": False}  # a sum, taken for a mean
    with ScatterOnceParallel(Masks(), 1, ["cpu"] * replicas, **options) as engine:
        seen = []
        for _ in range(2):
            _, outputs = engine.forward_backward(
                torch.ones(replicas, 64), criterion=lambda out, _: out.sum(), return_outputs=True
            )
            seen += [output.flatten().tolist() for output in outputs]
    return seen


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_replica_of_every_rank_draws_masks_of_its_own(replicas):
    found = gang()(3, masks, replicas)
    drawn = [tuple(mask) for seen in found for mask in seen]
    assert len(set(drawn)) == len(drawn) == 3 * 2 * replicas
    assert found == gang()(3, masks, replicas)


def lists_and_windows(group):
    """Each rank's own batches: of another number, of other lengths, with a table for all."""
    rank = group.rank()
    model = build(lambda: nn.Embedding(9, CLASSES))
    table = randn(CLASSES, CLASSES)

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = model

        def forward(self, ids, table):
            return torch.stack([self.words(sentence).sum(0) for sentence in ids]) @ table

    def batches(rank):
        return [[randint(9, n + 1, seed=n + rank) for n in range(2 + b)] for b in range(2 - rank)]

    labels = [randint(CLASSES, 5, seed=3), randint(CLASSES, 2, seed=4)]
    window = [(Rows(batch), Replicated(table)) for batch in batches(rank)]
    with ScatterOnceParallel(Looks(), 2, ["cpu:0", "cpu:1"], process_group=group) as engine:
        engine.forward_backward(Rows.from_batches(window), labels[rank], nn.CrossEntropyLoss())
        actual = model.weight.grad.clone()
        model.zero_grad()
        everything = [sentence for r in range(2) for batch in batches(r) for sentence in batch]
        output = copy.deepcopy(engine.module)
        loss = nn.functional.cross_entropy(output(everything, table), torch.cat(labels))
        loss.backward()
    assert_close(actual, output.words.weight.grad, "weight")


def test_lists_and_windows_over_ranks():
    gang()(2, lists_and_windows)


def beside_ddp(group):
    """Twenty steps with momentum, beside ``DistributedDataParallel`` on the same data."""
    model = build(mlp)
    twin = copy.deepcopy(model)
    ddp = nn.parallel.DistributedDataParallel(twin, process_group=group)
    criterion = nn.CrossEntropyLoss()
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
        for m in (model, twin)
    ]
    with ScatterOnceParallel(model, 2, process_group=group) as engine:
        for number in range(20):
            batch = randn(16, FEATURES, seed=number), randint(CLASSES, 16, seed=number)
            inputs, targets = (tensor.chunk(2)[group.rank()] for tensor in batch)
            for optimizer in optimizers:
                optimizer.zero_grad()
            engine.forward_backward(inputs, targets, criterion)
            with ddp.no_sync():
                (criterion(ddp(inputs[:4]), targets[:4]) / 2).backward()
            (criterion(ddp(inputs[4:]), targets[4:]) / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_close(ours.detach(), theirs.detach(), name)
    return [p.detach() for p in model.parameters()]


def test_twenty_steps_are_those_of_distributed_data_parallel():
    first, second = gang()(2, beside_ddp)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
