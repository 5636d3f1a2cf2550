"""A device without streams and events, whose kernels run late: shaders, on the CPU.

``test_accelerator.py`` has the rest; these are what only such a device meets.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import scatterpar
from scatterpar import DataParallelModel, ScatterOnceParallel
from scatterpar.checkup import copies, training
from scatterpar.devices.runtime import has_streams

pytestmark = [pytest.mark.vulkan, pytest.mark.draws]
TWO = [0, 1]


def problem(*layers):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), *layers, nn.Tanh(), nn.Linear(16, 3))
    return plain, copy.deepcopy(plain).to("vulkan"), torch.randn(37, 8), torch.randint(3, (37,))


def assert_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)


def test_there_are_two_devices_without_streams():
    assert torch.accelerator.device_count() == 2
    assert not has_streams(torch.device("vulkan", 0))


def test_memory_that_runs_out_is_given_back():
    """Its allocator is none that ``torch.accelerator.empty_cache`` knows."""
    plain, model, inputs, targets = problem()

    def hungry(module, given):
        if len(given[0]) > 8:
            raise torch.OutOfMemoryError("out of memory")

    model.register_forward_pre_hook(hungry)
    with ScatterOnceParallel(model, "auto", TWO, verify=False) as engine:
        with pytest.warns(match='accum="auto"'):
            engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
        assert engine.last_step.retries
    nn.CrossEntropyLoss()(plain(inputs), targets).backward()
    assert_near([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_the_pair_on_two_devices_and_graphs_are_refused_in_words():
    model = problem()[1]
    with pytest.raises(ValueError, match="vulkan:0 has no events, which autograd needs"):
        DataParallelModel(model, TWO)
    with pytest.raises(ValueError, match="captures no graphs"):
        ScatterOnceParallel(model, 1, TWO, graphs=True)


def test_the_doctor_ends_and_finds_nothing_wrong(monkeypatch):
    """It timed as many rows as on GPUs, and copied 256 MiB: ten minutes were not enough."""
    monkeypatch.setattr(copies, "SIZES", (1000, 2**16))
    monkeypatch.setattr(training, "BUDGET", 0)
    assert scatterpar.doctor(TWO).passed
