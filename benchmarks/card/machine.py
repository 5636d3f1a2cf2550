"""Copies, one exact step, the documented memory, and how steps end that fail on all
devices.
"""

import contextlib
import os
import signal
import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.card.networks import Network
from benchmarks.ranks import run_alone
from scatterpar import ScatterOnceParallel
from scatterpar.checkup.copies import examine
from scatterpar.checkup.training import take_step
from scatterpar.devices.device_ids import physical

_PEAK = 565  # MB of each GPU, from docs/gpus.md


def test_every_byte_of_all_copies_arrives(setting, say):
    """Copies between every two memories, of 1000 bytes to 256 MiB, and between all GPUs
    at once.
    """
    results = list(examine(setting.devices))
    wrong = [str(route).strip() for route in results if route.fault]
    assert not wrong, "; ".join(wrong)
    slowest = min(route.gigabytes_per_second for route in results)
    say(f"{len(results)} routes, the slowest {slowest:.1f} GB/s")


def test_gradient_on_all_devices_is_that_of_one(setting, say):
    step = take_step(setting.devices)
    assert step.is_exact, step.words
    say(step.words)


class _Sum(nn.Module):
    """The parameters of a network and next to no activations: the loss is the sum of
    all.
    """

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, rows):
        return rows.mean() * torch.stack([p.sum() for p in self.net.parameters()]).sum()


@pytest.mark.cuda
@pytest.mark.needs(2)
def test_peak_of_memory_with_the_parameters_of_gpt2(setting, say):
    # of cuBLAS
    before = [torch.cuda.memory_allocated(device) for device in setting.devices]
    module = _Sum(Network("GPT-2", setting._replace(small=False)).build()).bfloat16()
    rows = torch.ones(len(setting.devices), 1, dtype=torch.bfloat16)
    module.to(setting.devices[0])
    with ScatterOnceParallel(module, 1, setting.devices, verify=False) as engine:
        for _ in range(2):  # the first step checks the links
            module.zero_grad()
            for device in setting.devices:
                torch.cuda.reset_peak_memory_stats(device)
            engine.forward_backward(rows)
    most = [torch.cuda.max_memory_allocated(device) for device in setting.devices]
    peaks = [(peak - other) / 1e6 for peak, other in zip(most, before, strict=True)]
    words = f"{min(peaks):.0f} to {max(peaks):.0f} MB, documented are {_PEAK}"
    assert max(abs(peak / _PEAK - 1) for peak in peaks) <= 0.05, words
    say(words)


def _problem(devices):
    torch.manual_seed(0)
    rows, layers = (
        8 * len(devices),
        (nn.Embedding(8, 64), nn.Flatten(), nn.Linear(256, 4)),
    )
    batch = torch.arange(4 * rows).view(rows, 4) % 8, torch.arange(rows) % 4
    return nn.Sequential(*layers).to(physical(devices[0])), batch


def _out_of_memory(devices):
    total = min(
        torch.cuda.get_device_properties(device).total_memory for device in devices
    )
    net, batch = _problem(devices)

    def take_a_quarter_for_each_row(module, args):
        torch.empty(total // 4 * len(args[0]), dtype=torch.uint8, device=args[0].device)

    net.register_forward_pre_hook(take_a_quarter_for_each_row)
    with (
        pytest.raises(torch.OutOfMemoryError),
        ScatterOnceParallel(net, 1, devices) as engine,
    ):
        engine.forward_backward(*batch, cross_entropy)
    with ScatterOnceParallel(net, "auto", devices) as engine:
        engine.forward_backward(*batch, cross_entropy)
        return (
            f"raised; {len(engine.last_step.plan.shares[0].micro_batches)} "
            "sub-steps fit"
        )


def _assertion(devices):
    net, (words, targets) = _problem(devices)
    with ScatterOnceParallel(net, 4, devices, verify=False) as engine:
        engine.forward_backward(words, targets, cross_entropy)
        words[-1, -1] = 10**6  # the kernel of the last device
        with pytest.raises(RuntimeError) as raised:
            engine.forward_backward(words, targets, cross_entropy)
    return f"{raised.typename}: {str(raised.value).splitlines()[0]}"


def _interrupt(devices):
    net, batch = _problem(devices)
    # nohup's jobs may ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ScatterOnceParallel(net, 4, devices) as engine:
        engine.forward_backward(*batch, cross_entropy)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                engine.forward_backward(*batch, cross_entropy)
        engine.forward_backward(*batch, cross_entropy)
    return "KeyboardInterrupt"


_OUT_OF_MEMORY = pytest.param(
    _out_of_memory, marks=pytest.mark.cuda, id="out of memory"
)
_ASSERTION = pytest.param(_assertion, marks=pytest.mark.gpu, id="assertion in a kernel")
_INTERRUPT = pytest.param(_interrupt, id="interrupt")


@pytest.mark.parametrize("failing", [_OUT_OF_MEMORY, _ASSERTION, _INTERRUPT])
def test_failure_on_all_devices_is_raised(setting, say, failing):
    say(run_alone(failing, setting.devices, under=setting.under))
