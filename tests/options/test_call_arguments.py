"""A single dict has keyword arguments and a single tuple positional ones."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from harness.oracle import build, randn
from torch import nn

from scatterpar import ScatterOnceParallel

FEATURES = 4


class Two(nn.Module):
    """Takes two tensors by name or position."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, 2)

    def forward(self, x, scale=None):
        output = self.linear(x)
        return output if scale is None else output * scale

    def twice(self, x, scale):
        return 2 * self(x, scale)


@pytest.fixture
def engine(devices):
    with ScatterOnceParallel(build(Two).eval(), 2, devices(2)) as engine:
        yield engine


X, SCALE = randn(6, FEATURES), randn(6, 1, seed=3)

WAYS = {
    "keywords": lambda engine: engine(x=X, scale=SCALE),
    "a dict": lambda engine: engine({"x": X, "scale": SCALE}),
    "a tuple": lambda engine: engine((X, SCALE)),
    "map, a dict": lambda engine: engine.map(
        lambda replica, x, scale: replica(x, scale), {"x": X, "scale": SCALE}
    ),
    "map, a tuple": lambda engine: engine.map(
        lambda replica, *rows: replica(*rows), (X, SCALE)
    ),
    "map of a method": lambda engine: engine.map(engine.module.twice, (X, SCALE)) / 2,
    "map of a partial": lambda engine: (
        engine.map(partial(engine.module.twice), {"x": X, "scale": SCALE}) / 2
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_calling_convention(engine, way):
    with torch.no_grad():
        output = WAYS[way](engine)
        expected = engine.module(X, SCALE)
    torch.testing.assert_close(output, expected)


class OfBatch(nn.Module):
    """Takes one dict, or one pair."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, 2)

    def forward(self, batch):
        x, scale = batch.values() if isinstance(batch, dict) else batch
        return self.linear(x) * scale


@pytest.mark.parametrize(
    "batch", [{"x": X, "scale": SCALE}, (X, SCALE)], ids=["a dict", "a tuple"]
)
def test_one_entry_is_the_container_itself(devices, batch):
    """A module that takes it as a whole gets its entries, unless it is in a tuple."""
    model = build(OfBatch).eval()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        with pytest.raises(TypeError, match=r"does not take .*\(inputs,\)"):
            engine(batch)
        output = engine((batch,))
        with pytest.raises(TypeError) as caught:
            engine.map(lambda replica, value: replica(value), batch)
        assert any("pass (value,)" in note for note in caught.value.__notes__)
        mapped = engine.map(lambda replica, value: replica(value), (batch,))
        with torch.no_grad():
            expected = model(batch)
    for found in (output, mapped):
        torch.testing.assert_close(found, expected)


def test_mistake_raises_the_modules_error(engine):
    with pytest.raises(TypeError, match="not take the mapping's keys x, mask"):
        engine({"x": X, "mask": SCALE})


@pytest.mark.parametrize("method", ["forward_backward", "loss", "check"])
def test_step_tells_where_keywords_go(engine, method):
    call = getattr(engine, method)
    with pytest.raises(TypeError) as raised:
        call(x=X, scale=SCALE, criterion=mean)
    text = str(raised.value)
    assert f"{method} has no argument x= and scale=, only inputs, targets" in text
    remedy = text.split("as one dict, ")[1]
    assert remedy == 'inputs={"x": x, "scale": scale}'
    inputs = {"x": X, "scale": SCALE}
    assert call(inputs=inputs, criterion=mean) is not None


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("target", "targets"),
        ("labels", "targets"),
        ("loss_fn", "criterion"),
    ],
)
def test_argument_by_another_name_is_named(engine, name, argument):
    with pytest.raises(TypeError, match=f"; use {argument}= in the place of {name}=; "):
        engine.forward_backward(X, **{name: X})


def test_keyword_of_the_module_has_no_other_name():
    class Labelled(Two):
        def forward(self, x, labels):
            return self.linear(x).sum()

    engine = ScatterOnceParallel(build(Labelled), device_ids=["cpu"])
    with engine, pytest.raises(TypeError, match="pass keyword arguments") as raised:
        engine.forward_backward(x=X, labels=X)
    assert "in the place of" not in str(raised.value)


def test_step_signature_names_arguments():
    signature = inspect.signature(ScatterOnceParallel.forward_backward)
    assert [*signature.parameters][:4] == ["self", "inputs", "targets", "criterion"]


def mean(output, _):
    return output.mean()
