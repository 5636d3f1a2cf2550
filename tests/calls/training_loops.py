"""Loops that train with calls, and update parameters: the same with engines or plain.

A loop gets ``wrap``, which makes a call of a module: an engine, or the module itself.
It returns the modules that it has trained.
"""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.nn.functional as F
from harness.oracle import build, randint, randn
from torch import nn

from calls.programs import cross_entropy, mlp
from scatterpar import ScatterOnceParallel, ShardedOptimizer

ROWS, LABELS = randn(26, 6), randint(3, 26)


def batches(count):
    """Batches of other numbers of rows."""
    for number in range(count):
        part = slice(5 * number, 5 * number + 7 + number)
        yield ROWS[part], LABELS[part]


def windows(call, count):
    """Batches, each with what its backward pass runs in: two for each update."""
    for number, batch in enumerate(batches(count)):
        is_last = number % 2 == 1
        waits = isinstance(call, ScatterOnceParallel) and not is_last
        yield *batch, is_last, call.no_sync() if waits else contextlib.nullcontext()


def accumulate(call, net, optimizer, max_norm=None):
    """Two updates, each of two batches; with a ``max_norm`` gradients are clipped."""
    for rows, labels, is_last, context in windows(call, 4):
        with context:
            cross_entropy(call, net, rows, labels).backward()
        if is_last:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()


def with_momentum(wrap):
    net = build(mlp)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    accumulate(wrap(net), net, optimizer, 0.1)
    return [net]


def with_scaler(wrap):
    """The second update is skipped: its gradient is infinite."""
    net = build(mlp)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    call = wrap(net)
    for number, (rows, labels, is_last, context) in enumerate(windows(call, 6)):
        with context:
            loss = cross_entropy(call, net, rows, labels)
            scaler.scale(loss * torch.inf if number == 3 else loss).backward()
        if is_last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scaler.get_scale() == 128
    return [net]


def with_closures(wrap):
    net = build(mlp)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    call = wrap(net)
    for rows, labels in batches(2):

        def closure(rows=rows, labels=labels):
            optimizer.zero_grad()
            loss = cross_entropy(call, net, rows, labels)
            loss.backward()
            return loss

        optimizer.step(closure)
    return [net]


def sharded(wrap):
    net = build(mlp)
    call = wrap(net)
    if isinstance(call, ScatterOnceParallel):
        optimizer = ShardedOptimizer(call, torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    accumulate(call, net, optimizer)
    return [net]


def sharpness_aware(wrap):
    """SAM: a step up, a second gradient, and back."""
    net = build(mlp)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    call = wrap(net)
    for rows, labels in batches(3):
        cross_entropy(call, net, rows, labels).backward()
        steps = [0.05 * parameter.grad for parameter in net.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(net.parameters()), steps)
        optimizer.zero_grad()
        cross_entropy(call, net, rows, labels).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(net.parameters()), steps)
        optimizer.step()
        optimizer.zero_grad()
    return [net]


def averaged_weights(wrap):
    """Evaluates with an average of the weights, which goes in and out by ``data``."""
    net = build(mlp)
    average = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    call = wrap(net)
    total = 0
    for rows, labels in batches(3):
        (cross_entropy(call, net, rows, labels) + total).backward()
        optimizer.step()
        optimizer.zero_grad()
        pairs = list(zip(net.parameters(), average.parameters(), strict=True))
        with torch.no_grad():
            for parameter, mean in pairs:
                mean.lerp_(parameter, 0.1)
        for parameter, mean in pairs:
            parameter.data, mean.data = mean.data, parameter.data
        with torch.no_grad():
            total = 0.01 * call(rows).sum()
        for parameter, mean in pairs:
            parameter.data, mean.data = mean.data, parameter.data
        with torch.no_grad():
            net[0].bias.add_(total)  # the result depends on the evaluation
    return [net]


def adversarial(wrap):
    """A GAN: gradients of both networks go through both."""
    generator = build(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    critic = build(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    make, judge = wrap(generator), wrap(critic)
    of_generator = torch.optim.Adam(generator.parameters(), 0.01)
    of_critic = torch.optim.Adam(critic.parameters(), 0.01)
    for rows, _ in batches(3):
        fake = make(rows.sin())
        loss = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(rows)).mean()
        mixed = (0.5 * fake.detach() + 0.5 * rows).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        (loss + slope.square().sum(1).mean()).backward()
        of_critic.step()
        of_critic.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()
    return [generator, critic]


def cycle(wrap):
    """Two engines in one graph, in both directions, and one update of both."""
    first, second = build(lambda: nn.Linear(6, 6)), build(lambda: nn.Linear(6, 6), 1)
    there, back = wrap(first), wrap(second)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    for rows, _ in batches(3):
        loss = F.mse_loss(back(there(rows)), rows) + F.mse_loss(there(back(rows)), rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [first, second]


def distilled(wrap):
    """A frozen teacher in evaluation, and a momentum copy of the student."""
    student, teacher = build(mlp), build(mlp, 1).eval().requires_grad_(False)
    call, teach = wrap(student), wrap(teacher)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    for rows, _ in batches(3):
        loss = F.cross_entropy(call(rows), teach(rows).softmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pairs = zip(teacher.parameters(), student.parameters(), strict=True)
        for theirs, mine in pairs:
            theirs.lerp_(mine.detach(), 0.2)
    return [student, teacher]


def unfrozen_in_between(wrap):
    """A new group of the optimizer, and another head."""
    net = build(mlp)
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net[2].parameters(), 0.1)
    call = wrap(net)
    for number, (rows, labels) in enumerate(batches(4)):
        if number == 1:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.01})
        if number == 2:
            net[2] = build(lambda: nn.Linear(8, 3), 3)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
        cross_entropy(call, net, rows, labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    return [net]


def resumed(wrap):
    """From a checkpoint, which is loaded while gradients are there."""
    net = build(mlp)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    call = wrap(net)
    saved = copy.deepcopy(net.state_dict())
    for number, (rows, labels) in enumerate(batches(4)):
        cross_entropy(call, net, rows, labels).backward()
        if number == 1:
            call.load_state_dict(saved)
        optimizer.step()
        optimizer.zero_grad()
    return [net]


def updated_in_the_backward_pass(wrap):
    """An optimizer per parameter, whose hook steps as soon as its gradient is there."""
    net = build(mlp)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in net.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    call = wrap(net)
    for rows, labels in batches(3):
        cross_entropy(call, net, rows, labels).backward()
    return [net]


LOOPS = [
    with_momentum,
    with_scaler,
    with_closures,
    sharded,
    sharpness_aware,
    averaged_weights,
    adversarial,
    cycle,
    distilled,
    unfrozen_in_between,
    resumed,
    updated_in_the_backward_pass,
]
