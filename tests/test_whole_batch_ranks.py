"""whole_batch=True with ranks: one criterion over the outputs of all of them."""

from __future__ import annotations

import pytest
import torch
from helpers.contrastive import EMBEDDING, FEATURES, LOSSES, two_views
from helpers.gang import Counted, failure, gang
from helpers.oracle import assert_close, gradients, randint, randn, whole_batch
from torch import nn

from scatterpar import ScatterOnceParallel

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
    found = gang()(size, step, devices(2), loss)
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
    ((_, _, first), (_, _, second)) = gang()(2, step, devices(1), "clip")
    assert [name for name, _, _ in first] == ["all_reduce"] * 4
    assert first == second
    sizes = [size for _, _, size in first]
    assert sizes[0] == sizes[2] < 1024
    assert first[1][1] == torch.uint8
    rows = sum(ROWS[2])
    data = rows * (2 * EMBEDDING + 1) * 8 + 2 * 8  # two embeddings and a label; a scale each
    header = 2 * 8 * (2 + 2 + 2 + 1)
    assert sizes[1] == data + header


class Learned(nn.Module):
    """A criterion with a temperature of its own, a queue, and noise."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("queue", torch.zeros(3, EMBEDDING, dtype=torch.float64))

    def forward(self, outputs, labels):
        one = outputs["one"] + 0.1 * torch.randn_like(outputs["one"])
        logits = self.scale * one @ torch.cat([outputs["other"], self.queue]).T
        self.queue.copy_(one.detach()[:3])
        return nn.functional.cross_entropy(logits, torch.arange(len(labels)))


def learn(group):
    torch.manual_seed(group.rank())  # what the criterion draws is the same on all nevertheless
    model, criterion = two_views(), Learned()
    with ScatterOnceParallel(model, 2, ["cpu"] * 2, process_group=group) as engine:
        before = torch.get_rng_state()
        losses = [
            engine.forward_backward(*part_of(group), criterion, whole_batch=True) for _ in "ab"
        ]
    moved = not torch.equal(before, torch.get_rng_state())
    return losses, criterion.scale.grad, criterion.queue, gradients(model), moved


def test_the_criterion_counts_once_and_draws_alike():
    (losses, scale, queue, grads, moved), *others = gang()(2, learn)
    assert losses[0] != losses[1]
    assert moved
    for other_losses, other_scale, other_queue, other_grads, _ in others:
        assert other_losses == losses
        assert torch.equal(other_scale, scale)
        assert torch.equal(other_queue, queue)
        for name, gradient in grads.items():
            assert gradient is None or torch.equal(gradient, other_grads[name])


def learn_without_noise(group):
    model, criterion = two_views(), Learned()
    with ScatterOnceParallel(model, 2, ["cpu"] * 2, process_group=group) as engine:
        with_noise, torch.randn_like = torch.randn_like, torch.zeros_like
        try:
            engine.forward_backward(*part_of(group), criterion, whole_batch=True)
        finally:
            torch.randn_like = with_noise
    return criterion.scale.grad


def test_the_gradient_of_the_criterion_s_own_parameter():
    model, criterion = two_views(), Learned()
    (one, other), labels = batch(sum(ROWS[2]))
    outputs = model(one, other)
    logits = criterion.scale * outputs["one"] @ torch.cat([outputs["other"], criterion.queue]).T
    nn.functional.cross_entropy(logits, torch.arange(len(labels))).backward()
    for scale in gang()(2, learn_without_noise):
        assert_close(scale, criterion.scale.grad, "scale")


class Trouble(Exception):
    pass


class Troubled(nn.Module):
    """Raises on demand, the first or the second time that it sees a micro-batch."""

    def __init__(self, when):
        super().__init__()
        self.body = two_views()
        self.when = when
        self.seen = []  # not followed by replicas: torch modules and plain containers are

    def forward(self, one, other):
        if self.when == "forward":
            raise Trouble("mine")
        outputs = self.body(one, other)
        if self.when == "backward":
            outputs["one"].register_hook(self._raise)
        return outputs

    def _raise(self, _):
        raise Trouble("mine")


def fail(group, where, culprit):
    model = Troubled(None)
    one, labels = part_of(group)

    def criterion(outputs, labels):
        if where == "criterion" and group.rank() == culprit:
            raise Trouble("mine")
        return LOSSES["clip"](outputs, labels)

    options, devices = {"whole_batch": True}, ["cpu"] * 2
    with ScatterOnceParallel(model, 2, devices, process_group=group, verify=False) as engine:
        if group.rank() == culprit:
            model.when = where
            if where == "empty batch":
                one, labels = tuple(t[:0] for t in one), labels[:0]
            if where == "other call":
                options = {}
            if where == "other kind":
                labels = labels.double()
        found = failure(engine.forward_backward, one, labels, criterion, **options)
        assert all(p.grad is None for p in model.parameters())
        model.when = None
        engine.forward_backward(*part_of(group), LOSSES["clip"], whole_batch=True)
    return found, gradients(model.body)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("where", ["forward", "criterion", "backward", "empty batch"])
def test_one_rank_that_fails_makes_all_raise_once(where, culprit):
    answers = gang()(2, fail, where, culprit)
    kind = "ValueError" if where == "empty batch" else "Trouble"
    assert answers[culprit][0][0] == kind
    other = answers[1 - culprit][0]
    assert other[0] == "RuntimeError"
    assert f"rank {culprit} of 2 failed in this step" in other[1]
    expected = whole_batch(two_views(), *batch(sum(ROWS[2])), LOSSES["clip"])[1]
    for _, grads in answers:
        for name, gradient in expected.items():
            assert_close(grads[name], gradient, name)


@pytest.mark.parametrize("where", ["other call", "other kind"])
def test_ranks_that_disagree_all_raise(where):
    for (kind, words), _ in gang()(2, fail, where, 1):
        assert kind == "RuntimeError"
        assert "the ranks disagree on" in words
