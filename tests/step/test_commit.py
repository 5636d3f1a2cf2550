"""What a commit writes, and that it writes all or nothing: gradients, hooks on them,
buffers.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch
from faults.state import nothing_changes
from harness.agree import BATCH
from harness.models import CLASSES, FEATURES, Of, linear, mlp
from harness.module_cases import InOneMemory, branches, positive_first
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    gradients,
    randn,
    whole_batch,
)
from harness.pairwise import few_of
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core


@pytest.mark.contract
def test_unused_parameter_keeps_its_gradient(devices):
    model = build(branches)
    all_plus, all_minus = BATCH[0].clone(), BATCH[0].clone()
    all_plus[:, 0], all_minus[:, 0] = 1, -1
    # A look drops what replicas keep from the step before.
    with ScatterOnceParallel(model, 2, devices(2), verify=False) as engine:
        engine.forward_backward(all_plus, BATCH[1], nn.CrossEntropyLoss())
        kept = model.plus.weight.grad.clone()
        assert model.minus.weight.grad is None
        engine.forward_backward(all_minus, BATCH[1], nn.CrossEntropyLoss())
        assert torch.equal(model.plus.weight.grad, kept)
        assert model.minus.weight.grad is not None


@pytest.mark.contract
def test_parameter_hooks_run_once_on_sum(devices):
    model = mlp()
    _, expected = whole_batch(model, *BATCH, nn.CrossEntropyLoss())
    seen, together = [], []

    def clip(gradient):
        seen.append(gradient.clone())
        return gradient.clamp(-0.01, 0.01)

    names, parameters = zip(*model.named_parameters(), strict=True)
    handle = register_multi_grad_hook(parameters, together.append)
    model[0].weight.register_hook(clip)
    with ScatterOnceParallel(model, 3, devices(3)) as engine:
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    handle.remove()
    (whole,), (found,) = seen, together
    assert_close(whole, expected["0.weight"], "what the hook saw")
    for name, gradient in zip(names, found, strict=True):
        assert_close(gradient, expected[name], name)
    expected["0.weight"] = expected["0.weight"].clamp(-0.01, 0.01)
    assert_gradients(model, expected)


@pytest.mark.contract
def test_accumulation_hooks_run_once(devices):
    """Whoever keeps a graph of a parameter keeps this node, and hooks on it stay."""
    model = mlp()
    _, expected = whole_batch(model, *BATCH, nn.CrossEntropyLoss())
    node = model[0].weight.expand_as(model[0].weight).grad_fn.next_functions[0][0]
    calls = []
    handle = node.register_hook(lambda *_: calls.append(1))
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        assert len(calls) == 1
        assert_gradients(model, expected)
        handle.remove()

        def fail(*_):
            raise KeyError("mine")

        node.register_hook(fail)
        for before in (expected, dict.fromkeys(expected)):
            with pytest.raises(KeyError, match="mine"):
                engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
            assert_gradients(model, before)
            model.zero_grad()


def test_hooks_of_a_forward_stay_in_replica(devices):
    def forward(m, inputs):
        m.linear.register_forward_hook(lambda m, args, output: output * 2)
        return m.linear(inputs)

    model = build(lambda: Of(forward, linear=linear()))
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        losses = [
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss()) for _ in range(3)
        ]
    assert not model.linear._forward_hooks
    assert torch.equal(losses[0], losses[2])


class Late(InOneMemory):
    """Sub-steps that use neither of the two that share memory come first."""

    def forward(self, inputs):
        return (
            self.linear(inputs) if (inputs[:, 0] > 0).all() else super().forward(inputs)
        )


@pytest.mark.contract
def test_late_gradients_sharing_memory_exact(devices):
    model = build(Late)
    inputs, targets = positive_first(16, 8), randn(16, CLASSES)
    rows = zip(inputs.split(1), targets.split(1), strict=True)
    expected = [whole_batch(model, *row, nn.MSELoss())[1] for row in rows]
    for count in (1, 2):
        model.zero_grad()
        with ScatterOnceParallel(model, 16 // count, devices(count)) as engine:
            engine.forward_backward(inputs, targets, nn.MSELoss())
        for name, gradient in gradients(model).items():
            parts = [one[name] for one in expected if one[name] is not None]
            assert_close(gradient, sum(parts) / 16, name)


@pytest.mark.contract
def test_raising_hook_leaves_buffers(devices):
    model = build(
        lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))
    )

    def fails(_):
        raise ArithmeticError("a hook")

    model[1].bias.register_hook(fails)
    with (
        ScatterOnceParallel(model, 2, devices(2)) as engine,
        nothing_changes(model),
        pytest.raises(ArithmeticError),
    ):
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())


def records_in_a_buffer(model):
    model.register_buffer("norm", torch.zeros((), dtype=torch.float64))
    model[0].weight.register_hook(lambda grad: model.norm.copy_(grad.norm()) and None)


def rebinds_a_buffer(model):
    model.register_buffer("norm", torch.zeros((), dtype=torch.float64))

    def record(parameter):
        model.norm = parameter.grad.norm()

    model[2].weight.register_post_accumulate_grad_hook(record)


def reads_a_statistic(model):
    """What a hook reads is what the forward pass has left."""
    model.register_buffer("seen", torch.zeros(7, dtype=torch.float64))

    def record(grad):
        model.seen.copy_(model[1].running_mean)

    model[2].bias.register_hook(record)


def steps_in_the_backward_pass(model):
    """Beside buffers that share the memory of parameters."""
    for number in (0, 2):
        flat = model[number].weight.data.view(-1)
        model.register_buffer(f"flat{number}", flat, persistent=False)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], 0.1)

        def step(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


HOOKED = {
    "records": records_in_a_buffer,
    "rebinds": rebinds_a_buffer,
    "reads": reads_a_statistic,
    "steps": steps_in_the_backward_pass,
}


def normalised():
    return nn.Sequential(
        nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.Linear(7, CLASSES)
    )


@pytest.mark.parametrize("kind", HOOKED)
def test_gradient_hook_writes_stay(devices, kind):
    plain, model = build(normalised), build(normalised)
    for each in (plain, model):
        HOOKED[kind](each)
        each.train(kind == "reads")
    # One sub-step of one replica has the statistics of plain torch.
    for ids in (["cpu"], ["cpu"] if kind == "reads" else devices(2)):
        with ScatterOnceParallel(model, 1, ids) as engine:
            for _ in range(2):
                nn.CrossEntropyLoss()(plain(BATCH[0]), BATCH[1]).backward()
                engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    ours, theirs = (
        {**dict(each.named_parameters()), **dict(each.named_buffers())}
        for each in (model, plain)
    )
    for name, tensor in ours.items():
        assert_close(tensor.detach(), theirs[name].detach(), name)


@pytest.mark.contract
@pytest.mark.parametrize("kind", HOOKED)
def test_hook_writes_undone_if_later_raises(devices, kind):
    model = build(normalised)
    HOOKED[kind](model)

    def fails(_):
        raise ArithmeticError("a hook")

    model[0].bias.register_post_accumulate_grad_hook(fails)
    with (
        ScatterOnceParallel(model, 2, devices(2)) as engine,
        nothing_changes(model),
        pytest.raises(ArithmeticError),
    ):
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())


def uses(m, inputs):
    """Uses its weights, and what it made of them when it was built."""
    return m.linear(inputs).tanh() * (1 + m.kept[-1].reshape(-1)[:CLASSES])


KEPT = {
    "row": lambda m: [m.linear.weight[1]],
    "chunks": lambda m: m.linear.weight.chunk(2, dim=1),
    "product": lambda m: [m.linear.weight * m.other.weight],
    "of what is used there alone": lambda m: [m.other.bias.view(1, CLASSES)],
}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("whole_batch", few_of([False, True], [False]))
def test_derived_tensor_not_trained_silently(devices, kind, whole_batch):
    """Replicas have copies of it, whose gradient once went nowhere."""
    model = Of(uses, linear=linear(), other=linear(1))
    model.kept = KEPT[kind](model)
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        with pytest.raises(
            ValueError, match=r"(?s)computed from parameters.*[Cc]ompute .*in forward"
        ):
            engine.forward_backward(
                *BATCH, nn.CrossEntropyLoss(), whole_batch=whole_batch
            )
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="there are no such timers here"
)
def test_raising_handler_whole_or_undone():
    """As those of time limits do; in the commit, above all."""

    class TimeIsOver(Exception):
        pass

    def end(number, frame):
        raise TimeIsOver

    def ring(gradient):
        os.kill(os.getpid(), signal.SIGALRM)
        # the interpreter comes to handlers between its instructions
        for _ in range(1000):
            pass
        rung.append(gradient)

    model, rung = linear(), []
    model.weight.register_hook(ring)
    before = signal.signal(signal.SIGALRM, end)
    try:
        with (
            ScatterOnceParallel(model, 2, ["cpu"] * 2) as engine,
            pytest.raises(TimeIsOver),
        ):
            engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
        assert signal.getsignal(signal.SIGALRM) is end
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rung
    assert all(parameter.grad is not None for parameter in model.parameters())


FIXED = {
    "one number": lambda shape: torch.zeros((), dtype=torch.float64).expand(shape),
    "one row": lambda shape: torch.zeros(shape[-1:], dtype=torch.float64).expand(shape),
}


@pytest.mark.parametrize("make", FIXED.values(), ids=FIXED)
def test_unwritable_grad_changes_nothing(devices, make):
    """Autograd raised after it had added to the gradients of other parameters."""
    model = mlp()
    last = model[2].weight
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    last.grad = make(last.shape)
    with (
        ScatterOnceParallel(model, 2, devices(2)) as engine,
        nothing_changes(model),
        pytest.raises(RuntimeError, match="memory location"),
    ):
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    last.grad = None
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    assert last.grad is not None


@pytest.mark.parametrize("with_hook", [False, True])
@pytest.mark.parametrize("place", ["first", "last", "all"])
def test_inference_grad_changes_nothing(devices, place, with_hook):
    """Autograd had added to it when it raised."""
    model = mlp()
    parameters = list(model.parameters())
    made_there = {"first": parameters[:1], "last": parameters[-1:], "all": parameters}
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with torch.inference_mode():
        for parameter in made_there[place]:
            parameter.grad = torch.ones_like(parameter)
    if with_hook:
        model[0].weight.register_hook(lambda gradient: gradient * 2)
    words = "made under torch.inference_mode"
    with (
        ScatterOnceParallel(model, 2, devices(2)) as engine,
        nothing_changes(model),
        pytest.raises(RuntimeError, match=words),
    ):
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    for parameter in made_there[place]:
        parameter.grad = parameter.grad.clone()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(*BATCH, nn.CrossEntropyLoss())
    assert not any(torch.equal(p.grad, torch.ones_like(p)) for p in parameters)
