"""What functions close over: networks that only a criterion reaches, the model in its
own hook.
"""

from __future__ import annotations

import copy
import sys
import threading

import pytest
import torch
from faults.state import nothing_changes
from harness.models import CLASSES, FEATURES, Of, linear, mlp
from harness.oracle import (
    assert_close,
    assert_gradients,
    assert_step,
    build,
    gradients,
    randn,
    whole_batch,
)
from harness.rank_processes import run_on_ranks
from harness.weighted import classes
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scatterpar import ScatterOnceParallel

ROWS = 12
INPUTS, TARGETS = randn(ROWS, FEATURES), randn(ROWS, CLASSES, seed=3)
LABELS = classes(ROWS)

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread_an_operation")]


def all_of(*named):
    """Gradients of several modules, by their number and name."""
    return {
        f"{i}.{k}": g for i, one in enumerate(named) for k, g in gradients(one).items()
    }


# --- parameters that only the criterion reaches ---


class Slots:
    """Holds a network where no ``__dict__`` shows it."""

    __slots__ = ("net",)

    def __init__(self, net):
        self.net = net


class Task:
    """Has the loss as a method, as trainers do."""

    def __init__(self, net):
        self.net = net

    def loss(self, output, targets):
        return F.mse_loss(self.net(output), targets)


def through_slots(net):
    held = Slots(net)
    return lambda output, targets: F.mse_loss(held.net(output), targets)


HOLDERS = {"method": lambda net: Task(net).loss, "slots": through_slots}


def square():
    return nn.Linear(CLASSES, CLASSES)


@pytest.fixture
def net():
    """A network that notes the gradients that arrive at its weight."""
    net = build(square)
    net.seen = []
    net.weight.register_hook(lambda gradient: net.seen.append(gradient.clone()))
    return net


ARRIVES = r"a gradient arrives at {}, which .* bind .* functools\.partial"


@pytest.mark.parametrize("holder", HOLDERS)
def test_gradient_of_closure_refused(devices, net, holder):
    """It was trained on one memory only; on two GPUs it failed. A reference is no
    gradient.
    """
    model, loss, is_trained = mlp(), HOLDERS[holder](net), [False] * 20 + [True, False]

    def criterion(output, targets):
        with torch.set_grad_enabled(is_trained[0]):
            distance = loss(output, targets)
        return distance + F.mse_loss(output, targets)

    net.weight.grad = torch.full_like(net.weight, 1.5)
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        while not is_trained[0]:
            model.zero_grad()
            engine.forward_backward(INPUTS, TARGETS, criterion)
            is_trained.pop(0)
        words = f"{ARRIVES.format('.*')}.* Nothing was changed"
        for step in (engine.forward_backward, engine.loss, engine.check):
            with nothing_changes(model, net), pytest.raises(ValueError, match=words):
                step(INPUTS, TARGETS, criterion)
        assert net.seen == []
        is_trained.pop(0)
        model.zero_grad()
        assert_step(engine, INPUTS, TARGETS, criterion)


def times(held):
    return lambda o, t: F.mse_loss(o @ held, t)


def checkpointed(net):
    return lambda o, t: F.mse_loss(checkpoint(net, o, use_reentrant=True), t)


REFUSED = {
    "the model's own": (
        lambda model, _: lambda o, t: F.mse_loss(o, t) + model[0].weight.square().sum(),
        r"model\.0\.weight",
    ),
    "a tensor": (lambda _, net: times(net.weight), "held"),
    "in a reentrant checkpoint": (lambda _, net: checkpointed(net), r"net\.weight"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_error_names_where_gradient_arrives(devices, kind):
    make, name = REFUSED[kind]
    model, net = mlp(), build(square)
    refused = pytest.raises(ValueError, match=ARRIVES.format(name))
    with ScatterOnceParallel(model, 2, devices(2), verify=False) as engine, refused:
        engine.forward_backward(INPUTS, TARGETS, make(model, net))
    assert all(
        parameter.grad is None for one in (model, net) for parameter in one.parameters()
    )


def test_error_names_parameter_in_object(devices):
    """It advised to bind a network of the criterion, which had none."""
    model = Of(lambda m, rows: m.task.net(rows), linear=linear())
    model.task = Task(model.linear)
    words = r"your module's own 'linear\.\w+' .* use the parameter through attributes"
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        with pytest.raises(ValueError, match=words):
            engine.forward_backward(INPUTS, TARGETS, F.mse_loss)
        assert model.linear.weight.grad is None
        model.task = {"net": model.linear}  # what the error says
        model.function = lambda m, rows: m.task["net"](rows)
        assert_step(engine, INPUTS, TARGETS, F.mse_loss)


@pytest.mark.parametrize("holder", HOLDERS)
def test_whole_batch_trains_closure_once(devices, net, holder):
    model, twin, plain = mlp(), mlp(), build(square)
    F.mse_loss(plain(twin(INPUTS)), TARGETS).backward()
    loss, fails = HOLDERS[holder](net), [True]

    def hook(module, args, gradients):
        if fails[0]:
            raise ValueError("boom")

    net.weight.grad = torch.full_like(net.weight, 1.5)
    model[2].register_full_backward_hook(hook)
    with ScatterOnceParallel(model, 3, devices(2), verify=False) as engine:
        with nothing_changes(net):
            with pytest.raises(ValueError, match="boom"):
                engine.forward_backward(INPUTS, TARGETS, loss, whole_batch=True)
            fails[0] = False
            assert engine.check(INPUTS, TARGETS, loss, whole_batch=True).passed
        assert net.seen == []
        engine.forward_backward(INPUTS, TARGETS, loss, whole_batch=True)
    (gradient,) = net.seen
    assert_close(gradient, plain.weight.grad, "what the hook saw")
    assert_close(net.weight.grad, plain.weight.grad + 1.5, "gradient")
    assert_gradients(model, gradients(twin))


def runs_out(m, rows):
    """Of memory with more than two rows, in the last replica alone."""
    if len(rows) > 2 and torch.equal(rows[0], INPUTS[8]):
        raise torch.OutOfMemoryError("not enough")
    return m.linear(rows)


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:accum=.auto")
def test_second_try_starts_from_same_state(devices):
    """Statistics that the first try had moved once stayed."""
    found = []
    for accum in ("auto", 2):
        model = Of(runs_out, linear=linear())
        net = build(
            lambda: nn.Sequential(square(), nn.BatchNorm1d(CLASSES))
        ).requires_grad_(False)
        with ScatterOnceParallel(model, accum, devices(3), verify=False) as engine:
            engine.forward_backward(INPUTS, TARGETS, Task(net).loss)
        found.append(gradients(model))
        assert net[1].num_batches_tracked == 6
    assert_gradients(model, found[0])


@pytest.mark.contract
@pytest.mark.parametrize("of", ["teacher", "master"])
@pytest.mark.parametrize("whole", [False, True])
def test_failed_step_restores_closure_state(devices, of, whole):
    model = build(
        lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES))
    )
    teacher = copy.deepcopy(model) if of == "teacher" else model
    generator, calls = torch.Generator().manual_seed(3), []
    before = generator.get_state()

    def loss(output, targets):
        features = teacher(INPUTS[: len(output)]) + torch.rand((), generator=generator)
        calls.append(len(output))
        if whole or len(calls) == 4:
            raise ValueError("boom")
        return F.mse_loss(output, features.detach())

    with (
        ScatterOnceParallel(model, 3, devices(2), verify=False) as engine,
        nothing_changes(teacher),
        pytest.raises(ValueError, match="boom"),
    ):
        engine.forward_backward(INPUTS, TARGETS, loss, whole_batch=whole)
    assert calls
    assert torch.equal(generator.get_state(), before)


def test_network_in_object_not_trained():
    """It was, in one memory. Replicas share the object, and no optimizer finds the
    network.
    """
    held = Task(linear())
    model = Of(lambda m, x: m.linear(x) + m.held.net(x), linear=linear(), held=held)
    words = ARRIVES.format("a parameter of shape .*")
    with ScatterOnceParallel(model, 3, ["cpu"] * 2, verify=False) as engine:
        with nothing_changes(held.net), pytest.raises(ValueError, match=words):
            engine.forward_backward(INPUTS, TARGETS, nn.MSELoss())
        held.net.requires_grad_(False)
        assert_step(engine, INPUTS, TARGETS, nn.MSELoss())


# --- ranks that share a criterion ---


def scale():
    return Of(None, net=nn.Parameter(torch.tensor(0.5)))


def contrast(held):
    return lambda o, t: F.cross_entropy(held.net * o @ o.T, t.argmax(1))


# a network that only the criterion reaches, the criterion, words of the error
SHARED = {
    "closed over": (scale, contrast, None),
    "in a reentrant checkpoint": (square, checkpointed, None),
    "in slots": (
        scale,
        lambda net: contrast(Slots(net.net)),
        "the criterion uses a parameter",
    ),
}


def on_each_rank(group, case):
    make, criterion_of, _ = SHARED[case]
    model, net = mlp(), build(make)
    rows = slice(0, 7) if group.rank() == 0 else slice(7, ROWS)
    how = {"process_group": group, "verify": "checkpoint" not in case}
    with ScatterOnceParallel(model, 2, ["cpu"] * 2, **how) as engine:
        try:
            batch = INPUTS[rows], TARGETS[rows]
            engine.forward_backward(*batch, criterion_of(net), whole_batch=True)
        except (ValueError, RuntimeError) as error:
            return str(error), all_of(model, net)
    return None, all_of(model, net)


@pytest.mark.parametrize("case", SHARED)
def test_ranks_count_shared_network_once(case):
    """Each rank had the gradient of its own rows, or added its own copy of the same
    gradient.

    The graph does not show what a reentrant checkpoint has inside, so the criterion is
    searched. What is hidden in slots cannot be told apart.
    """
    make, criterion_of, words = SHARED[case]
    model, net = mlp(), build(make)
    criterion_of(net)(model(INPUTS), TARGETS).backward()
    for said, grads in run_on_ranks(2, on_each_rank, case):
        if words:
            assert words in said
            assert all(gradient is None for gradient in grads.values())
        else:
            assert said is None
            for name, gradient in all_of(model, net).items():
                assert_close(grads[name], gradient, name)


# --- functions that the module holds ---


def test_closed_over_values_are_followed(devices):
    """A module is a replica's, also if it becomes another one; all else is the user's
    own.
    """
    model = build(
        lambda: nn.ModuleList([nn.Linear(FEATURES, CLASSES) for _ in range(2)])
    )
    chosen, holder, scale = model[0], {"scale": 1.0}, 1.0
    model.forward = lambda rows: chosen(rows) * holder["scale"] * scale
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        for number, scales in enumerate([(1.0, 1.0), (0.5, 3.0)]):
            chosen, (holder["scale"], scale) = model[number], scales
            model.zero_grad()
            F.cross_entropy(model(INPUTS), LABELS).backward()
            expected = gradients(model)
            model.zero_grad()
            engine.forward_backward(INPUTS, LABELS, nn.CrossEntropyLoss())
            assert_gradients(model, expected)


def test_global_module_warns_and_is_untrained(monkeypatch, devices):
    """A twin of a function has the same file, and so runs the user's own module."""
    model = nn.Sequential(linear())
    monkeypatch.setitem(globals(), "NAMED", model[0])
    model.forward = lambda rows: NAMED(rows)  # noqa: F821
    with (
        ScatterOnceParallel(model, 2, devices(2)) as engine,
        pytest.warns(UserWarning, match="uses the global variable 'NAMED'"),
        pytest.raises(ValueError, match=r"your module's own '0\.weight' .* a global"),
    ):
        engine.forward_backward(INPUTS, LABELS, nn.CrossEntropyLoss())
    assert model[0].weight.grad is None


def test_attribute_named_as_global_no_warning(monkeypatch, recwarn):
    model = nn.Sequential(linear())
    model.head = model[0]
    monkeypatch.setitem(globals(), "head", model[0])
    model.forward = lambda rows: model.head(rows)  # the attribute, not the global
    with ScatterOnceParallel(model, 2, ["cpu:0", "cpu:1"]) as engine:
        engine.forward_backward(INPUTS, LABELS, nn.CrossEntropyLoss())
    assert not [str(warning.message) for warning in recwarn]


# --- two engines, one module ---

TAKEN = "another engine is in the middle of a step that trains this Sequential"


@pytest.mark.contract
def test_two_engines_in_threads_refused(devices):
    """The second is refused while the first is inside: its gradient was lost, or
    counted often.
    """
    model, inside, release = mlp(), threading.Event(), threading.Event()
    _, expected = whole_batch(model, INPUTS, TARGETS, F.mse_loss)

    def slow(output, targets):
        inside.set()
        assert release.wait(60)
        return F.mse_loss(output, targets)

    with (
        ScatterOnceParallel(model, 2, devices(2), verify=False) as one,
        ScatterOnceParallel(model, 1, devices(2), verify=False) as other,
    ):
        first = threading.Thread(
            target=one.forward_backward, args=(INPUTS, TARGETS, slow)
        )
        first.start()
        assert inside.wait(60)
        with pytest.raises(RuntimeError, match=f"{TAKEN}.* give each thread a copy"):
            other.forward_backward(INPUTS, TARGETS, F.mse_loss)
        other.eval()
        with torch.no_grad():
            assert_close(other(INPUTS), model(INPUTS), "inference")
        release.set()
        first.join(60)
        assert not first.is_alive()
        other.forward_backward(INPUTS, TARGETS, F.mse_loss)
    assert_gradients(model, {name: value * 2 for name, value in expected.items()})


# --- what a step pays for it ---


class Logging(Task):
    """A trainer with a log, which its criterion's object refers to in each step."""

    def __init__(self, net, steps):
        super().__init__(net)
        numbers = {f"metric {k}": 0.5 * k for k in range(100)}
        self.log = [numbers | {"step": step} for step in range(steps)]


def python_calls(function):
    """The number of calls of Python functions in this thread."""
    calls = []
    sys.setprofile(lambda _, event, __: calls.append(1) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.parametrize("verify", [True, False])
def test_trainer_log_is_not_read(net, verify):
    """Each step read its 100,000 numbers, in 0.2 to 0.4 s."""
    net.requires_grad_(False)
    with ScatterOnceParallel(mlp(), 2, ["cpu"] * 2, verify=verify) as engine:
        numbers = []
        for steps in (1, 1000):
            trainer = Logging(net, steps)
            for _ in range(5):  # of which the fifth has no look
                calls = python_calls(
                    lambda loss=trainer.loss: engine.forward_backward(
                        INPUTS, TARGETS, loss
                    )
                )
            numbers.append(calls)
    assert numbers[1] < numbers[0] + 400
