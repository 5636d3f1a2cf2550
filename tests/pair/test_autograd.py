"""The pair is a part of autograd's graph: backward is the user's, and does what it always does.

Each ``program`` runs twice, with the pair and in plain torch; every kind of loss is in
test_weighted_losses.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from harness.models import CLASSES, FEATURES, Classifier, mlp
from harness.oracle import assert_gradients, gradients, randint, randn
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from pair.common import Pair, Plain, assert_alike

pytestmark = pytest.mark.core

BATCH = randn(11, FEATURES), randint(CLASSES, 11)


def deep():
    layers = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


class Frozen(Classifier):
    """Takes a copy of a part of itself, without gradient, in every forward pass."""

    def forward(self, inputs):
        frozen = copy.deepcopy(self.linear)
        assert all(p.is_leaf and isinstance(p, nn.Parameter) for p in frozen.parameters())
        return self.linear(inputs) * frozen.requires_grad_(False)(inputs)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(FEATURES, 6)
        self.first, self.second, self.never = (nn.Linear(6, CLASSES) for _ in range(3))

    def forward(self, inputs):
        hidden = self.body(inputs).tanh()
        return self.first(hidden), self.second(hidden)


def retain_graph(of):
    loss = of.loss(*BATCH)
    loss.backward(retain_graph=True)
    once = gradients(of.module)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    return once.values()


def autograd_grad_leaves_the_parameters_alone(of):
    return torch.autograd.grad(of.loss(*BATCH), list(of.module.parameters()))


def some_leaves_alone(of):
    """``backward(inputs=…)``: the others keep what they had."""
    of.loss(*BATCH).backward(inputs=[of.module[0][0].weight, of.module[5].bias])


def a_hook_on_the_node_of_a_parameter_sees_its_gradient(of):
    """Other libraries put them there; nothing tells but that the node is kept."""
    weight, seen = of.module[0][0].weight, []
    node = torch.autograd.graph.get_gradient_edge(weight).node
    node.register_hook(lambda *_: seen.append(weight.grad.clone()))
    of.loss(*BATCH).backward()
    return seen


def a_hook_may_change_the_gradient(of):
    of.module[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    of.loss(*BATCH).backward()


def a_penalty_on_the_parameters_beside_the_loss(of):
    penalty = sum((p**2).sum() for p in of.module.parameters())
    (of.loss(*BATCH) + penalty).backward()


def gradient_penalty(of):
    """``create_graph``: the gradient of a gradient, with respect to the parameters."""
    loss = of.loss(*BATCH)
    found = torch.autograd.grad(loss, list(of.module.parameters()), create_graph=True)
    total = loss + sum((gradient**2).sum() for gradient in found)
    total.backward()
    return [total]


def penalty_on_the_gradient_of_the_inputs(of):
    inputs = BATCH[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(of.outputs(inputs).sum(), inputs, create_graph=True)
    (slope.norm(2, 1) - 1).pow(2).mean().backward()
    return [inputs.grad]


def inputs_get_their_gradient(of):
    leaf, base = (BATCH[0].clone().requires_grad_() for _ in range(2))
    (of.loss(leaf, BATCH[1]) + of.loss(base.exp(), BATCH[1])).backward()
    return [leaf.grad, base.grad]


def a_tensor_left_over_from_a_finished_graph(of):
    of.module.last = of.module[0].weight.exp()
    of.module.last.sum().backward()
    of.module.zero_grad()
    of.loss(*BATCH).backward()


def an_in_place_change_before_backward_is_an_error_as_always(of):
    loss = of.loss(*BATCH)
    with torch.no_grad():
        of.module[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified.* inplace"):
        loss.backward()
    of.module.zero_grad()


def a_part_is_copied_in_the_forward_pass(of):
    """``copy.deepcopy`` failed: "Only Tensors created explicitly by the user"."""
    of.loss(*BATCH).backward()


def a_checkpoint_around_all_of_it(of):
    """It tells what it computes again by the order in which tensors were saved."""
    for _ in range(8):
        checkpoint(of.loss, *BATCH, use_reentrant=False).backward()


def hooks_run_once_with_the_whole_gradient(of):
    """Those of parameters that the loss does not reach do not run, as in plain torch."""
    hooked, accumulated = {}, []
    for name, parameter in of.module.named_parameters():
        parameter.register_hook(lambda g, name=name: hooked.setdefault(name, []).append(g))
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: accumulated.append(n))
    of.loss(*BATCH).backward()
    assert sorted(hooked) == sorted(accumulated)
    assert {name.split(".")[0] for name in hooked} == {"body", "first"}
    return [gradient for name in sorted(hooked) for gradient in hooked[name]]


def targets_are_another_network_s_output(of):
    teacher = mlp(seed=1)
    of.loss(BATCH[0], teacher(BATCH[0])).backward()
    return gradients(teacher).values()


def normalised():
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
    model[1].eval()
    return model


def two_forwards_before_one_backward(of, evaluate=lambda of: None):
    """Siamese networks."""
    left, right = BATCH[0], randn(11, FEATURES, seed=9)
    first = of.outputs(left)
    evaluate(of)
    loss = (first * of.outputs(right)).mean()
    loss.backward()
    return [loss]


def an_evaluation_between_two_forwards(of):
    """It must not spoil the graphs."""

    def evaluate(of):
        of.model.eval()
        with torch.no_grad():
            of.outputs(BATCH[0])
        of.model.train()
        of.module[1].eval()

    return two_forwards_before_one_backward(of, evaluate)


class Hypernetwork(nn.Module):
    def forward(self, inputs):
        return inputs @ self.weight


def weights_that_another_network_computes(of):
    """A tensor in the place of a parameter passes its gradient on to what it was made of."""
    made_of = randn(FEATURES, CLASSES, seed=4).requires_grad_()
    of.module.weight = made_of.exp()
    of.loss(*BATCH).backward()
    return [made_of.grad]


def a_backward_that_fails_leaves_gradients_alone(of):
    fails = [True]

    def hook(gradient):
        if fails:
            raise KeyError("mine")

    outputs = of.model(BATCH[0])
    (outputs[2] if isinstance(of, Pair) else outputs).register_hook(hook)
    loss = of.criterion(outputs, BATCH[1])
    with pytest.raises(KeyError, match="mine"):
        loss.backward(retain_graph=True)
    assert all(p.grad is None for p in of.module.parameters())
    fails.clear()
    of.loss(*BATCH).backward()


def first_head():
    return lambda outputs, targets: cross_entropy(outputs[0], targets)


PROGRAMS = {  # the model, and what makes the criterion
    a_part_is_copied_in_the_forward_pass: (Frozen, None),
    retain_graph: (mlp, None),
    autograd_grad_leaves_the_parameters_alone: (mlp, None),
    some_leaves_alone: (deep, None),
    a_hook_on_the_node_of_a_parameter_sees_its_gradient: (deep, None),
    a_hook_may_change_the_gradient: (mlp, None),
    a_penalty_on_the_parameters_beside_the_loss: (deep, None),
    gradient_penalty: (mlp, None),
    penalty_on_the_gradient_of_the_inputs: (mlp, None),
    inputs_get_their_gradient: (mlp, None),
    a_tensor_left_over_from_a_finished_graph: (mlp, None),
    an_in_place_change_before_backward_is_an_error_as_always: (mlp, None),
    a_checkpoint_around_all_of_it: (deep, None),
    hooks_run_once_with_the_whole_gradient: (TwoHeads, first_head),
    targets_are_another_network_s_output: (mlp, nn.MSELoss),
    two_forwards_before_one_backward: (normalised, None),
    an_evaluation_between_two_forwards: (normalised, None),
    weights_that_another_network_computes: (Hypernetwork, None),
    a_backward_that_fails_leaves_gradients_alone: (deep, None),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gives_what_it_gives_in_plain_torch(devices, program):
    make, criterion = PROGRAMS[program]
    assert_alike(make, program, devices(4), criterion)


def test_a_weight_tied_between_model_and_criterion(devices):
    class Tied(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, output, targets):
            return cross_entropy(output @ self.weight, targets)

    inputs, targets = randn(7, FEATURES), randint(7, 7)
    model, twin = mlp(), mlp()
    Plain(twin, Tied(twin[2].weight)).loss(inputs, targets).backward()
    Pair(model, Tied(model[2].weight), devices(3)).loss(inputs, targets).backward()
    assert_gradients(model, gradients(twin))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sixteen_calls_before_a_step_are_the_whole_batch(devices, reduction):
    rows = 16 * 5 - 3
    inputs, targets = randn(rows, FEATURES), randint(CLASSES, rows)

    def program(of):
        total = torch.zeros(()).double()
        pieces = 16 if isinstance(of, Pair) else 1
        for some, its in zip(inputs.tensor_split(pieces), targets.tensor_split(pieces)):  # noqa: B905
            part = of.loss(some, its) * (len(some) / rows if reduction == "mean" else 1)
            part.backward()
            total += part.detach()
        return [total]

    assert_alike(mlp, program, devices(3), lambda: nn.CrossEntropyLoss(reduction=reduction))


@pytest.mark.parametrize("answer", [int, torch.as_tensor])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_count_gets_each_output_with_its_targets(devices, replicas, answer):
    """Of a mean over what is not ignored, in shares of which some have more of that."""
    seen, targets = [], BATCH[1].clone()
    targets[1::2] = targets[:3] = -100

    def count(output, targets):
        seen.append((len(output), len(targets)))
        return answer((targets != -100).sum())

    Pair(mlp(), cross_entropy, devices(replicas)).check(BATCH[0], targets, count=count)
    assert [a for a, _ in seen] == [b for _, b in seen]
    assert sum(a for a, _ in seen) == 11
    assert len(seen) == replicas


@pytest.mark.parametrize("replicas", [1, 4])
def test_one_replica_is_the_plain_model_bit_for_bit_and_runs_repeat(devices, replicas):
    found = []
    for _ in range(5):
        pair = Pair(mlp().float(), nn.CrossEntropyLoss(), devices(replicas))
        found.append(stepped(pair))
    if replicas == 1:
        found.append(stepped(Plain(mlp().float(), nn.CrossEntropyLoss())))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def stepped(of):
    loss = of.loss(BATCH[0].float(), BATCH[1])
    loss.backward()
    return [loss.detach(), *(p.grad for p in of.module.parameters())]
