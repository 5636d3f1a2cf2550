"""Sentences of the design, tried by somebody who knows nothing else."""

from __future__ import annotations

import copy
import os
import signal
import threading

import pytest
import torch
from harness.models import Of
from harness.oracle import assert_close, assert_step, build, randn, seeded
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

LAYOUTS = (["cpu"], ["cpu"] * 3, ["cpu:0", "cpu:1", "cpu:2"])


def makes_its_head(model, inputs):
    """Its head comes with the first batch, as wide as that."""
    if model.head is None:
        model.head = nn.Linear(6, 2).double()
    return model.head(model.enter(inputs))


def exchanges_its_weight(model, inputs):
    if model.exchanges:
        model.head.weight = nn.Parameter(model.head.weight * 0.5)
    return model.head(inputs)


MAKERS = {
    "a head": lambda: Of(makes_its_head, enter=nn.Linear(4, 6), head=None),
    "a weight": lambda: Of(exchanges_its_weight, head=nn.Linear(4, 2), exchanges=True),
}


@pytest.mark.parametrize("device_ids", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("whole_batch", [False, True])
def test_parameters_that_a_forward_pass_makes_are_refused_by_name(device_ids, kind, whole_batch):
    model = build(MAKERS[kind])
    inputs, targets, criterion = randn(9, 4), randn(9, 2), nn.MSELoss()
    engine = ScatterOnceParallel(model, 2, device_ids)
    for _ in range(2):
        words = r"creates the parameter 'head\.weight'"
        with pytest.raises(ValueError, match=f"{words}.*before the first"):
            engine.forward_backward(inputs, targets, criterion, whole_batch=whole_batch)
        with pytest.raises(ValueError, match=words), torch.no_grad():
            engine(inputs)
        assert all(parameter.grad is None for parameter in model.parameters())
    model.exchanges = False
    with seeded():
        model(inputs)
    assert_step(engine, inputs, targets, criterion)


def with_teacher():
    """It computes its own loss: the student's distance from what it was at first."""
    student = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    teacher = copy.deepcopy(student).requires_grad_(False)
    loss = nn.functional.mse_loss
    return Of(lambda m, x: loss(m.student(x), m.teacher(x)), student=student, teacher=teacher)


@pytest.mark.parametrize("device_ids", LAYOUTS, ids=str)
def test_a_student_that_begins_as_its_teacher_is_no_false_alarm(device_ids):
    both, inputs = build(with_teacher), randn(33, 4)

    def distance(output, inputs):
        with torch.no_grad():
            expected = both.teacher(inputs)
        return nn.functional.mse_loss(output, expected)

    def divergence(output, inputs):
        with torch.no_grad():
            expected = both.teacher(inputs).log_softmax(1)
        both_logs = output.log_softmax(1), expected
        return nn.functional.kl_div(*both_logs, reduction="batchmean", log_target=True)

    engine = ScatterOnceParallel(both.student, 2, device_ids)
    for criterion in (distance, divergence):
        assert engine.forward_backward(inputs, inputs, criterion).item() < 1e-20
    assert ScatterOnceParallel(both, 2, device_ids).forward_backward(inputs).item() < 1e-20
    with pytest.raises(ValueError, match="whole_batch=True"):
        engine.forward_backward(
            inputs, inputs, lambda *args: 33 * (distance(*args) + args[0].std())
        )


@pytest.mark.draws
@pytest.mark.parametrize("device_ids", LAYOUTS, ids=str)
def test_hooks_that_draw_draw_as_under_a_plain_backward(device_ids):
    """Noise on gradients is another one in every step; a step that fails leaves the generator."""
    batch, criterion = (randn(9, 4), randn(9, 3)), nn.MSELoss()
    model = build(lambda: nn.Linear(4, 3, bias=False))
    plain = copy.deepcopy(model)

    def add_noise(parameter):
        parameter.grad += torch.randn_like(parameter.grad)
        drawn.append(parameter.grad.clone())
        if len(drawn) == 4:
            raise KeyError

    for module in (model, plain):
        module.weight.register_post_accumulate_grad_hook(add_noise)
    drawn = []
    torch.manual_seed(0)
    for _ in range(3):
        criterion(plain(batch[0]), batch[1]).backward()
    expected, state = drawn, torch.get_rng_state()
    drawn = []
    torch.manual_seed(0)
    engine = ScatterOnceParallel(model, 2, device_ids)
    for _ in range(3):
        engine.forward_backward(*batch, criterion)
    for one, other in zip(drawn, expected, strict=True):
        assert_close(one, other, "noise")
    with pytest.raises(KeyError):
        engine.forward_backward(*batch, criterion)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.draws
def test_what_another_thread_draws_meanwhile_it_does_not_draw_again():
    """Such as one that prepares the next batch."""
    drawn, step, stepped = [], threading.Barrier(2), threading.Barrier(2)

    class Meets(nn.Linear):
        def forward(self, inputs):
            if inputs.shape[0] == 5:
                step.wait(60)
                stepped.wait(60)
            return super().forward(inputs)

    def draw():
        for _ in range(3):
            step.wait(60)
            drawn.append(torch.rand(()).item())
            stepped.wait(60)

    engine = ScatterOnceParallel(build(lambda: Meets(4, 3)), 1, ["cpu"] * 2, verify=False)
    other = threading.Thread(target=draw)
    other.start()
    for _ in range(3):
        engine.forward_backward(randn(9, 4), randn(9, 3), nn.MSELoss())
    other.join()
    assert len(set(drawn)) == 3


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no such timers here")
def test_a_handler_that_raises_leaves_a_step_whole_or_undone():
    """As those of time limits do; in the commit, above all."""

    class TimeIsOver(Exception):
        pass

    def end(number, frame):
        raise TimeIsOver

    model = build(lambda: nn.Linear(4, 3))
    engine = ScatterOnceParallel(model, 2, ["cpu"] * 2)

    def ring(gradient):
        os.kill(os.getpid(), signal.SIGALRM)
        for _ in range(1000):  # the interpreter comes to handlers between its instructions
            pass
        rung.append(gradient)

    rung = []
    model.weight.register_hook(ring)
    before = signal.signal(signal.SIGALRM, end)
    try:
        with pytest.raises(TimeIsOver):
            engine.forward_backward(randn(9, 4), randn(9, 3), nn.MSELoss())
        assert signal.getsignal(signal.SIGALRM) is end
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rung
    assert model.weight.grad is not None
    assert model.bias.grad is not None


def test_what_is_no_state_dict_is_told_as_by_torch():
    with pytest.raises(TypeError, match="Expected state_dict to be dict-like, got <class 'list'>"):
        ScatterOnceParallel(nn.Identity(), device_ids=["cpu"]).load_state_dict([])


def test_a_criterion_may_ask_a_teacher_in_an_engine_of_its_own(recwarn):
    """The check's own mode was taken for the caller's, and warned of, where the teacher draws."""
    inputs = randn(12, 4)
    teacher = build(lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)))
    model = build(lambda: nn.Linear(4, 2))
    its, engine = (ScatterOnceParallel(one, 2, ["cpu"] * 2) for one in (teacher, model))
    with its, engine:

        def criterion(outputs, rows):
            with torch.no_grad():
                wanted = its(rows)
            return nn.functional.mse_loss(outputs, wanted)

        with seeded(0):
            engine.forward_backward(inputs, inputs, criterion)
    assert not [str(warning.message) for warning in recwarn]
