"""The pair is a part of autograd's graph: backward is the user's, and does what it always does."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import assert_close, assert_gradients, build, gradients, randint, randn
from torch import nn

from pair.common import Pair, plain
from scatterpar import DataParallelModel, gather

BATCH = randn(11, FEATURES), randint(CLASSES, 11)


def pair_of(model, devices):
    return Pair(model, nn.CrossEntropyLoss(), devices)


def test_retain_graph(placed):
    model = mlp()
    _, expected = plain(model, *BATCH, nn.CrossEntropyLoss())
    loss = pair_of(model, placed(3)).loss(*BATCH)
    loss.backward(retain_graph=True)
    assert_gradients(model, expected)
    loss.backward()
    assert_gradients(model, {name: 2 * g for name, g in expected.items()})
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_autograd_grad_leaves_the_parameters_alone(placed):
    model = mlp()
    _, expected = plain(model, *BATCH, nn.CrossEntropyLoss())
    found = torch.autograd.grad(pair_of(model, placed(3)).loss(*BATCH), list(model.parameters()))
    for gradient, (name, its) in zip(found, expected.items(), strict=True):
        assert_close(gradient, its, name)
    assert all(p.grad is None for p in model.parameters())


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(FEATURES, 6)
        self.first = nn.Linear(6, CLASSES)
        self.second = nn.Linear(6, CLASSES)
        self.never = nn.Linear(6, CLASSES)

    def forward(self, inputs):
        hidden = self.body(inputs).tanh()
        return self.first(hidden), self.second(hidden)


def test_hooks_on_parameters_run_once_with_the_whole_gradient(placed):
    """Those of parameters that the loss does not reach do not run, as in plain torch."""
    model = build(TwoHeads)
    twin = copy.deepcopy(model)
    nn.CrossEntropyLoss()(twin(BATCH[0])[0], BATCH[1]).backward()
    hooked, accumulated = [], []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: hooked.append((name, g.clone())))
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: accumulated.append(n))
    pair = Pair(model, lambda outputs, t: nn.functional.cross_entropy(outputs[0], t), placed(4))
    pair.loss(*BATCH).backward()
    used = [n for n, _ in model.named_parameters() if n.split(".")[0] in ("body", "first")]
    assert sorted(name for name, _ in hooked) == sorted(accumulated) == sorted(used)
    for name, gradient in hooked:
        assert_close(gradient, twin.get_parameter(name).grad, name)
    assert_gradients(model, gradients(twin))
    assert model.second.weight.grad is None
    assert model.never.weight.grad is None


def test_a_hook_may_change_the_gradient(placed):
    model = mlp()
    _, expected = plain(model, *BATCH, nn.CrossEntropyLoss())
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    pair_of(model, placed(3)).loss(*BATCH).backward()
    expected["0.weight"] = expected["0.weight"].clamp(-0.01, 0.01)
    assert_gradients(model, expected)


def test_gradient_penalty(placed):
    """``create_graph``: the gradient of a gradient, with respect to the parameters."""

    def penalty(loss, parameters):
        found = torch.autograd.grad(loss, parameters, create_graph=True)
        return loss + sum((gradient**2).sum() for gradient in found)

    model = mlp()
    twin = copy.deepcopy(model)
    expected = penalty(nn.CrossEntropyLoss()(twin(BATCH[0]), BATCH[1]), list(twin.parameters()))
    expected.backward()
    total = penalty(pair_of(model, placed(3)).loss(*BATCH), list(model.parameters()))
    total.backward()
    assert_close(total.detach(), expected.detach(), "penalty")
    assert_gradients(model, gradients(twin))


def test_penalty_on_the_gradient_of_the_inputs(placed):
    def run(model, inputs):
        outputs = model(inputs)
        total = sum(o.sum() for o in outputs) if isinstance(outputs, tuple) else outputs.sum()
        (slope,) = torch.autograd.grad(total, inputs, create_graph=True)
        return (slope.norm(2, 1) - 1).pow(2).mean()

    model = mlp()
    twin = copy.deepcopy(model)
    inputs, same = (BATCH[0].clone().requires_grad_() for _ in range(2))
    run(twin, same).backward()
    run(DataParallelModel(model, placed(4)), inputs).backward()
    assert_gradients(model, gradients(twin))
    assert_close(inputs.grad, same.grad, "inputs")


@pytest.mark.parametrize("leaf", [True, False])
def test_inputs_get_their_gradient(placed, leaf):
    inputs, same = (BATCH[0].clone().requires_grad_() for _ in range(2))
    model = mlp()
    expected = nn.CrossEntropyLoss()(copy.deepcopy(model)(same if leaf else same.exp()), BATCH[1])
    expected.backward()
    pair_of(model, placed(4)).loss(inputs if leaf else inputs.exp(), BATCH[1]).backward()
    assert_close(inputs.grad, same.grad, "inputs")


def test_targets_may_be_another_network_s_output(placed):
    student, teacher = mlp(), mlp(seed=1)
    twins = copy.deepcopy([student, teacher])
    nn.MSELoss()(twins[0](BATCH[0]), twins[1](BATCH[0])).backward()
    Pair(student, nn.MSELoss(), placed(3)).loss(BATCH[0], teacher(BATCH[0])).backward()
    assert_gradients(student, gradients(twins[0]))
    assert_gradients(teacher, gradients(twins[1]))


@pytest.mark.parametrize("between", [False, True])
def test_two_forwards_before_one_backward(placed, between):
    """Siamese networks; and an evaluation in between, which must not spoil the graphs."""
    model = build(
        lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
    )
    model[1].eval()
    twin = copy.deepcopy(model)
    left, right = BATCH[0], randn(11, FEATURES, seed=9)
    expected = (twin(left) * twin(right)).mean()
    expected.backward()
    pair = DataParallelModel(model, placed(3))
    first = pair(left)
    if between:
        pair.eval()
        with torch.no_grad():
            pair(right)
        pair.train()
        model[1].eval()
    second = pair(right)
    loss = (gather(first, "cpu") * gather(second, "cpu")).mean()
    loss.backward()
    assert_close(loss.detach(), expected.detach(), "loss")
    assert_gradients(model, gradients(twin))


def test_weights_that_another_network_computes(placed):
    """A tensor in the place of a parameter passes its gradient on to what it was made of."""

    class Hypernetwork(nn.Module):
        def forward(self, inputs):
            return inputs @ self.weight

    def run(seed_weights, step):
        net = Hypernetwork()
        net.weight = seed_weights.exp()
        step(net).backward()
        return seed_weights.grad

    expected, found = (randn(FEATURES, CLASSES, seed=4).requires_grad_() for _ in range(2))
    run(expected, lambda net: nn.CrossEntropyLoss()(net(BATCH[0]), BATCH[1]))
    run(found, lambda net: pair_of(net, placed(3)).loss(*BATCH))
    assert_close(found.grad, expected.grad, "weights")


def test_a_tensor_left_over_from_a_finished_graph(placed):
    model = mlp()
    model.last = model[0].weight.exp()
    model.last.sum().backward()
    model.zero_grad()
    _, expected = plain(mlp(), *BATCH, nn.CrossEntropyLoss())
    pair_of(model, placed(3)).loss(*BATCH).backward()
    assert_gradients(model, expected)


def test_an_in_place_change_before_backward_is_an_error_as_always():
    model = mlp()
    loss = pair_of(model, ["cpu"] * 2).loss(*BATCH)
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified.* inplace"):
        loss.backward()
