import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.step.loop_options import LoopOptions

pytestmark = pytest.mark.draws


def engine_of_a_loop():
    engine = ScatterOnceParallel(nn.Linear(2, 1), 2, ["cpu"] * 2)
    engine.loop = LoopOptions(takes_turns=True, remedies="Pass reduction= to the Loop.")
    return engine


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda engine: pickle.loads(pickle.dumps(engine))]
)
def test_copies_of_an_engine_have_defaults(copied):
    engine = copied(engine_of_a_loop())
    # The replicas are those of the copy.
    assert engine.loop == LoopOptions()
    engine.forward_backward(torch.randn(8, 2), torch.randn(8, 1), nn.MSELoss())


def test_refusal_names_remedies_of_the_loop():
    def sum_of_squares(output, _):
        return output.square().sum()

    with pytest.raises(ValueError, match=r"Pass reduction= to the Loop\. Nothing was"):
        engine_of_a_loop().forward_backward(torch.randn(8, 2), None, sum_of_squares)


def test_options_are_read_in_the_next_step():
    """They are replaced as a whole, so that no step sees a half of a change."""
    engine = engine_of_a_loop()
    with pytest.raises(dataclasses.FrozenInstanceError):
        engine.loop.is_checked = False
    engine.loop = dataclasses.replace(engine.loop, is_checked=False)
    engine.forward_backward(
        torch.randn(8, 2), None, lambda output, _: output.square().sum()
    )
