"""What an optimizer updates in the place of parameters, and what comes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from scatterpar.stand_ins import stand_in_for, stepping_on


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.ones(shape, dtype=dtype))


def test_attributes_and_state_come_back():
    trained, other = parameter(2), parameter(2)
    optimizer = optim.SGD([trained, other], lr=0.1, momentum=0.9)
    group = optimizer.param_groups[0]
    stand_in = stand_in_for(trained, trained.detach().clone())
    trained.grad = stand_in.grad = torch.ones(2)
    trained.label = "before"
    with stepping_on(optimizer, {trained: stand_in}):
        optimizer.step()
        optimizer.param_groups[0]["seen"] = 3
        stand_in.label = "after"
        assert all(p is not trained for p in optimizer.param_groups[0]["params"])
    assert optimizer.param_groups == [group]
    assert group["params"][0] is trained
    assert (group["seen"], trained.label) == (3, "after")
    assert list(optimizer.state) == [trained]
    assert torch.equal(trained, torch.ones(2))
    assert not torch.equal(stand_in, trained)


def test_failed_step_leaves_state_and_attributes():
    trained = parameter(2)
    optimizer = optim.SGD([trained], lr=0.1, momentum=0.9)
    state = optimizer.state
    stand_in = stand_in_for(trained, trained.detach().clone())
    stand_in.grad = torch.ones(2)

    def fail():
        with stepping_on(optimizer, {trained: stand_in}):
            optimizer.step()
            stand_in.label = "after"
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert optimizer.state is state
    assert optimizer.param_groups[0]["params"] == [trained]
    assert not vars(trained)
