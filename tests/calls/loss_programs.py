"""Programs of ``programs``: what users do with calls, and change between them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from calls.programs import Own, Program, cross_entropy, mlp


def _adversarial(call, net, rows, labels):
    """Fast gradient sign: a step along the sign of the inputs' gradient."""
    inputs = rows.clone().requires_grad_()
    loss = F.cross_entropy(call(inputs), labels)
    (slope,) = torch.autograd.grad(loss, inputs)
    return F.cross_entropy(call(rows + 0.1 * slope.sign()), labels)


def _laplacian(call, net, rows, labels):
    """Second derivatives by the inputs, as physics-informed networks need."""
    inputs = rows.clone().requires_grad_()
    (slope,) = torch.autograd.grad(call(inputs).sum(), inputs, create_graph=True)
    total = 0
    for column in range(2):
        of_column = slope[:, column].sum()
        (second,) = torch.autograd.grad(of_column, inputs, create_graph=True)
        total = total + second[:, column]
    return (total - 1).square().mean()


def _jacobian(call, net, rows, labels):
    inputs = rows.clone().requires_grad_()
    output = call(inputs)
    parts = []
    for column in output.unbind(1):
        parts.append(torch.autograd.grad(column.sum(), inputs, create_graph=True)[0])
    return torch.stack(parts).square().mean()


def _inputs_get_gradients(call, net, rows, labels):
    inputs = rows.clone().requires_grad_()
    output = call(inputs)
    output.square().mean().backward(retain_graph=True)
    return (output * inputs.grad[:, :3]).mean()


def _with_teacher(call, net, rows, labels):
    """The module's own output without a graph is the target."""
    with torch.no_grad():
        target = call(rows + 0.5).softmax(1)
    return F.cross_entropy(call(rows), target)


def _weighted_by_itself(call, net, rows, labels):
    output = call(rows)
    return (output * output.detach().sigmoid()).mean()


def _parts_of_rows(call, net, rows, labels):
    one = call(rows[:1]).square().mean()
    return one + F.cross_entropy(call(rows), labels) + call(rows[:4]).exp().mean()


def _hook_on_output(call, net, rows, labels):
    output = call(rows)
    output.register_hook(lambda gradient: gradient * 2)
    output.retain_grad()
    return F.cross_entropy(output, labels)


def _on_the_host(call, net, rows, labels):
    with torch.autograd.graph.save_on_cpu():
        output = call(rows)
    return F.cross_entropy(output, labels)


def _two_checkpoints(call, net, rows, labels):
    first = checkpoint(call, rows, use_reentrant=False)
    second = checkpoint(call, rows + 0.3, use_reentrant=False)
    return F.cross_entropy(first + second, labels)


def _in_evaluation(call, net, rows, labels):
    net.eval()
    loss = cross_entropy(call, net, rows, labels)
    net.train()
    return loss + call(rows).square().mean()


def _state_between_calls(call, net, rows, labels):
    """Truncated backpropagation: a state with rows goes from call to call."""
    state = rows.new_zeros(len(rows), 6)
    total = 0
    for shift in range(3):
        output, state = call(rows + shift, state)
        total = total + F.cross_entropy(output, labels)
    return total


def _step_of_a_cell(self, rows, state):
    state = self.cell(rows, state)
    return self.head(state), state


def _unfrozen_later(call, net, rows, labels):
    net[0].requires_grad_(len(rows) > 9)
    return cross_entropy(call, net, rows, labels)


def _frozen_later(call, net, rows, labels):
    net[0].requires_grad_(len(rows) <= 9)
    return cross_entropy(call, net, rows, labels)


def _layer_added_later(call, net, rows, labels):
    if len(rows) == 10:
        layer = nn.utils.skip_init(nn.Linear, 3, 3).to(rows)  # draws nothing
        nn.init.constant_(layer.weight, 0.3)
        nn.init.constant_(layer.bias, 0.1)
        net.append(layer)
    return cross_entropy(call, net, rows, labels)


def _pruned_later(call, net, rows, labels):
    if len(rows) == 10:
        nn.utils.prune.l1_unstructured(net[2], "weight", 0.3)
    return cross_entropy(call, net, rows, labels)


def _temperature_changes(call, net, rows, labels):
    net.temperature = float(len(rows))
    return cross_entropy(call, net, rows, labels)


def _cooled(self, rows):
    return self.net(rows) / self.temperature


def _weight_changed(call, net, rows, labels):
    """The second call has to see the new values."""
    output = call(rows).square().mean()
    net[0].weight.requires_grad_(False).mul_(1.01)
    net[0].weight.requires_grad_(True)
    return output.detach() + cross_entropy(call, net, rows, labels)


def _of_twins(call, net, rows, labels):
    """One call for both views, which the loss separates again."""
    first, second = call(torch.cat([rows, rows.sin()])).chunk(2)
    return 1 - F.cosine_similarity(first, second.detach()).mean()


def _nothing_arrives(call, net, rows, labels):
    call(rows)
    return cross_entropy(call, net, rows, labels)


LOSSES = {
    "adversarial rows": Program(mlp, _adversarial),
    "second derivatives of inputs": Program(mlp, _laplacian),
    "Jacobian of rows": Program(mlp, _jacobian),
    "gradients of inputs": Program(mlp, _inputs_get_gradients),
    "a target without a graph": Program(mlp, _with_teacher),
    "weighted by a detached output": Program(mlp, _weighted_by_itself),
    "calls of other numbers of rows": Program(mlp, _parts_of_rows),
    "a hook on the output": Program(mlp, _hook_on_output),
    "saved tensors on the host": Program(mlp, _on_the_host),
    "two checkpoints around": Program(mlp, _two_checkpoints),
    "in evaluation and training": Program(mlp, _in_evaluation),
    "state from call to call": Program(
        lambda: Own(_step_of_a_cell, cell=nn.GRUCell(6, 6), head=nn.Linear(6, 3)),
        _state_between_calls,
    ),
    "two views in one call": Program(mlp, _of_twins),
    "a call that no loss uses": Program(mlp, _nothing_arrives),
    "an attribute changes": Program(
        lambda: Own(_cooled, net=mlp(), temperature=1.0), _temperature_changes
    ),
    "a weight changes between calls": Program(mlp, _weight_changed),
    "unfrozen later": Program(mlp, _unfrozen_later),
    "frozen later": Program(mlp, _frozen_later),
    "a layer is added later": Program(mlp, _layer_added_later),
    "pruned later": Program(mlp, _pruned_later),
}
