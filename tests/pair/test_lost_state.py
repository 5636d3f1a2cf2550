"""What calls of the pair leave behind: which names are told, and how often."""

from __future__ import annotations

import warnings

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of, linear
from harness.oracle import randn

from scatterpar import DataParallelModel

INPUTS = randn(9, FEATURES)


def told(model, calls=4):
    """The warnings of some calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            model(INPUTS)
    return [str(one.message) for one in caught if "docs/limits.md" in str(one.message)]


def test_counter_told_once_and_a_mask_never(devices):
    def forward(m, inputs):
        m.calls += 1
        m.mask = torch.ones(CLASSES)
        return m.linear(inputs) * m.mask

    module = Of(forward, linear=linear())
    module.calls, module.mask = 0, None
    (text,) = told(DataParallelModel(module, devices(3)))
    assert "forward sets the attribute 'calls', in copies" in text
    assert (module.calls, module.mask) == (0, None)


def test_graphs_and_late_values_told_by_name(devices):
    def forward(m, inputs):
        m.hidden = m.linear(inputs)
        m.late = inputs.mean(0)
        return m.hidden

    module = Of(forward, linear=linear())
    module.hidden = module.late = None
    (text,) = told(DataParallelModel(module, devices(3)))
    assert "'hidden'" in text
    assert "'late'" in text


@pytest.mark.parametrize("keeps_tensors", [True, False])
def test_tensors_that_a_hook_leaves_are_told(devices, keeps_tensors):
    """A log of numbers is none of the criterion's business."""
    log = []
    module = Of(lambda m, inputs: m.linear(inputs), linear=linear())
    module.linear.register_forward_hook(
        lambda *of: log.append(of[2] if keeps_tensors else float(of[2].sum()))
    )
    texts = told(DataParallelModel(module, devices(3)), calls=1)
    assert len(texts) == keeps_tensors
    assert all("a hook leaves tensors behind in log" in text for text in texts)


@pytest.mark.parametrize(("first", "is_told"), [(3, False), (4, True)])
def test_calls_one_two_four_are_looked_at(first, is_told):
    calls = []

    def forward(m, inputs):
        calls.append(1)
        m.calls += len(calls) == first
        return m.linear(inputs)

    module = Of(forward, linear=linear())
    module.calls = 0
    assert bool(told(DataParallelModel(module, ["cpu"]))) == is_told
