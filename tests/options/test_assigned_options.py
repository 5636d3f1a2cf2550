"""Options that are set after an engine was made: they hold, or are refused at once."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from harness.models import CLASSES, FEATURES, linear
from harness.oracle import assert_step, randn
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

ROWS, VALUES = randn(12, FEATURES), randn(12, CLASSES, seed=3)
LOSS = nn.MSELoss()


def engine_with(**options):
    return ScatterOnceParallel(linear(), device_ids=["cpu"] * 2, **options)


# By option: values that the constructor refuses.
INVALID = [
    ("accum", 0),
    ("accum", 1.5),
    ("accum", True),
    ("accum", "all"),
    ("micro_batch_size", 0),
    ("micro_batch_size", [3]),
    ("dim", "rows"),
    ("shares", (0, 0)),
    ("shares", [1]),
    ("shares", 2),
    ("graphs", "yes"),
    ("verify", "no"),
    ("check_finite", 3),
]


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_invalid_option_refused_on_assignment(name, value):
    with pytest.raises((TypeError, ValueError)) as constructed:
        engine_with(**{name: value})
    engine = engine_with()
    before = getattr(engine, name)
    with pytest.raises(constructed.type) as assigned:
        setattr(engine, name, value)
    assert str(assigned.value) == str(constructed.value)
    assert getattr(engine, name) == before
    assert_step(engine, ROWS, VALUES, LOSS)


def test_accum_beside_micro_batch_refused():
    engine = engine_with(micro_batch_size=4)
    with pytest.raises(ValueError, match="accum=2 and micro_batch_size=4"):
        engine.accum = 2
    engine.micro_batch_size = None
    engine.accum = 2
    assert_step(engine, ROWS, VALUES, LOSS)


def cut(engine):
    return [len(share.micro_batches) for share in engine.last_step.plan.shares]


def test_option_holds_from_next_step():
    engine = engine_with()
    for name, value, expected in (
        ("accum", 3, [3, 3]),
        ("shares", [3, 1], [5, 2]),
        ("accum", 1, [2, 1]),
        ("micro_batch_size", 2, [5, 2]),
        ("shares", None, [3, 3]),
        ("micro_batch_size", None, [1, 1]),
        ("accum", "auto", [1, 1]),
        ("verify", False, [1, 1]),
    ):
        setattr(engine, name, value)
        assert_step(engine, ROWS, VALUES, LOSS)
        assert cut(engine) == expected, name
    assert engine.shares == (1.0, 1.0)
    assert copy.deepcopy(engine).accum == "auto"


def added_up(output, targets):
    return (output - targets).square().sum()


def test_verify_switches_looks_on_and_off():
    engine = engine_with(accum=2)
    with pytest.raises(ValueError, match="sum"):
        engine.forward_backward(ROWS, VALUES, added_up)
    engine.verify = False
    engine.forward_backward(ROWS, VALUES, added_up)
    engine.verify = True
    with pytest.raises(ValueError, match="sum"):
        engine.forward_backward(ROWS, VALUES, added_up)


def test_check_finite_and_dim_hold_next_step():
    engine = engine_with()
    engine.check_finite = True
    with pytest.raises(FloatingPointError):
        engine.forward_backward(ROWS * torch.nan, VALUES, LOSS)
    engine.check_finite = False
    engine.dim = 1
    with pytest.raises(ValueError, match="dim=1"):
        engine.forward_backward(ROWS, VALUES, LOSS)


FIXED = {
    "device_ids": ["cpu"],
    "buffer_policy": "batch",
    "accumulate_dtype": torch.float64,
    "process_group": object(),
    "buffers": "batch",
    "compile": True,
}


@pytest.mark.parametrize("name", FIXED)
def test_constructor_options_cannot_be_set(name):
    engine = engine_with()
    with pytest.raises(AttributeError, match=r"cannot be set.*another engine, with"):
        setattr(engine, name, FIXED[name])
    assert [name for name, _ in engine.named_buffers()] == []
    assert list(engine.buffers()) == []
    assert_step(engine, ROWS, VALUES, LOSS)


def test_every_option_is_settable_or_refused():
    engine = engine_with()
    options = inspect.signature(ScatterOnceParallel).parameters.keys() - {"module"}
    for name in options - FIXED.keys():
        setattr(engine, name, getattr(engine, name))
    assert_step(engine, ROWS, VALUES, LOSS)
