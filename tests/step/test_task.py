"""How the inputs of a batch become the arguments of a module."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

from scatterpar import Rows
from scatterpar.step.task import as_call, call_inputs, criterion_lock

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
    found_args, found_kwargs = as_call(inputs)
    assert all(
        type(one) is type(other) for one, other in zip(found_args, args, strict=True)
    )
    assert found_kwargs.keys() == kwargs.keys()


def test_collated_marker_gives_arguments():
    rows = Rows([1, 2], collate=lambda entries: {"sum": sum(entries)})
    marker = call_inputs((rows,), {})
    assert marker.unwrap(copy=False) == ((), {"sum": 3})
    assert rows.collate([1, 2]) == {"sum": 3}  # the user's marker is as it was
    assert call_inputs((rows, 1), {}) == ((rows, 1), {})


def test_functions_share_lock_modules_none():
    def criterion(output, targets):
        return output.sum()

    class Loss(nn.Module):
        pass

    assert criterion_lock(nn.MSELoss()) is None
    assert criterion_lock(F.mse_loss) is None
    assert isinstance(criterion_lock(Loss()), contextlib.nullcontext)
    with criterion_lock(criterion) as is_held:
        assert is_held
