"""What modules may be, do and return that one device would take, or that is told in words."""

from __future__ import annotations

import functools

import pytest
import torch
from harness.isolation import guarded
from harness.models import CLASSES, FEATURES, Classifier, Of, Returns, mlp
from harness.oracle import assert_close, assert_step, build, randint, randn, seeded, whole_batch
from harness.weighted import CLASS_WEIGHTS, classes
from torch import nn
from torch.nn import functional as F

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

BATCH = randn(9, FEATURES), randint(CLASSES, 9)
CRITERION = nn.CrossEntropyLoss()


pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:Sparse")]


class Slotted(nn.Linear):
    __slots__ = ("scale",)


def with_sparse(register):
    model = Classifier()
    register(model, "adjacency", torch.eye(3).to_sparse())
    return model


def returning(wrap):
    return lambda: Returns(lambda logits, _: wrap(logits))


REFUSED = {
    "slots": (lambda: Slotted(FEATURES, CLASSES), "class Slotted of a module has __slots__"),
    "a sparse buffer": (
        lambda: with_sparse(nn.Module.register_buffer),
        "'adjacency', a spars.*Repl",
    ),
    "a sparse attribute": (
        lambda: with_sparse(setattr),
        r"sparse tensor of shape \(3, 3\).*Replicated",
    ),
    "a generator as output": (
        returning(lambda logits: {"logits": (row for row in logits)}),
        "output contains a generator that has not been consumed; return a list",
    ),
    "a map as output": (
        returning(lambda logits: map(abs, logits)),
        "output contains a map that has not been consumed",
    ),
}


@pytest.mark.parametrize("runner", [ScatterOnceParallel, DataParallelModel])
@pytest.mark.parametrize("case", REFUSED)
def test_what_replicas_cannot_hold_or_return_is_refused_with_the_way_out(devices, case, runner):
    make, words = REFUSED[case]
    with pytest.raises(TypeError, match=words):
        runner(build(make).eval(), device_ids=devices(2))(BATCH[0])


def zeroes(m, inputs):
    m.zero_grad()
    m.linear.zero_grad()
    return m.linear(inputs)


def test_zero_grad_in_forward_does_not_wipe_earlier_sub_steps(devices):
    """Each sub-step forgot the ones before it, in silence."""
    model = build(lambda: Of(zeroes, linear=nn.Linear(FEATURES, CLASSES)))
    with (
        ScatterOnceParallel(model, 3, devices(2)) as engine,
        pytest.warns(UserWarning, match="zero_grad.. inside forward has no effect"),
    ):
        assert_step(engine, *BATCH, CRITERION)


def test_lazy_modules_say_what_to_do_and_work_once_initialised(devices):
    with seeded():
        module = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(CLASSES)).double()
    words = r"uninitialised lazy parameter, '0.weight': call the module once"
    with ScatterOnceParallel(module, 2, devices(2)) as engine:
        with pytest.raises(RuntimeError, match=words):
            engine.forward_backward(*BATCH, CRITERION)
        with seeded():
            module(BATCH[0][:2])
        assert_step(engine, *BATCH, CRITERION)


def makes_its_head(model, inputs):
    """Its head comes with the first batch, as wide as that."""
    if model.head is None:
        model.head = nn.Linear(6, CLASSES).double()
    return model.head(model.enter(inputs))


def exchanges_its_weight(model, inputs):
    if model.exchanges:
        model.head.weight = nn.Parameter(model.head.weight * 0.5)
    return model.head(inputs)


MAKERS = {
    "a head": lambda: Of(makes_its_head, enter=nn.Linear(FEATURES, 6), head=None),
    "a weight": lambda: Of(exchanges_its_weight, head=nn.Linear(FEATURES, CLASSES), exchanges=True),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("whole_batch", [False, True])
def test_parameters_that_a_forward_pass_makes_are_refused_by_name(devices, kind, whole_batch):
    model, words = build(MAKERS[kind]), r"creates the parameter 'head\.weight'"
    engine = ScatterOnceParallel(model, 2, devices(3))
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{words}.*before the first"):
            engine.forward_backward(*BATCH, CRITERION, whole_batch=whole_batch)
        with pytest.raises(ValueError, match=words), torch.no_grad():
            engine(BATCH[0])
        assert all(parameter.grad is None for parameter in model.parameters())
    model.exchanges = False
    with seeded():
        model(BATCH[0])
    assert_step(engine, *BATCH, CRITERION)


# --- criteria that hold tensors ---

ROWS = 13
LABELLED = randn(ROWS, FEATURES), classes(ROWS)


def weighted(output, targets, options, scale=1.0):
    losses = F.cross_entropy(output, targets, reduction="none")
    return (losses * options["weight"][:1]).mean() * scale


CRITERIA = {
    "class weights": functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS.clone()),
    "nested": functools.partial(
        functools.partial(weighted, options={"weight": CLASS_WEIGHTS.clone()}), scale=3.0
    ),
    "a module": functools.partial(nn.CrossEntropyLoss(CLASS_WEIGHTS.clone(), reduction="sum")),
    "a module's method": functools.partial(nn.MSELoss().forward),
}


@pytest.mark.parametrize("case", CRITERIA)
def test_tensors_in_a_partial_are_in_each_replica_s_memory(monkeypatch, case):
    """The second card failed: the weight stayed on the first."""
    model, criterion = mlp(), CRITERIA[case]
    batch = (LABELLED[0], randn(ROWS, CLASSES)) if "method" in case else LABELLED
    options = {"reduction": "sum"} if case == "a module" else {}
    expected, _ = whole_batch(model, *batch, criterion)
    module = criterion.func if isinstance(criterion.func, nn.Module) else nn.Module()
    with (
        ScatterOnceParallel(model, 2, ["cpu:0", "cpu:1", "cpu:2"]) as engine,
        guarded(monkeypatch, model, module) as memories,
    ):
        memories.claim(list(criterion.keywords.values()), torch.device("cpu:0"))
        assert_close(engine.forward_backward(*batch, criterion, **options), expected, "loss")
        assert len(memories.checked) == 3


def test_they_are_sent_once_and_follow_what_is_written_into_them():
    weight = CLASS_WEIGHTS.clone()
    criterion = functools.partial(F.cross_entropy, weight=weight)
    with ScatterOnceParallel(mlp(), 2, ["cpu:0", "cpu:1"]) as engine:
        engine.forward_backward(*LABELLED, F.cross_entropy)
        assert_step(engine, *LABELLED, criterion)
        assert engine.last_step.bytes["replicate"] == weight.numel() * 8  # all else is there
        assert_step(engine, *LABELLED, criterion)
        assert engine.last_step.bytes["replicate"] == 0
        weight[0] = 7.0
        assert_step(engine, *LABELLED, criterion)


def test_a_bound_tensor_that_is_trained_gets_its_gradient(devices):
    def scaled(output, targets, scale):
        return (scale * F.cross_entropy(output, targets, reduction="none")).mean()

    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    twin = scale.detach().clone().requires_grad_()
    model = mlp()
    whole_batch(model, *LABELLED, functools.partial(scaled, scale=twin))
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        engine.forward_backward(*LABELLED, functools.partial(scaled, scale=scale))
    assert_close(scale.grad, twin.grad, "scale")


def test_what_a_closure_brings_along_is_named(devices):
    """It cannot be moved; so the error says what it is, where it is, and what to write instead."""
    weight, few = CLASS_WEIGHTS.to("meta"), CLASS_WEIGHTS[:3]

    def criterion(output, targets):
        return F.cross_entropy(output, targets, weight=weight)

    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        with pytest.raises((RuntimeError, NotImplementedError)) as caught:
            engine.forward_backward(*LABELLED, criterion)
        (said,) = [note for note in caught.value.__notes__ if "criterion uses" in note]
        assert "the criterion uses 'weight' on meta, but this replica computes on cpu" in said
        assert "bind it with functools.partial(criterion, weight=weight)" in said
        assert all(parameter.grad is None for parameter in engine.parameters())
        with pytest.raises(RuntimeError) as caught:  # another error says nothing of it
            engine.forward_backward(*LABELLED, lambda o, t: F.cross_entropy(o, t, weight=few))
        assert not any("criterion uses" in note for note in caught.value.__notes__)


def test_the_pair_s_criterion_too(monkeypatch):
    model = mlp()
    weighted = functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS.clone())
    ids = ["cpu:0", "cpu:1"]
    expected, _ = whole_batch(model, *LABELLED, weighted)
    with guarded(monkeypatch, model) as memories:
        memories.claim(weighted.keywords["weight"], torch.device("cpu:0"))
        outputs = DataParallelModel(model, ids)(LABELLED[0])
        loss = DataParallelCriterion(weighted, ids)(outputs, LABELLED[1])
        assert_close(loss.detach(), expected, "loss")
