"""How the inputs of a batch become the arguments of a module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

from scatterpar import Rows
from scatterpar.step.task import (
    arguments_from_inputs,
    inputs_from_arguments,
    is_of_torch,
    is_shared,
)

IDS = torch.ones(2, 3)
PACKED = pack_sequence([torch.ones(2)])


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        (IDS, (IDS,), {}),
        ((IDS, 2), (IDS, 2), {}),
        ({"ids": IDS}, (), {"ids": IDS}),
        ([IDS], ([IDS],), {}),
        (PACKED, (PACKED,), {}),
    ],
)
def test_tuples_by_position_mappings_by_name(inputs, args, kwargs):
    found_args, found_kwargs = arguments_from_inputs(inputs)
    assert all(
        type(one) is type(other) for one, other in zip(found_args, args, strict=True)
    )
    assert found_kwargs.keys() == kwargs.keys()


def test_collated_marker_gives_arguments():
    rows = Rows([1, 2], collate=lambda entries: {"sum": sum(entries)})
    marker = inputs_from_arguments((rows,), {})
    assert marker.unwrap(copy=False) == ((), {"sum": 3})
    assert rows.collate([1, 2]) == {"sum": 3}  # the user's marker is as it was
    assert inputs_from_arguments((rows, 1), {}) == ((rows, 1), {})


def test_replicas_share_functions_alone():
    def criterion(output, targets):
        return output.sum()

    class Loss(nn.Module):
        pass

    assert is_of_torch(nn.MSELoss())
    assert is_of_torch(F.mse_loss)
    assert is_of_torch(None)
    assert not is_of_torch(Loss())
    assert is_shared(criterion)
    assert not any(map(is_shared, [None, Loss(), nn.MSELoss(), F.mse_loss]))
