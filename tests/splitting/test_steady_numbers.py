"""Which random numbers a step gets: constant ones, unless a gradient vanishes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from scatterpar.splitting.operator_modes import Numbers
from scatterpar.splitting.steady_numbers import first_reference
from scatterpar.splitting.step_run import Settings, StepResult

ROWS = list(range(8))
LIMIT = 1e-6
WEIGHTS, PER_ROW = (3, 4), (8,)  # shapes of draws


def result(weight, draws=(), drawn=True):
    gradients = {"weight": torch.tensor([weight]), "bias": torch.ones(2)}
    return StepResult(gradients, [], None, drawn, Counter(draws), (), False, (), {})


class Known:
    """Runs whose result is known by the numbers that they get."""

    def __init__(self, by_numbers, of_half=()):
        self.settings = Settings()
        self._by_numbers = by_numbers
        self._of_half = of_half
        self.calls = []

    def reference(self, rows, **changes):
        settings = replace(self.settings, **changes)
        self.calls.append((len(rows), settings.numbers))
        if len(rows) < len(ROWS):
            return result(1.0, self._of_half)
        return self._by_numbers[settings.numbers]


def test_step_without_draws_runs_once():
    runs = Known({Numbers.CONSTANT: result(2.0, drawn=False)})
    reference, unseen = first_reference(runs, ROWS, LIMIT)
    assert reference.gradients["weight"] == 2
    assert unseen == []
    assert runs.calls == [(8, Numbers.CONSTANT)]


def test_dropout_keeps_constant_numbers():
    runs = Known({Numbers.CONSTANT: result(2.0), Numbers.AS_DRAWN: result(3.0)})
    reference, unseen = first_reference(runs, ROWS, LIMIT)
    assert reference.gradients["weight"] == 2
    assert unseen == []
    assert runs.calls == [(8, Numbers.CONSTANT), (8, Numbers.AS_DRAWN)]
    assert runs.settings == Settings()


def test_vanished_gradient_gets_numbers_that_vary():
    """Equal weights of classes leave no gradient on what is below them."""
    by_numbers = {
        Numbers.CONSTANT: result(1e-12, [WEIGHTS, PER_ROW]),
        Numbers.AS_DRAWN: result(3.0),
        Numbers.VARIED: result(2.0, [WEIGHTS]),
    }
    runs = Known(by_numbers, [WEIGHTS, (4,)])
    reference, unseen = first_reference(runs, ROWS, LIMIT)
    assert reference.gradients["weight"] == 2
    assert runs.settings.numbers is Numbers.VARIED
    assert runs.settings.fixed_shapes == {WEIGHTS}
    assert (4, Numbers.CONSTANT) in runs.calls
    assert "what random numbers of each row decide" in " ".join(unseen)


@pytest.mark.parametrize(("of_half", "is_told"), [([WEIGHTS], False), ([(4,)], True)])
def test_draws_of_rows_hide_what_they_decide(of_half, is_told):
    draws = [WEIGHTS] if not is_told else [PER_ROW]
    by_numbers = {
        Numbers.CONSTANT: result(2.0, draws),
        Numbers.AS_DRAWN: result(3.0),
    }
    _, unseen = first_reference(Known(by_numbers, of_half), ROWS, LIMIT)
    assert len(unseen) == is_told


@pytest.mark.parametrize("varied", [1e-12, float("nan")])
def test_gradient_that_stays_zero_is_told(varied):
    by_numbers = {
        Numbers.CONSTANT: result(0.0),
        Numbers.AS_DRAWN: result(3.0),
        Numbers.VARIED: result(varied),
    }
    _, unseen = first_reference(Known(by_numbers), ROWS, LIMIT)
    assert unseen == [
        "the gradient of weight, which is zero with constant random numbers"
    ]


def test_nothing_to_compare_is_refused():
    nothing = result(0.0)
    nothing.gradients["bias"] = torch.zeros(2)
    by_numbers = dict.fromkeys(Numbers, nothing)
    with pytest.raises(ValueError, match="step left no gradient"):
        first_reference(Known(by_numbers), ROWS, LIMIT)
    by_numbers[Numbers.AS_DRAWN] = result(3.0)
    with pytest.raises(ValueError, match="with these the gradient is zero"):
        first_reference(Known(by_numbers), ROWS, LIMIT)


def test_rounding_alone_is_refused():
    rounding = result(1e-14)
    rounding.gradients["bias"] = torch.full((2,), 1e-14)
    by_numbers = {**dict.fromkeys(Numbers, rounding), Numbers.AS_DRAWN: result(3.0)}
    with pytest.raises(ValueError, match="with these the gradient is zero"):
        first_reference(Known(by_numbers), ROWS, LIMIT)


def test_gradient_that_is_missing_is_told():
    missing = result(2.0)
    del missing.gradients["weight"]
    by_numbers = {**dict.fromkeys(Numbers, missing), Numbers.AS_DRAWN: result(3.0)}
    _, (told,) = first_reference(Known(by_numbers), ROWS, LIMIT)
    assert "the gradient of weight, which is zero" in told
