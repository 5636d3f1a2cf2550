"""A forward pass that writes parameters is refused by name; the error says if values
are lost.
"""

from __future__ import annotations

import contextlib
import copy
import re
from functools import partial

import pytest
import torch
from faults.state import capture, differences
from harness.agree import BATCH
from harness.models import CLASSES, FEATURES, Of, linear
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    gradients,
    whole_batch,
)
from harness.pairwise import pairwise
from torch import nn
from torch.nn.utils import parametrize

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

ROWS, LABELS = BATCH
TOKENS = torch.arange(9) * 2 % 13
CRITERION = nn.CrossEntropyLoss()

pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


SWITCH = {"on": False}  # of writers that nobody expects to write


def always(m, inputs):
    return True


def late(m, inputs):
    return SWITCH["on"]


def in_training(m, inputs):
    return m.training


def with_the_last_row(m, inputs):
    """Of two passes this is in one: a replica's last rows are computed once."""
    return (inputs == ROWS[-1]).all(1).any()


def the_second_time():
    """Of two passes this is in the second alone; replicas share what they have seen."""
    seen = set()

    def writes(m, inputs):
        known = set(inputs[:, 0].tolist()) <= seen
        seen.update(inputs[:, 0].tolist())
        return known

    return writes


def writer(write, writes=always):
    """Does something to a weight before it is used."""

    def forward(m, inputs):
        if writes(m, inputs):
            write(m.head.weight)
        return m.head(m.enter(inputs).tanh())

    parts = {"enter": nn.Linear(FEATURES, 6), "head": nn.Linear(6, CLASSES)}
    return Of(forward, **parts)


def decay_data(weight):
    weight.data.mul_(0.9)


@torch.no_grad()
def clip(weight):
    weight.clamp_(-0.2, 0.2)


def exchange(weight):
    weight.data = nn.functional.normalize(weight.data, dim=1)


@torch.no_grad()
def set_elsewhere(weight):
    weight.set_(nn.functional.normalize(weight, dim=1))


@torch.no_grad()
def set_to_own_storage(weight):
    """The same memory: torch counts a write all the same."""
    storage = weight.untyped_storage()
    weight.set_(storage, weight.storage_offset(), weight.shape, weight.stride())


@torch.no_grad()
def set_and_set_back(weight):
    values = weight.detach()
    weight.set_(2 * values)
    weight.set_(values)


def embedding():
    return nn.Sequential(nn.Embedding(16, 5, max_norm=0.7), nn.Linear(5, CLASSES))


MODELS = {
    "max_norm": (embedding, TOKENS, "0.weight"),
    "clip": (lambda: writer(clip), ROWS, "head.weight"),
    "decay_data": (lambda: writer(decay_data), ROWS, "head.weight"),
    "exchange": (lambda: writer(exchange), ROWS, "head.weight"),
    "set elsewhere": (lambda: writer(set_elsewhere), ROWS, "head.weight"),
    "set to its storage": (lambda: writer(set_to_own_storage), ROWS, "head.weight"),
    "set back": (lambda: writer(set_and_set_back), ROWS, "head.weight"),
    "the last row": (lambda: writer(exchange, with_the_last_row), ROWS, "head.weight"),
}
# what they overwrite in the user's module is lost
IN_PLACE = {"max_norm", "clip", "decay_data"}
# What torch counts as writes, too: nobody can tell that the values are as before.
IN_PLACE |= {"set to its storage", "set back"}


@contextlib.contextmanager
def by_engine(model, devices, accum=3, how=None, **options):
    with ScatterOnceParallel(model, accum, devices, **(how or {})) as engine:
        yield lambda inputs, loss=CRITERION: engine.forward_backward(
            inputs, LABELS, loss, **options
        )


WAYS = {
    "step": by_engine,
    "unchecked": lambda *given: by_engine(*given, how={"verify": False}),
    "whole batch": lambda *given: by_engine(*given, whole_batch=True),
    "inference": lambda model, devices: ScatterOnceParallel(model.eval(), 2, devices),
    "pair": lambda *given: contextlib.nullcontext(DataParallelModel(*given)),
}


def words(name, lost):
    outcome = (
        "no gradient was added, .* values are lost" if lost else "nothing was changed"
    )
    return (
        rf"writes the parameter '{name}'( \(and \d more\))?, .*{outcome}; "
        r".*register_buffer"
    )


@contextlib.contextmanager
def refused(name, *modules, lost=False):
    """The body's error has this name, and says if values are lost. All others are as
    before.
    """
    before = [capture(module) for module in modules]
    with pytest.raises(RuntimeError, match=words(name, lost)):
        yield
    for module, state in zip(modules, before, strict=True):
        changed = differences(state, capture(module))
        assert bool(changed) <= lost
        assert all(p.grad is None for p in module.parameters())


@pairwise(way=WAYS, case=MODELS, quick={"way": ["step", "pair"]})
def test_writes_refused_every_time(devices, way, case):
    make, inputs, name = MODELS[case]
    model = build(make)
    with WAYS[way](model, devices(2)) as run:
        for _ in range(2):
            with refused(name, model, lost=case in IN_PLACE):
                run(inputs)


def casts(weight):
    """To the dtype of the inputs."""
    weight.data = weight.data.to(ROWS.dtype)


class Scaled(nn.Module):
    """A parametrization, as PEFT's of the parameters of fused experts."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, weight):
        return weight * self.scale


class ParametrizedInForward(nn.Module):
    """torch sets the parameter to its own memory, which counts as a write."""

    def __init__(self):
        super().__init__()
        self.head = linear()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, rows):
        parametrize.register_parametrization(
            self.head, "weight", Scaled(self.scale), unsafe=True
        )
        try:
            with parametrize.cached():
                return self.head(rows) + self.head(rows * 2)
        finally:
            parametrize.remove_parametrizations(
                self.head, "weight", leave_parametrized=False
            )


class Experts(ParametrizedInForward):
    """Two parameters of one module are parametrized, one within the other."""

    def forward(self, rows):
        register = partial(parametrize.register_parametrization, self.head, unsafe=True)
        register("weight", Scaled(self.scale))
        register("bias", Scaled(self.scale))
        try:
            with parametrize.cached(), parametrize.cached():
                return self.head(rows) + self.head(rows * 2)
        finally:
            for name in ("weight", "bias"):
                parametrize.remove_parametrizations(
                    self.head, name, leave_parametrized=False
                )


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("make", [ParametrizedInForward, Experts])
def test_parametrization_in_forward_allowed(devices, make, verify):
    """LoRA on parameters of experts was refused, on one device, too. Replicas of
    several memories computed with the graph of an earlier sub-step.
    """
    model, plain = build(make), build(make)
    with ScatterOnceParallel(model, 3, devices(2), verify=verify) as engine:
        for _ in range(3):
            for module in (model, plain):
                module.zero_grad()
            engine.forward_backward(ROWS, LABELS, CRITERION)
            CRITERION(plain(ROWS), LABELS).backward()
            assert_gradients(model, gradients(plain))


def test_parametrization_that_writes_refused(devices):
    """What it leaves is another value: that is a write."""

    def writes(module, rows):
        parametrize.register_parametrization(module.head, "weight", Scaled(0.5))
        parametrize.remove_parametrizations(module.head, "weight")
        return module.head(rows)

    model = build(lambda: Of(writes, head=linear()))
    with (
        by_engine(model, devices(2), how={"verify": False}) as run,
        refused("head.weight", model),
    ):
        run(ROWS)


def test_write_in_second_pass_refused(devices):
    model = build(lambda: writer(decay_data, the_second_time()))
    options = {"how": {"verify": False}, "whole_batch": True}
    # Which replica writes first, and so whether values of the user's module are lost,
    # is timing.
    words = "writes the parameter 'head.weight'"
    with (
        by_engine(model, devices(2), **options) as run,
        pytest.raises(RuntimeError, match=words),
    ):
        run(ROWS)


def test_cast_of_frozen_parameter_allowed(devices):
    model = build(lambda: writer(casts))
    model.head.requires_grad_(False)
    model.head.weight.data = model.head.weight.data.float()
    double = build(lambda: writer(casts))
    double.load_state_dict(model.state_dict())
    expected = CRITERION(double(ROWS), LABELS).detach()
    with by_engine(model, devices(2)) as run:
        for _ in range(2):
            assert_close(run(ROWS), expected, "loss")
            assert model.head.weight.dtype == torch.float32


@pytest.mark.parametrize("case", ["max_norm", "exchange"])
def test_other_error_notes_the_write(devices, case):
    make, inputs, name = MODELS[case]
    model = build(make)
    before = capture(model)

    def boom(output, targets):
        raise ArithmeticError("boom")

    with (
        by_engine(model, devices(2), 1) as run,
        pytest.raises(ArithmeticError) as caught,
    ):
        run(inputs, boom)
    assert re.search(words(name, case in IN_PLACE), str(caught.value.__notes__))
    assert bool(differences(before, capture(model))) <= (case in IN_PLACE)


def assert_good(model, run):
    """Loss and gradients are those of plain torch."""
    loss, expected = whole_batch(model, *BATCH, CRITERION)
    found = run(ROWS)
    if isinstance(found, tuple):
        found = CRITERION(torch.cat(found), LABELS)
        found.backward()
    assert_close(found.detach(), loss, "loss")
    assert_gradients(model, expected)
    model.zero_grad()


@pairwise(way=["step", "pair"], write=[clip, exchange], quick={"way": ["step"]})
def test_write_in_later_step_refused(devices, monkeypatch, way, write):
    model = build(lambda: writer(write, late))
    with WAYS[way](model, devices(2)) as run:
        for _ in range(2):
            monkeypatch.setitem(SWITCH, "on", False)
            assert_good(model, run)
            monkeypatch.setitem(SWITCH, "on", True)
            with refused("head.weight", model, lost=write is not exchange):
                run(ROWS)


def test_write_through_data_refused_in_train(devices):
    model = build(lambda: writer(decay_data, in_training)).eval()
    with by_engine(model, devices(2)) as run:
        assert_good(model, run)
        model.train()
        with refused("head.weight", model, lost=True):
            run(ROWS)


def test_criterion_writing_itself_refused(devices):
    """It normalises its own weights."""

    def loss(m, output, targets):
        exchange(m.proxies)
        return nn.functional.cross_entropy(output @ m.proxies.T, targets)

    proxies = nn.Parameter(torch.ones(CLASSES, CLASSES))
    model, criterion = linear(), build(lambda: Of(loss, proxies=proxies))
    with by_engine(model, devices(2)) as run, refused("proxies", model, criterion):
        run(ROWS, criterion)
    outputs = DataParallelModel(model, devices(2))(ROWS)
    with refused("proxies", model, criterion):
        DataParallelCriterion(criterion)(outputs, LABELS)


def test_criterion_writing_model_refused(devices):
    """By its closure, and so the user's own tensor."""
    model = linear()

    def criterion(output, targets):
        clip(model.weight)
        return CRITERION(output, targets)

    with by_engine(model, devices(2), 1) as run, refused("weight", model, lost=True):
        run(ROWS, criterion)


class Begins(nn.Module):
    """The first call gives its parameters values, by ``begin(module, inputs)``."""

    def __init__(self, begin, flag):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.register_buffer("begun", torch.tensor(False))
        self.head = nn.Linear(FEATURES, CLASSES)
        self.begin = begin
        self.flag = flag

    def forward(self, inputs):
        if not self.flag(self):
            with torch.no_grad():
                self.begin(self, inputs)
                self.begun.fill_(True)
        return self.head(self.scale * inputs)


def by_rows(module, inputs):
    module.scale.copy_(1 / inputs.std(0))


def in_data(module, inputs):
    module.scale.data = 1 / inputs.std(0)


def from_a_prior(module, inputs):
    module.scale.data.copy_(torch.full_like(module.scale, 0.5))


BEGINNINGS = {
    "by rows (ActNorm)": by_rows,
    "by rows, in another storage": in_data,
    "from a prior (gpytorch)": from_a_prior,
}


@pytest.mark.parametrize("begin", BEGINNINGS)
def test_first_call_that_initialises_is_made_before(devices, begin):
    """The remedies of other writes are none for a layer of a library."""

    def make():
        return build(lambda: Begins(BEGINNINGS[begin], lambda m: bool(m.begun)))

    with (
        ScatterOnceParallel(make(), 1, devices(2)) as engine,
        pytest.raises(RuntimeError, match=r"call the module once.*first step"),
    ):
        engine.forward_backward(ROWS, LABELS, CRITERION)
    model = make()
    with torch.no_grad():
        model(ROWS)
    expected = whole_batch(copy.deepcopy(model), ROWS, LABELS, CRITERION)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        loss = engine.forward_backward(ROWS, LABELS, CRITERION)
    assert_close(loss, expected[0], "loss")
    assert_gradients(model, expected[1])


def test_later_write_is_no_first_call(devices, monkeypatch):
    monkeypatch.setitem(SWITCH, "on", False)
    model = build(lambda: Begins(by_rows, lambda m: not SWITCH["on"]))
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        engine.forward_backward(ROWS, LABELS, CRITERION)
        engine.verify = False
        SWITCH["on"] = True
        with pytest.raises(RuntimeError, match=r"lost; write the parameter after"):
            engine.forward_backward(ROWS, LABELS, CRITERION)
