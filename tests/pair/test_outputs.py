"""The pair is a part of autograd's graph: backward is the user's, and does what it
always does.

Each ``program`` runs twice; every kind of loss is in ``exact/test_cases.py``.
"""

from __future__ import annotations

import copy

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of, linear, mlp
from harness.oracle import gradients, randint, randn
from torch import nn
from torch.nn.functional import cross_entropy

from pair.common import Pair, Plain, assert_alike

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread_an_operation")]

BATCH = randn(11, FEATURES), randint(CLASSES, 11)


def frozen():
    """Takes a copy of a part of itself, without gradient, in every forward pass."""

    def forward(m, inputs):
        copied = copy.deepcopy(m.linear)
        assert all(
            p.is_leaf and isinstance(p, nn.Parameter) for p in copied.parameters()
        )
        return m.linear(inputs) * copied.requires_grad_(False)(inputs)

    return Of(forward, linear=linear())


def two_heads():
    heads = {name: nn.Linear(6, CLASSES) for name in ("first", "second", "never")}
    heads["body"] = nn.Linear(FEATURES, 6)
    return Of(
        lambda m, x: [head(m.body(x).tanh()) for head in (m.first, m.second)], **heads
    )


def first_head():
    return lambda outputs, targets: cross_entropy(outputs[0], targets)


PROGRAMS = {}  # by name: the program, the model, and what makes the criterion


def program(model, criterion=None):
    """Each program runs with the pair, and in plain torch."""

    def register(function):
        PROGRAMS[function.__name__] = function, model, criterion
        return function

    return register


@program(mlp)
def retain_graph(of):
    loss = of.loss(*BATCH)
    loss.backward(retain_graph=True)
    once = gradients(of.module)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    return once.values()


@program(mlp)
def gradient_penalty(of):
    """``create_graph``: the gradient of a gradient, with respect to the parameters."""
    loss = of.loss(*BATCH)
    found = torch.autograd.grad(loss, list(of.module.parameters()), create_graph=True)
    total = loss + sum((gradient**2).sum() for gradient in found)
    total.backward()
    return [total]


@program(mlp)
def inputs_get_their_gradient(of):
    leaf, base = (BATCH[0].clone().requires_grad_() for _ in range(2))
    (of.loss(leaf, BATCH[1]) + of.loss(base.exp(), BATCH[1])).backward()
    return [leaf.grad, base.grad]


@program(mlp)
def an_in_place_change_before_backward_is_an_error_as_always(of):
    loss = of.loss(*BATCH)
    with torch.no_grad():
        of.module[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified.* inplace"):
        loss.backward()
    of.module.zero_grad()


@program(frozen)
def a_part_is_copied_in_the_forward_pass(of):
    """``copy.deepcopy`` failed: "Only Tensors created explicitly by the user"."""
    of.loss(*BATCH).backward()


@program(two_heads, first_head)
def hooks_run_once_with_the_whole_gradient(of):
    """Those of parameters that the loss does not reach do not run, as in
    plain torch.
    """
    hooked, accumulated = {}, []
    for name, parameter in of.module.named_parameters():
        parameter.register_hook(
            lambda g, name=name: hooked.setdefault(name, []).append(g)
        )
        parameter.register_post_accumulate_grad_hook(
            lambda p, n=name: accumulated.append(n)
        )
    of.loss(*BATCH).backward()
    assert sorted(hooked) == sorted(accumulated)
    assert {name.split(".")[0] for name in hooked} == {"body", "first"}
    return [gradient for name in sorted(hooked) for gradient in hooked[name]]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_as_in_plain_torch(devices, name):
    run, make, criterion = PROGRAMS[name]
    assert_alike(make, run, devices(4), criterion)


@pytest.mark.parametrize("replicas", [1, 4])
def test_one_replica_has_plain_bits_repeatedly(devices, replicas):
    def stepped(kind, *device_ids):
        of = kind(mlp().float(), nn.CrossEntropyLoss(), *device_ids)
        loss = of.loss(BATCH[0].float(), BATCH[1])
        loss.backward()
        return [loss, *(p.grad for p in of.module.parameters())]

    first, *others = (stepped(Pair, devices(replicas)) for _ in range(5))
    for other in others if replicas > 1 else [*others, stepped(Plain)]:
        assert all(map(torch.equal, first, other))
