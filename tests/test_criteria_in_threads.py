"""Criteria that are more than a formula: whose turn it is, what they reach, what they write."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from helpers.gang import gang
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import assert_close, assert_gradients, assert_step, build, gradients, randn
from helpers.oracle import whole_batch as plain_step
from pair.common import assert_pair
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    ScatterOnceParallel,
)

ROWS = 12
INPUTS, TARGETS = randn(ROWS, FEATURES), randn(ROWS, CLASSES, seed=3)


# --- what a network leaves behind is read by who called it ---


class Teacher(nn.Module):
    """Keeps its features for the criterion, and takes its time after that."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(CLASSES, CLASSES)

    def forward(self, rows):
        self.features = self.body(rows)
        time.sleep(0.002)
        return self.features.sum()


def perceptual(kind):
    """The loss of two sets of features, kept in an attribute or by a hook in a dict."""
    teacher, kept = build(Teacher).requires_grad_(False), {}
    if kind == "hook":
        teacher.body.register_forward_hook(lambda _m, _i, output: kept.update(features=output))

    def features(rows):
        teacher(rows)
        return kept["features"] if kind == "hook" else teacher.features

    return lambda output, targets: F.mse_loss(features(output), features(targets).detach())


@pytest.mark.parametrize("kind", ["attribute", "hook"])
def test_each_replica_reads_what_its_own_call_left_behind(devices, kind):
    """Replicas that called a criterion at the same time read each other's features."""
    with ScatterOnceParallel(mlp(), 2, devices(3), verify=False) as engine:
        for seed in range(3):
            assert_step(engine, randn(ROWS, FEATURES, seed=seed), TARGETS, perceptual(kind))


def test_the_pair_s_criterion_too(devices):
    assert_pair(mlp(), INPUTS, TARGETS, perceptual("attribute"), devices(3))


def test_a_criterion_that_waits_for_the_other_replicas_has_them_beside_it(devices):
    barrier = threading.Barrier(3)

    def meet(output, targets):
        barrier.wait(60)
        return F.mse_loss(output, targets)

    with ScatterOnceParallel(mlp(), 1, devices(3), verify=False) as engine:
        expected_loss, expected = plain_step(mlp(), INPUTS, TARGETS, F.mse_loss)
        assert_close(engine.forward_backward(INPUTS, TARGETS, meet), expected_loss, "loss")
        assert_gradients(engine.module, expected)


# --- parameters that only the criterion reaches ---


class Slots:
    """Holds a network where no ``__dict__`` shows it."""

    __slots__ = ("net",)

    def __init__(self, net):
        self.net = net


def hide(net, how):
    """A function that gives the network."""
    if how == "slots":
        slots = Slots(net)
        return lambda: slots.net
    box = net
    for _ in range(6):
        box = [box]

    def unpacked():
        value = box
        for _ in range(6):
            (value,) = value
        return value

    return unpacked


@pytest.fixture(params=["slots", "deep"])
def hidden(request):
    """A network, and a criterion that reaches it, and can be made to fail."""
    net = build(lambda: nn.Linear(CLASSES, CLASSES))
    reached, failing, calls = hide(net, request.param), [], []

    def loss(output, targets):
        calls.append(len(output))
        if failing and len(calls) == 4:
            raise ValueError("boom")
        return F.mse_loss(reached()(output), targets)

    return net, loss, failing


@pytest.mark.parametrize("before", [None, 1.5])
def test_of_a_step_that_fails_they_keep_nothing(devices, hidden, before):
    net, loss, failing = hidden
    seen = []
    net.weight.register_hook(seen.append)
    failing.append(True)
    if before is not None:
        net.weight.grad = torch.full_like(net.weight, before)
    with (
        ScatterOnceParallel(mlp(), 3, devices(2), verify=False) as engine,
        pytest.raises(ValueError, match="boom"),
    ):
        engine.forward_backward(INPUTS, TARGETS, loss)
    kept = None if net.weight.grad is None else net.weight.grad.unique().tolist()
    assert kept == (before and [before])
    assert seen == []


@pytest.mark.parametrize("whole", [False, True])
def test_their_gradient_is_that_of_the_whole_batch_and_hooks_see_it_once(devices, hidden, whole):
    net, loss, _ = hidden
    model, seen = mlp(), []
    twin, twin_net = copy.deepcopy((model, net))
    F.mse_loss(twin_net(twin(INPUTS)), TARGETS).backward()
    net.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    with ScatterOnceParallel(model, 3, devices(2), verify=False) as engine:
        engine.forward_backward(INPUTS, TARGETS, loss, whole_batch=whole)
    assert_gradients(model, gradients(twin))
    assert_gradients(net, gradients(twin_net))
    (whole_gradient,) = seen
    assert_close(whole_gradient, twin_net.weight.grad, "what the hook saw")


def contrastive(outputs, targets, scale):
    return F.cross_entropy(scale * outputs @ outputs.T, targets.argmax(1))


def on_each_rank(group, hidden_one):
    model = mlp()
    scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    boxed = hide(scale, "slots") if hidden_one else lambda: scale
    rows = slice(0, 7) if group.rank() == 0 else slice(7, ROWS)
    with ScatterOnceParallel(model, 2, ["cpu"] * 2, process_group=group) as engine:
        try:
            engine.forward_backward(
                INPUTS[rows],
                TARGETS[rows],
                lambda outputs, targets: contrastive(outputs, targets, boxed()),
                whole_batch=True,
            )
        except (ValueError, RuntimeError) as error:
            return str(error), gradients(model), scale.grad
    return None, gradients(model), scale.grad


def test_ranks_that_share_a_criterion_count_what_it_closes_over_once():
    """Every rank added its own copy of the same gradient."""
    model, scale = mlp(), nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    contrastive(model(INPUTS), TARGETS, scale).backward()
    for said, grads, of_scale in gang()(2, on_each_rank, False):
        assert said is None
        assert_close(of_scale, scale.grad, "scale")
        for name, gradient in gradients(model).items():
            assert_close(grads[name], gradient, name)


def checkpointed(group):
    model, net = mlp(), build(lambda: nn.Linear(CLASSES, CLASSES))
    rows = slice(0, 7) if group.rank() == 0 else slice(7, ROWS)

    def loss(outputs, targets):
        return F.mse_loss(checkpoint(net, outputs, use_reentrant=True), targets)

    with ScatterOnceParallel(model, 2, ["cpu"] * 2, process_group=group, verify=False) as engine:
        engine.forward_backward(INPUTS[rows], TARGETS[rows], loss)
    return gradients(model), gradients(net)


def test_ranks_add_up_what_a_reentrant_checkpoint_hides():
    """The graph does not show what is inside; with ranks the criterion is searched too."""
    model, net = mlp(), build(lambda: nn.Linear(CLASSES, CLASSES))
    F.mse_loss(net(model(INPUTS)), TARGETS).backward()
    for found in gang()(2, checkpointed):
        for grads, module in zip(found, (model, net), strict=True):
            for name, gradient in gradients(module).items():
                assert_close(grads[name], gradient, name)


def test_ranks_refuse_what_cannot_be_told_apart():
    for said, grads, of_scale in gang()(2, on_each_rank, True):
        assert "the criterion reaches a parameter of shape ()" in said
        assert "bind its module with functools.partial(criterion, net=net)" in said
        assert of_scale is None
        assert all(gradient is None for gradient in grads.values())


# --- what a criterion writes ---


@pytest.mark.parametrize("of", ["teacher", "master"])
@pytest.mark.parametrize("whole", [False, True])
def test_statistics_that_a_criterion_moved_are_put_back(devices, of, whole):
    model = build(lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES)))
    teacher = copy.deepcopy(model) if of == "teacher" else model
    calls = []

    def loss(output, targets):
        features = teacher(INPUTS[: len(output)])
        calls.append(len(output))
        if whole or len(calls) == 4:
            raise ValueError("boom")
        return F.mse_loss(output, features.detach())

    before = copy.deepcopy(teacher.state_dict())
    with (
        ScatterOnceParallel(model, 3, devices(2), verify=False) as engine,
        pytest.raises(ValueError, match="boom"),
    ):
        engine.forward_backward(INPUTS, TARGETS, loss, whole_batch=whole)
    assert calls
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.filterwarnings("ignore:accum")
def test_tries_that_ran_out_of_memory_move_no_statistics(devices):
    teachers = [build(lambda: nn.Sequential(nn.BatchNorm1d(CLASSES))) for _ in range(2)]
    found = []
    for teacher, accum in zip(teachers, ("auto", 2), strict=True):

        def loss(output, targets, net=(teacher,)):
            features = net[0](output)
            if len(output) > 3:
                raise torch.OutOfMemoryError("not enough")
            return F.mse_loss(features, targets)

        model = mlp()
        with ScatterOnceParallel(model, accum, devices(2), verify=False) as engine:
            engine.forward_backward(INPUTS, TARGETS, loss)
        found.append(gradients(model) | gradients(teacher))
        assert teacher[0].num_batches_tracked == 4
    for name, gradient in found[1].items():
        assert_close(found[0][name], gradient, name)


# --- two engines, one module ---

TAKEN = "another engine is in the middle of a step that trains this Sequential"


def test_two_engines_on_one_module_in_two_threads(devices):
    """The second is refused while the first is inside: its gradient was lost, or counted often."""
    model = mlp()
    _, expected = plain_step(model, INPUTS, TARGETS, F.mse_loss)
    inside, release = threading.Event(), threading.Event()

    def slow(output, targets):
        inside.set()
        assert release.wait(60)
        return F.mse_loss(output, targets)

    with (
        ScatterOnceParallel(model, 2, devices(2), verify=False) as one,
        ScatterOnceParallel(model, 1, devices(2), verify=False) as other,
    ):
        first = threading.Thread(target=one.forward_backward, args=(INPUTS, TARGETS, slow))
        first.start()
        assert inside.wait(60)
        with pytest.raises(RuntimeError, match=f"{TAKEN}.* give each thread a copy"):
            other.forward_backward(INPUTS, TARGETS, F.mse_loss)
        other.eval()
        assert_close(other(INPUTS), model(INPUTS), "inference")
        release.set()
        first.join(60)
        assert not first.is_alive()
        other.forward_backward(INPUTS, TARGETS, F.mse_loss)
    assert_gradients(model, {name: value * 2 for name, value in expected.items()})


def test_two_pairs_on_one_module_in_two_threads(devices):
    model = mlp()
    _, expected = plain_step(model, INPUTS, TARGETS, F.mse_loss)

    def work():
        pair, criterion = DataParallelModel(model, devices(2)), DataParallelCriterion(F.mse_loss)
        for _ in range(10):
            criterion(pair(INPUTS), TARGETS).backward()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert_gradients(model, {name: value * 20 for name, value in expected.items()})


def test_a_step_of_another_engine_inside_a_criterion(devices):
    """Of the same module: refused. Of a part of it: likewise. Of another module: exact."""
    model, other = mlp(), mlp(seed=1)
    inner: dict[str, ScatterOnceParallel] = {}

    def loss(output, targets):
        inner["engine"].forward_backward(randn(4, 7), None, lambda o, _: o.sum())
        return F.mse_loss(output, targets)

    with ScatterOnceParallel(model, 1, devices(2), verify=False) as engine:
        for module, words in (
            (model, TAKEN),
            (model[2], "another engine is in the middle of a step that trains this Parameter of"),
            (other[2], None),
        ):
            inner["engine"] = ScatterOnceParallel(module, verify=False)
            if words is None:
                assert_step(engine, INPUTS, TARGETS, lambda o, t: loss(o, t))
                continue
            with pytest.raises(RuntimeError, match=words):
                engine.forward_backward(INPUTS, TARGETS, loss)
            assert all(p.grad is None for p in model.parameters())
