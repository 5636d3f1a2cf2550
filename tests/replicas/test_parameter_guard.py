"""A forward pass that writes parameters is refused by name; the error says if values are lost."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from faults.state import capture, differences
from harness.agree import BATCH
from harness.models import CLASSES, FEATURES, Of, linear
from harness.oracle import assert_close, assert_gradients, build, gradients, whole_batch
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel

ROWS, LABELS = BATCH
TOKENS = torch.arange(9)[:, None] * torch.tensor([2, 1]) % 13
CRITERION = nn.CrossEntropyLoss()

pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


class Writer(nn.Module):
    """``write`` does something to the weight before it is used; of a ``late`` one, if ``is_on``."""

    on = False

    def __init__(self, write, late=False):
        super().__init__()
        self.write, self.is_on = write, not late
        self.enter = nn.Linear(FEATURES, 6)
        self.head = nn.Linear(6, CLASSES)

    def writes(self, inputs):
        return Writer.on or self.is_on

    def forward(self, inputs):
        if self.writes(inputs):
            self.write(self.head.weight)
        return self.head(self.enter(inputs).tanh())


def decay_data(weight):
    weight.data.mul_(0.9)


@torch.no_grad()
def clip(weight):
    weight.clamp_(-0.2, 0.2)


def exchange(weight):
    weight.data = nn.functional.normalize(weight.data, dim=1)


@torch.no_grad()
def decay(weight):
    weight.mul_(0.9)


@torch.no_grad()
def set_decayed(weight):
    weight.set_(weight * 0.9)


class WritesWithTheLastRow(Writer):
    """Of two passes this is in one: a replica's last rows are computed once."""

    def writes(self, inputs):
        return (inputs == ROWS[-1]).all(1).any()


class WritesTheSecondTime(Writer):
    """Of two passes this is in the second alone."""

    seen: set = set()  # noqa: RUF012 - shared by the replicas

    def writes(self, inputs):
        known = set(inputs[:, 0].tolist()) <= self.seen
        self.seen.update(inputs[:, 0].tolist())
        return known


def embedding(max_norm=0.7, kind=nn.Embedding):
    return nn.Sequential(kind(16, 5, max_norm=max_norm), nn.Linear(5, CLASSES))


def functional_table():
    """torch renormalises what is looked up, and no attribute says so."""

    def forward(m, tokens):
        return nn.functional.embedding(tokens, m.table, max_norm=0.7).mean(1)

    return Of(forward, table=nn.Parameter(torch.randn(16, CLASSES)))


def moving_average():
    """A copy of the encoder follows it, as MoCo's does: parameters that nothing trains."""

    def forward(m, inputs):
        for key, query in zip(m.key.parameters(), m.linear.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1
        return m.linear(inputs) + m.key(inputs)

    return Of(forward, linear=linear(), key=linear().requires_grad_(False))


MODELS = {
    "functional max_norm": (functional_table, TOKENS, "table"),
    "max_norm": (embedding, TOKENS[:, 0], "0.weight"),
    "max_norm of bags": (lambda: embedding(kind=nn.EmbeddingBag), TOKENS, "0.weight"),
    **{
        write.__name__: (lambda write=write: Writer(write), ROWS, "head.weight")
        for write in (clip, decay_data, exchange, decay, set_decayed)
    },
    "moving average": (moving_average, ROWS, "key.weight"),
    "the last row": (lambda: WritesWithTheLastRow(exchange), ROWS, "head.weight"),
}


@contextlib.contextmanager
def by_engine(model, devices, accum=3, how=None, **options):
    with ScatterOnceParallel(model, accum, devices, **(how or {})) as engine:
        yield lambda inputs, loss=CRITERION: engine.forward_backward(
            inputs, LABELS, loss, **options
        )


# What these overwrite in the user's module is lost.
IN_PLACE = {"functional max_norm", "max_norm", "max_norm of bags", "clip", "decay_data", "decay"}

WAYS = {
    "step": by_engine,
    "unchecked": lambda *given: by_engine(*given, how={"verify": False}),
    "whole batch": lambda *given: by_engine(*given, whole_batch=True),
    "inference": lambda model, devices: ScatterOnceParallel(model.eval(), 2, devices),
    "pair": lambda *given: contextlib.nullcontext(DataParallelModel(*given)),
}


def words(name, lost):
    outcome = "no gradient was added, .* values are lost" if lost else "nothing was changed"
    return rf"writes the parameter '{name}'( \(and \d more\))?, .*{outcome}; .*register_buffer"


@contextlib.contextmanager
def refused(name, *modules, lost=False):
    """The body's error has this name, and says if values are lost. All others are as before."""
    before = [capture(module) for module in modules]
    with pytest.raises(RuntimeError, match=words(name, lost)):
        yield
    for module, state in zip(modules, before, strict=True):
        changed = differences(state, capture(module))
        assert bool(changed) <= lost
        assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize(
    ("way", "replicas"),
    [*((way, 2) for way in WAYS), pytest.param("step", 1, marks=pytest.mark.slow)],
)
def test_it_is_refused_every_time(devices, way, case, replicas):
    make, inputs, name = MODELS[case]
    model = build(make)
    with WAYS[way](model, devices(replicas)) as run:
        for _ in range(2):
            with refused(name, model, lost=case in IN_PLACE):
                run(inputs)


class Casts(Writer):
    """A frozen weight is cast to the dtype of the inputs when it is first used."""

    def __init__(self):
        super().__init__(lambda weight: setattr(weight, "data", weight.data.to(ROWS.dtype)))
        self.head.requires_grad_(False).float()


def test_a_frozen_parameter_that_is_only_cast_is_not_refused(devices):
    model = build(Casts)
    model.head.weight.data = model.head.weight.data.float()
    model.head.bias.data = model.head.bias.data.double()
    with by_engine(model, devices(2)) as run:
        for _ in range(2):
            loss = run(ROWS)
            assert model.head.weight.dtype == torch.float32
    double = build(lambda: Writer(lambda weight: None))
    double.load_state_dict(model.state_dict())
    assert_close(loss, CRITERION(double(ROWS), LABELS).detach(), "loss")


@pytest.mark.parametrize("write", [clip, decay_data, exchange, decay])
def test_a_write_in_the_second_pass_alone_is_refused_too(devices, write):
    how = "second forward pass gave other" if write is exchange else "writes the parameter .head.w"
    model = build(lambda: WritesTheSecondTime(write))
    with by_engine(model, devices(2), whole_batch=True) as run:
        WritesTheSecondTime.seen.clear()
        with pytest.raises(RuntimeError, match=how):
            run(ROWS)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("case", MODELS)
def test_a_step_that_fails_otherwise_notes_it(devices, case):
    make, inputs, name = MODELS[case]
    model = build(make)
    before = capture(model)

    def boom(output, targets):
        raise ArithmeticError("boom")

    with by_engine(model, devices(2), 1) as run, pytest.raises(ArithmeticError) as caught:
        run(inputs, boom)
    assert re.search(words(name, case in IN_PLACE), str(caught.value.__notes__))
    assert bool(differences(before, capture(model))) <= (case in IN_PLACE)


def test_renormalising_after_the_step_is_what_max_norm_does(devices):
    """The lines of the error and of the docs."""
    plain, model = build(embedding), build(lambda: embedding(None))
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, plain)]
    with by_engine(model, devices(3)) as run:
        for shift in range(3):
            with torch.no_grad():
                model[0].weight.renorm_(2.0, 0, 0.7)
            tokens = TOKENS[:, 0] + shift
            loss, expected = run(tokens), CRITERION(plain(tokens), LABELS)
            expected.backward()
            assert_close(loss, expected.detach(), "loss")
            assert_gradients(model, gradients(plain))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


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


def turn_flag(model, is_on):
    """Who did not write with other flags is looked at again; that which is known is remembered."""
    model.is_on = is_on


def turn_late(model, is_on):
    Writer.on = is_on


@pytest.mark.parametrize(
    ("turn", "way", "write"),
    [
        *((turn_flag, "step", write) for write in (clip, decay_data, exchange, decay)),
        *((turn_late, way, w) for way in ("step", "pair") for w in (clip, exchange, decay)),
    ],
)
def test_a_write_in_a_later_step_is_told(devices, monkeypatch, turn, way, write):
    monkeypatch.setattr(Writer, "on", False)
    model = build(lambda: Writer(write, late=True))
    with WAYS[way](model, devices(2)) as run:
        assert_good(model, run)
        for _ in range(2):
            turn(model, True)
            with refused("head.weight", model, lost=write is not exchange):
                run(ROWS)
            turn(model, False)
            assert_good(model, run)


def test_a_late_write_before_the_user_s_own_error_is_noted(monkeypatch):
    def criterion(output, targets):
        if Writer.on:
            raise ArithmeticError
        return CRITERION(output, targets)

    with by_engine(build(lambda: Writer(decay, late=True)), ["cpu"] * 2) as run:
        run(ROWS, criterion)
        monkeypatch.setattr(Writer, "on", True)
        with pytest.raises(ArithmeticError) as caught:
            run(ROWS, criterion)
    assert any("values are lost" in note for note in caught.value.__notes__)


def test_a_criterion_that_writes_its_own_is_refused(devices):
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


@pytest.mark.parametrize("good_steps", [0, 1])
def test_a_criterion_that_writes_the_model_s_is_refused(devices, good_steps):
    """By its closure, and so the user's own tensor."""
    model, steps = linear(), []

    def criterion(output, targets):
        if len(steps) == good_steps:
            decay(model.weight)
        return CRITERION(output, targets)

    with by_engine(model, devices(2), 1) as run:
        for _ in range(good_steps):
            steps.append(run(ROWS, criterion))
            model.zero_grad()
        with refused("weight", model, lost=True):
            run(ROWS, criterion)
