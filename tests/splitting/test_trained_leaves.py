"""Which leaves a step trains, and their names."""

from __future__ import annotations

import pytest
import torch
from harness.oracle import seeded
from splitting.loop_models import Net, backward_sums, images, new
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FullyShardedDataParallel

from scatterpar import splitcheck
from scatterpar.splitting.trained_leaves import (
    NamedLeaves,
    TrainedGradients,
    leaves_of_step,
)


def models():
    with seeded():
        return nn.Linear(2, 1), nn.Linear(1, 3)


def test_leaves_outside_of_model_are_named():
    model, head = models()
    state = {"scale": nn.Parameter(torch.ones(())), "frozen": torch.ones(2)}

    def step(model_of_step, batches):
        return head, state, model

    assert set(leaves_of_step(model, step).outside) == {
        "step.head.weight",
        "step.head.bias",
        "step.state['scale']",
    }


def test_what_is_kept_has_names():
    model, teacher = models()
    teacher.requires_grad_(False)
    model.register_buffer("centre", torch.zeros(3))
    model.norm = nn.BatchNorm1d(3)  # whose statistics move in any training

    def step(model_of_step, batches):
        return teacher, model, torch.ones(2)

    kept = leaves_of_step(model, step).kept
    assert set(kept) == {"centre", "step.teacher.weight", "step.teacher.bias"}


def test_what_moves_is_told_from_what_is_trained():
    model, teacher = models()
    teacher.requires_grad_(False)
    model.register_buffer("centre", torch.full((3,), torch.nan))
    kept = {"centre": model.centre, "mean": teacher.weight, "old": teacher.bias}
    gradients = TrainedGradients(model, NamedLeaves({}, kept))
    with gradients:
        teacher.bias.data += 1
        model(torch.ones(1, 2)).sum().backward()
        assert not gradients.moves_weights
        model.weight.data += 1
        model(torch.ones(1, 2)).sum().backward()
    assert gradients.moves_weights
    assert gradients.moved() == ("old",)


def test_leaf_of_no_optimizer_is_not_compared():
    model, head = models()
    outside = {"step.head.weight": head.weight}
    gradients = TrainedGradients(model, NamedLeaves(outside, {}))
    with gradients:
        head(model(torch.ones(1, 2))).sum().backward()
    named, uncompared = gradients.result()
    assert set(named) == {"weight", "bias", "step.head.weight"}
    unnamed = "a parameter of shape (3,) that step makes"
    assert uncompared == [unnamed]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert not gradients.receive(optimizer)
    named, uncompared = gradients.result()
    assert set(named) == {"weight", "bias"}
    assert sorted(uncompared) == [unnamed, "step.head.weight"]
    assert gradients.receive(torch.optim.SGD(head.parameters(), 0.1))
    named, uncompared = gradients.result()
    assert set(named) == {"weight", "bias", "step.head.weight", "step.SGD.0.1"}
    assert uncompared == []
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_second_step_of_an_optimizer_is_the_next_one():
    """A teacher that requires grad has no optimizer: the step must end all the same."""
    model, teacher = models()
    gradients = TrainedGradients(
        model, NamedLeaves({"step.teacher": teacher.weight}, {})
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert not gradients.receive(optimizer)
    assert gradients.receive(optimizer)


def test_change_by_hand_outside_of_model_counts():
    model, head = models()
    gradients = TrainedGradients(model, NamedLeaves({"step.head.bias": head.bias}, {}))
    with torch.no_grad():
        head.bias -= 0.5
    named, _ = gradients.result()
    change = named["step.head.bias"]
    torch.testing.assert_close(change, torch.full_like(change, 0.5))


@pytest.mark.parametrize("kind", [list, iter, lambda roots: {"a": roots[0]}.values()])
def test_roots_in_any_iterable_are_followed(kind):
    model, head = models()
    gradients = TrainedGradients(model, NamedLeaves({}, {}))
    with gradients:
        torch.autograd.backward(kind([head(torch.ones(1, 1)).sum()]))
    assert head.weight.grad is not None
    assert not gradients.receive(torch.optim.SGD(model.parameters(), 0.1))
    assert gradients.receive(torch.optim.SGD(head.parameters(), 0.1))


def test_edge_of_the_graph_is_a_root():
    model, _ = models()
    edge = get_gradient_edge(model(torch.ones(1, 2)).sum())
    with TrainedGradients(model, NamedLeaves({}, {})):
        torch.autograd.backward(edge)
    assert model.bias.grad.tolist() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_flat_parameters_on_ranks_are_refused(use_orig_params):
    def step(model, batches):
        host = torch.device("cpu")
        sharded = FullyShardedDataParallel(
            model, use_orig_params=use_orig_params, device_id=host
        )
        backward_sums(sharded, batches)

    with pytest.raises(ValueError, match="FSDP flattens parameters; use fully_shard"):
        splitcheck(step, new(Net), images(), ranks=2)
