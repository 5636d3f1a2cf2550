"""The losses that a step returns, in loops that are written as for plain torch."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from harness.oracle import build, randn
from torch import Tensor, nn

from scatterpar import ScatterOnceParallel

X, Y = randn(8, 4), randn(8, 2, seed=1)


def network():
    return build(lambda: nn.Linear(4, 2))


def criterion(output, targets):
    return (output - targets).square().mean()


@pytest.fixture
def engine(devices):
    with ScatterOnceParallel(network(), 2, devices(2)) as engine:
        yield engine


BACKWARDS = {
    "the loss": lambda loss: loss.backward(),
    "scaled": lambda loss: torch.amp.GradScaler("cpu").scale(loss).backward(),
    "divided": lambda loss: (loss / 4).backward(),
    "with a sum": lambda loss: sum([loss, 0.5 * loss]).backward(retain_graph=True),
}


@pytest.mark.parametrize("way", BACKWARDS)
def test_backward_of_finished_loss_refused(engine, way):
    loss = engine.forward_backward(X, Y, criterion)
    before = [p.grad.clone() for p in engine.module.parameters()]
    with pytest.raises(RuntimeError, match=r"in \.grad already.*leave this line out"):
        BACKWARDS[way](loss)
    for parameter, gradient in zip(engine.module.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_finished_loss_is_used_as_a_tensor(engine):
    loss = engine.forward_backward(X, Y, criterion)
    plain = torch.tensor(loss.item(), dtype=loss.dtype)
    assert not loss.requires_grad
    assert repr(loss) == repr(plain)
    assert f"{loss:.3f}" == f"{plain:.3f}"
    assert type(loss.detach()) is Tensor
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    assert type(torch.load(file)["loss"]) is Tensor
    for value in (copy.deepcopy(loss), torch.stack([loss, loss])[0], loss.cpu()):
        assert torch.equal(value, plain)
    weight = next(engine.module.parameters())
    weight.grad = None
    (loss + weight.sum()).backward()  # of the second term alone
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_unused_loss_is_told_at_optimizers_step(engine):
    optimizer = torch.optim.SGD(engine.module.parameters(), 0.1)
    engine.loss(X, Y, criterion)
    with pytest.warns(UserWarning, match=r"without the gradient of the latest") as told:
        optimizer.step()
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # once


def test_lag_of_a_scheduler_does_not_hide_the_line(engine):
    optimizer = torch.optim.AdamW(engine.module.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine.loss(X, Y, criterion)
    with pytest.warns(UserWarning, match=r"without the gradient of the latest") as told:
        optimizer.step()
    scheduler.step()
    assert [warning.filename for warning in told] == [__file__]


def test_used_and_other_losses_are_silent(engine):
    module = engine.module
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    other = torch.optim.SGD(network().parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.loss(X, Y, criterion)  # dropped, and computed again
        loss = engine.loss(X, Y, criterion)
        other.step()  # of another network
        (loss / 2).backward()
        optimizer.step()
        loss = engine.loss(X, Y, criterion)
        torch.autograd.grad(loss, list(module.parameters()))
        optimizer.step()
        with torch.no_grad():
            engine.loss(X, Y, criterion)
        optimizer.step()


def test_collected_engine_is_not_watched():
    module = network()
    engine = ScatterOnceParallel(module, 2, ["cpu"] * 2)
    engine.loss(X, Y, criterion)
    engine.close()
    del engine, module
    torch.optim.SGD(network().parameters(), 0.1).step()


def test_several_unused_losses_are_told_each(engine):
    """Each watch took its hook off while torch called the hooks: the step failed with
    "OrderedDict mutated during iteration".
    """
    with ScatterOnceParallel(network(), 2, ["cpu"] * 2) as second:
        optimizer = torch.optim.SGD(engine.module.parameters(), 0.1)
        engine.loss(X, Y, criterion)
        second.loss(X, Y, criterion)
        with pytest.warns(UserWarning, match="without the gradient of the latest"):
            optimizer.step()
        optimizer.step()
