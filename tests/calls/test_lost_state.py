"""State that replicas leave otherwise: which names are told, and how often."""

import warnings

import pytest
import torch
from harness.models import FEATURES, Of, linear
from harness.oracle import assert_close, randn

from scatterpar import DataParallelModel

INPUTS = randn(9, FEATURES)


def told(model, calls=4):
    """The warnings of some calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            model(INPUTS)
    return [str(one.message) for one in caught if "docs/limits.md" in str(one.message)]


def test_counter_is_followed_and_not_told(devices):
    def forward(m, inputs):
        m.calls += 1
        return m.linear(inputs) * m.calls

    module = Of(forward, linear=linear(), calls=0)
    model = DataParallelModel(module, devices(3))
    assert told(model) == []
    assert module.calls == 4
    outputs = [output.detach() for output in model(INPUTS)]
    assert_close(torch.cat(outputs), module.linear(INPUTS).detach() * 5, "output")


def test_mean_over_rows_told_once_by_name(devices):
    def forward(m, inputs):
        m.hidden = m.linear(inputs).detach()  # joined
        m.late = inputs.mean(0)
        return m.linear(inputs)

    module = Of(forward, linear=linear(), hidden=None, late=None)
    (text,) = told(DataParallelModel(module, devices(3)))
    assert "forward sets the attribute 'late' otherwise on each replica" in text
    assert_close(module.hidden, module.linear(INPUTS).detach(), "hidden")


@pytest.mark.parametrize("keeps_tensors", [True, False])
def test_object_that_a_hook_fills_is_told(devices, keeps_tensors):
    class Log:
        last = None

    log = Log()

    def keep(module, args, output):
        log.last = output if keeps_tensors else float(output.detach().sum())

    module = Of(lambda m, inputs: m.linear(inputs), linear=linear())
    module.linear.register_forward_hook(keep)
    texts = told(DataParallelModel(module, devices(3)), calls=1)
    assert len(texts) == keeps_tensors
    assert all("a hook leaves tensors behind in log" in text for text in texts)


@pytest.mark.parametrize(("first", "is_told"), [(3, False), (4, True)])
def test_calls_one_two_four_are_asked(first, is_told):
    calls = []

    def forward(m, inputs):
        calls.append(1)
        if len(calls) > 2 * (first - 1):
            m.late = inputs.mean(0)
        return m.linear(inputs)

    module = Of(forward, linear=linear(), late=torch.zeros(FEATURES))
    model = DataParallelModel(module, ["cpu"] * 2)
    assert bool(told(model, first)) == is_told
