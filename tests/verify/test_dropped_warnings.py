import warnings

import pytest
import torch
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel
from scatterpar.verify.dropped_warnings import warnings_dropped

pytestmark = pytest.mark.draws


def shown(function, action="default"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        function()
    return [str(warning.message) for warning in caught]


class Warns(nn.Linear):
    def forward(self, rows):
        warnings.warn("deprecated layer", stacklevel=2)
        return super().forward(rows)


def warning_loss(output, targets):
    warnings.warn("deprecated loss", stacklevel=2)
    return nn.functional.mse_loss(output, targets)


INPUTS = torch.ones(12, 3)
TARGETS = torch.arange(24.0).view(12, 2)


def test_nothing_is_shown_or_noted():
    def code():
        for number in range(3):
            if number == 1:
                warnings.warn("once", stacklevel=1)
            else:
                with warnings_dropped():
                    warnings.warn("once", stacklevel=1)

    filters = list(warnings.filters)
    assert shown(code) == ["once"]
    assert warnings.filters == filters


@pytest.mark.parametrize("verify", [True, False])
def test_engine_shows_a_warning_once(verify):
    """It was shown after each look, 5 times in 20 steps; plain torch shows it once."""
    engine = ScatterOnceParallel(Warns(3, 2), 3, ["cpu"] * 2, verify=verify)

    def steps():
        for _ in range(9):
            engine.forward_backward(INPUTS, TARGETS, warning_loss)

    with engine:
        assert sorted(shown(steps)) == ["deprecated layer", "deprecated loss"]


def test_pair_shows_a_warning_once():
    model = DataParallelModel(nn.Linear(3, 2), ["cpu"] * 2)
    criterion = DataParallelCriterion(warning_loss)

    def calls():
        for _ in range(9):
            criterion(model(INPUTS), TARGETS)

    assert shown(calls) == ["deprecated loss"]
