"""A step is run once: what it leaves, and where it ends."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from harness.oracle import seeded
from torch import nn

from scatterpar.splitting import step_run
from scatterpar.splitting.step_run import (
    Numbers,
    Settings,
    run_step,
)


def doubled():
    """A model of one number: y = 2 x."""
    with seeded():
        model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(2.0)
    return model


def run(step, model, batches, **settings):
    settings = Settings(**{"in_double": False, **settings})
    before = random.getstate()
    try:
        return run_step(step, model, batches, settings, list(model.parameters()))
    finally:
        random.setstate(before)  # what ``ProcessState`` does


def sums(model, batches):
    """The gradient is the sum of all numbers."""
    for batch in batches:
        model(batch).sum().backward()


BATCHES = [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0]])]


def test_gradients_add_up():
    result = run(sums, doubled(), BATCHES)
    assert result.gradients["weight"].tolist() == [[9.0]]
    assert result.gradients["weight"].dtype == torch.float64
    assert result.drawn == []
    assert not result.has_drawn
    assert result.coarsest == torch.float32


def test_earlier_gradient_does_not_count():
    model = doubled()
    model.weight.grad = torch.full((1, 1), 100.0)
    assert run(sums, model, BATCHES).gradients["weight"].item() == 9


def test_double_makes_everything_float64():
    dtypes = []

    def step(model, batches):
        dtypes.extend([model.weight.dtype, torch.ones(1).dtype])
        sums(model, [batch.double() for batch in batches])

    before = torch.get_default_dtype()
    try:
        run(step, doubled(), BATCHES, in_double=True)
    finally:
        torch.set_default_dtype(before)  # what ``ProcessState`` does
    assert dtypes == [torch.float64] * 2


def test_optimizer_gets_grad_has_no_effect():
    def step(model, batches):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sums(model, batches)
        optimizer.step()
        raise AssertionError("the step ends where all gradients have arrived")

    model = doubled()
    assert run(step, model, BATCHES).gradients["weight"].item() == 9
    assert model.weight.item() == 2


@pytest.mark.parametrize("with_closure", [False, True])
def test_step_ends_after_last_optimizer(with_closure):
    """Each is called once, with a closure or without, and changes nothing."""
    model = nn.ModuleDict({"first": doubled(), "second": doubled()})
    calls = []

    def step(model, batches):
        for batch, name in zip(batches, model, strict=True):
            optimizer = torch.optim.SGD(model[name].parameters(), 0.1)

            def closure(batch=batch, name=name):
                calls.append(name)
                return sums(model[name], [batch])

            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            assert name == "first"

    gradients = run(step, model, BATCHES).gradients
    assert calls == ["first", "second"]
    assert gradients["first.weight"].item() == 4
    assert gradients["second.weight"].item() == 5
    assert model["first"].weight.item() == model["second"].weight.item() == 2


def test_error_is_raised_hook_removed():
    def step(model, batches):
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(step, doubled(), BATCHES)
    model = doubled()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model.weight.grad = torch.ones(1, 1)
    optimizer.step()
    assert model.weight.item() == 1.5


def test_change_by_hand_is_the_gradient():
    def step(model, batches):
        with torch.no_grad():
            model.weight -= 0.5

    assert run(step, doubled(), BATCHES).gradients["weight"].item() == 0.5


@pytest.mark.draws
def test_generators_drawn_from_are_named():
    def step(model, batches):
        torch.rand(1, generator=torch.Generator())
        random.random()
        sums(model, batches)

    result = run(step, doubled(), BATCHES)
    assert result.drawn == ["Python"]
    assert result.has_drawn


def test_seeding_is_no_draw():
    def step(model, batches):
        random.seed(3)
        numpy.random.seed(3)
        sums(model, batches)

    before = numpy.random.get_state()
    try:
        assert run(step, doubled(), BATCHES).drawn == []
    finally:
        numpy.random.set_state(before)


@pytest.mark.draws
@pytest.mark.parametrize(
    ("numbers", "are_equal"), [(Numbers.CONSTANT, True), (Numbers.VARIED, False)]
)
def test_random_operators_follow_settings(numbers, are_equal):
    drawn = []

    def step(model, batches):
        drawn.append(torch.rand(2, 2))
        sums(model, batches)

    run(step, doubled(), BATCHES, numbers=numbers)
    assert torch.equal(drawn[0][0], drawn[0][1])
    assert bool(drawn[0][0, 0] == drawn[0][0, 1]) == are_equal


def test_coarsest_dtype_is_watched():
    def step(model, batches):
        return (model.weight * model.weight.half().float()).sum().backward()

    assert run(step, doubled(), []).coarsest == torch.float16


def batch_norms():
    return nn.Sequential(
        nn.BatchNorm1d(1), nn.BatchNorm1d(1, track_running_stats=False)
    )


def test_batch_norm_uses_running_statistics():
    model = batch_norms()
    assert step_run.layers_with_batch_statistics(model) == [model[0]]
    rows = torch.tensor([[1.0], [3.0]])
    assert model[0](rows).mean().abs().item() < 1e-6
    model = batch_norms()
    step_run.use_running_statistics(model)
    model.train()
    # Of a mean of 0 and a variance of 1.
    torch.testing.assert_close(model[0](rows), rows / (1 + 1e-5) ** 0.5)


def test_complex_gradients_are_pairs():
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor([1 + 1j]))

    def step(model, batches):
        (model.weight.real * 3 + model.weight.imag * 4).sum().backward()

    assert run(step, model, []).gradients["weight"].tolist() == [[3, 4]]
