"""whole_batch=True with ranks: one criterion over the outputs of all of them."""

from __future__ import annotations

import pytest
import torch
from harness.contrastive import EMBEDDING, FEATURES, LOSSES, two_views
from harness.oracle import assert_close, gradients, randint, randn, whole_batch
from harness.rank_processes import Counted, failure, run_on_ranks
from torch import nn

from scatterpar import Replicated, Rows, ScatterOnceParallel

ROWS = {2: (9, 4), 3: (7, 1, 5)}  # uneven, and rank 1 has fewer than it has replicas


def batch(rows):
    return (randn(rows, FEATURES, seed=5), randn(rows, FEATURES, seed=6)), randint(4, rows)


def part_of(group):
    rows = ROWS[group.size()]
    (one, other), labels = batch(sum(rows))
    one, other, labels = (t.split(rows)[group.rank()] for t in (one, other, labels))
    return (one, other), labels


def step(group, devices, loss):
    model = two_views(seed=group.rank())  # rank 0's weights are taken over
    with (
        ScatterOnceParallel(model, 2, devices, process_group=group) as engine,
        Counted() as collectives,
    ):
        value = engine.forward_backward(*part_of(group), LOSSES[loss], whole_batch=True)
    return value, gradients(model), collectives


@pytest.mark.parametrize("loss", ["clip", "barlow_twins", "ranking"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_gradient_is_that_of_all_ranks_batches(devices, size, loss):
    expected, expected_gradients = whole_batch(two_views(), *batch(sum(ROWS[size])), LOSSES[loss])
    found = run_on_ranks(size, step, devices(2), loss)
    for value, grads, _ in found:
        assert_close(value, expected, "loss")
        assert torch.equal(value, found[0][0])
        for name, gradient in expected_gradients.items():
            if gradient is None:
                assert grads[name] is None
            else:
                assert_close(grads[name], gradient, name)
                assert torch.equal(grads[name], found[0][1][name]), f"{name} differs between ranks"


def test_there_are_four_collectives(devices):
    """Two below 1 KiB, the outputs and targets, and the gradients."""
    ((_, _, first), (_, _, second)) = run_on_ranks(2, step, devices(1), "clip")
    assert [name for name, _, _ in first] == ["all_reduce"] * 4
    assert first == second
    sizes = [size for _, _, size in first]
    assert sizes[0] == sizes[2] < 1024
    assert first[1][1] == torch.uint8
    rows = sum(ROWS[2])
    data = rows * (2 * EMBEDDING + 1) * 8 + 2 * 8  # two embeddings and a label; a scale each
    header = 2 * 8 * (2 + 2 + 2 + 1)
    assert sizes[1] == data + header


def beside_a_table(outputs, targets):
    labels, table = targets
    return nn.functional.cross_entropy(outputs["one"] @ table["centres"].T, labels)


def step_beside_a_table(group, devices):
    inputs, labels = part_of(group)
    table = Replicated({"centres": TABLE if group.rank() == 0 else TABLE * 2})
    model = two_views()
    with ScatterOnceParallel(model, 2, devices, process_group=group, verify=False) as engine:
        loss = engine.forward_backward(inputs, (labels, table), beside_a_table, whole_batch=True)
    return loss, gradients(model)


TABLE = randn(4, EMBEDDING, seed=9)


def test_targets_without_rows_are_rank_0_s(devices):
    """A table that was marked ``Replicated`` was joined with the other ranks', row after row."""
    (one, other), labels = batch(sum(ROWS[2]))
    targets = labels, {"centres": TABLE}
    expected, its = whole_batch(two_views(), (one, other), targets, beside_a_table)
    for loss, found in run_on_ranks(2, step_beside_a_table, devices(2)):
        assert_close(loss, expected, "loss")
        for name in ("first.weight", "last.weight"):
            assert_close(found[name], its[name], name)


class OneByOne(nn.Linear):
    def forward(self, rows):
        return [super(OneByOne, self).forward(row) for row in rows]


def lists_of(group, where):
    """As many rows on every rank, so that entry by entry all shapes are alike."""
    rows = randn(2, FEATURES, seed=group.rank())
    targets = {
        "outputs": None,
        "tensors": Rows(list(rows)),
        "texts": Rows(["a", "b"]),
        "collated": Rows(list(rows), torch.stack),
    }[where]
    model = (OneByOne if where == "outputs" else nn.Linear)(FEATURES, 2).double()
    inputs = Rows(list(rows)) if where == "outputs" else rows

    def criterion(outputs, _):
        return torch.stack(list(outputs)).sum()

    with ScatterOnceParallel(model, process_group=group) as engine:
        raised = failure(engine.forward_backward, inputs, targets, criterion, whole_batch=True)
    return raised, gradients(model)


@pytest.mark.parametrize("where", ["outputs", "tensors", "texts", "collated"])
def test_lists_are_refused_that_ranks_cannot_join(where):
    """They were joined entry by entry, or rank 0's texts were taken for all rows' ones."""
    for (kind, text), found in run_on_ranks(2, lists_of, where):
        assert kind == "ValueError"
        assert "whole_batch" in text
        assert ("outputs" if where == "outputs" else "targets") in text
        assert all(gradient is None for gradient in found.values())


class Learned(nn.Module):
    """A criterion with a temperature of its own, a queue, and noise."""

    def __init__(self, noise):
        super().__init__()
        self.noise = noise
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("queue", torch.zeros(3, EMBEDDING, dtype=torch.float64))

    def forward(self, outputs, labels):
        one = outputs["one"] + self.noise * torch.randn_like(outputs["one"])
        logits = self.scale * one @ torch.cat([outputs["other"], self.queue]).T
        self.queue.copy_(one.detach()[:3])
        return nn.functional.cross_entropy(logits, torch.arange(len(labels)))


def learn(group, noise):
    torch.manual_seed(group.rank())  # what the criterion draws is the same on all nevertheless
    model, criterion = two_views(), Learned(noise)
    with ScatterOnceParallel(model, 2, ["cpu"] * 2, process_group=group, verify=False) as engine:
        before = torch.get_rng_state()
        losses = [
            engine.forward_backward(*part_of(group), criterion, whole_batch=True) for _ in "ab"
        ]
    assert not torch.equal(before, torch.get_rng_state())
    return losses, gradients(criterion) | gradients(model) | {"queue": criterion.queue}


@pytest.mark.draws
@pytest.mark.parametrize("noise", [0.1, 0.0])
def test_the_criterion_counts_once_and_draws_alike(noise):
    (losses, found), (other_losses, other) = run_on_ranks(2, learn, noise)
    assert losses[0] != losses[1]
    assert other_losses == losses
    assert all(g is None or torch.equal(g, other[name]) for name, g in found.items())
    if not noise:
        model, criterion = two_views(), Learned(noise)
        (one, other), labels = batch(sum(ROWS[2]))
        for _ in "ab":
            criterion(model(one, other), labels).backward()
        assert_close(found["scale"], criterion.scale.grad, "scale")


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(EMBEDDING).double()

    def forward(self, outputs, _):
        return self.norm(outputs["one"]).pow(3).mean()


def normalise(group):
    criterion = Normalised()
    options = {"process_group": group, "buffers": "batch"}
    with ScatterOnceParallel(two_views(), 2, ["cpu"] * 2, **options) as engine:
        engine.forward_backward(*part_of(group), criterion, whole_batch=True)
    return dict(criterion.named_buffers())


def test_statistics_of_the_criterion_move_once():
    """Each rank had seen all rows, and so the variance was that of more rows than there are."""
    (inputs, _), criterion = batch(sum(ROWS[2])), Normalised()
    criterion(two_views()(*inputs), None)
    for found in run_on_ranks(2, normalise):
        for name, buffer in criterion.named_buffers():
            assert_close(found[name].double(), buffer.double(), name)
