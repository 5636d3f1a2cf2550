"""State that replicas leave otherwise: which names are told, and how often."""

import copy
import warnings

import pytest
import torch
from harness.models import FEATURES, Of, linear
from harness.oracle import assert_close, randn

from scatterpar import DataParallelModel, ScatterOnceParallel

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
    assert "forward sets the attribute 'late' to another value on each replica" in text
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


class Objects:
    """In the place of ``forward``: keeps a table of the first call."""

    def __init__(self, forward):
        self.forward = forward
        self.table = None

    def __call__(self, inputs):
        if self.table is None:
            self.table = torch.linspace(0, 1, inputs.size(1), dtype=inputs.dtype)
        return self.forward(inputs * self.table)


def by_length(m, inputs):
    """A table of positions."""
    if m.table is None:
        m.table = torch.linspace(0, 1, inputs.size(1), dtype=inputs.dtype)
    return m.linear(inputs * m.table)


def by_rows(m, inputs):
    """A mask for each row of the batch."""
    if m.table is None:
        m.table = torch.linspace(0, 1, len(inputs), dtype=inputs.dtype)[:, None]
    return m.linear(inputs * m.table[: len(inputs)])


def by_first_batch(m, inputs):
    """Statistics of the first batch."""
    if m.table is None:
        m.table = inputs.mean(0)
    return m.linear(inputs - m.table)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (by_length, ""),
        (by_rows, "other outputs for a few rows"),
        (by_first_batch, "forward sets the attribute 'table' to another"),
        ("an object", "leaves tensors behind in forward.table"),
    ],
)
def test_forward_that_caches_is_right_or_told(devices, forward, words):
    """The rows of the first call decide what later ones compute."""
    is_object = forward == "an object"
    module = Of(by_length if is_object else forward, linear=linear(), table=None)
    if is_object:
        module.forward = Objects(module.linear)
    plain = copy.deepcopy(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ScatterOnceParallel(module, device_ids=devices(2)) as engine:
            outputs = [engine(INPUTS + shift).detach() for shift in range(3)]
    expected = [plain(INPUTS + shift).detach() for shift in range(3)]
    texts = [str(warning.message) for warning in caught]
    if not words:
        assert texts == []
    if not words or is_object:
        assert_close(torch.cat(outputs), torch.cat(expected), "outputs")
    assert any(words in text for text in texts) or not words
