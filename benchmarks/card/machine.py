"""The machine: its devices, the cost of a launch and a copy, one exact step, memory."""

import time
from statistics import median

import torch
from torch import nn

from benchmarks.card.networks import Network
from benchmarks.card.page import FAILED
from scatterpar import ScatterOnceParallel
from scatterpar.checkup.copies import examine
from scatterpar.checkup.doctor import describe, load_per_core
from scatterpar.checkup.small_step import take_step

_PEAK = 565  # MB of each GPU, from docs/gpus.md
_LAUNCHES = 2000
_READS = 200


def devices(setting, say):
    """The name of each GPU."""
    for device in setting.devices:
        facts = torch.cuda.get_device_properties(device)
        words = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"
        words += f", {facts.multi_processor_count} multiprocessors"
        say(f"{words}, compute capability {facts.major}.{facts.minor}", str(device))


def launches(setting, say):
    """What the host pays for a launch, a GPU for a small kernel, and the host for a number."""
    device = setting.devices[0]
    number = torch.zeros(1, device=device)
    for _ in range(_LAUNCHES):  # the clocks of the GPU go up
        number.add_(1)
    torch.cuda.synchronize(device)
    launched = []
    done = []
    read = []
    for _ in range(setting.rounds(7, least=3)):
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            number.add_(1)
        launched.append(time.perf_counter() - start)
        torch.cuda.synchronize(device)
        done.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(_READS):
            number.item()
        read.append(time.perf_counter() - start)
    host = 1e6 * median(launched) / _LAUNCHES
    kernel = 1e6 * median(done) / _LAUNCHES
    item = 1e6 * median(read) / _READS
    words = f"a launch takes the host {host:.1f} µs, launch and kernel {kernel:.1f} µs"
    say(f"{words}, .item() {item:.1f} µs")


def copies(setting, say):
    """Copies between every two memories, of 1000 bytes to 256 MiB, and between all GPUs at once."""
    for route in examine(setting.devices):
        words = f"{route.gigabytes_per_second:.1f} GB/s"
        part = f"{route.source} to {route.target}"
        if route.fault:
            say(f"{words}; {route.fault}", part, FAILED)
        else:
            say(f"{words}, every byte arrived", part)


def step(setting, say):
    """One exact step on all devices."""
    result = take_step(setting.devices)
    assert result.is_exact, result.words
    say(result.words)


class _Sum(nn.Module):
    """A network's parameters, with next to no activations: the loss is their sum."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, rows):
        sums = [parameter.sum() for parameter in self.net.parameters()]
        return rows.mean() * torch.stack(sums).sum()


def peak(setting, say):
    """The memory of GPT-2's parameters, in a step after the first one."""
    devices = setting.devices
    workspaces = [torch.cuda.memory_allocated(device) for device in devices]  # cuBLAS's
    net = Network("GPT-2", setting._replace(small=False)).build()
    module = _Sum(net).bfloat16().to(devices[0])
    rows = torch.ones(len(devices), 1, dtype=torch.bfloat16)
    with ScatterOnceParallel(module, 1, devices, verify=False) as engine:
        for _ in range(2):  # the first step checks the links
            module.zero_grad()
            for device in devices:
                torch.cuda.reset_peak_memory_stats(device)
            engine.forward_backward(rows)
    peaks = []
    for device, workspace in zip(devices, workspaces, strict=True):
        most = torch.cuda.max_memory_allocated(device)
        peaks.append((most - workspace) / 1e6)
    lowest = min(peaks)
    highest = max(peaks)
    words = f"{lowest:.0f} to {highest:.0f} MB, documented are {_PEAK}"
    assert lowest / _PEAK >= 0.95, words
    assert highest / _PEAK <= 1.05, words
    say(words)


def environment(setting, say):
    """All that torch tells of the machine."""
    file = setting.folder / "environment.txt"
    facts = describe(load_per_core())
    text = "".join(f"{name}: {value}\n" for name, value in facts.items())
    file.write_text(text, encoding="utf-8")
    say(f"written to {file.name}, in the folder beside this page")
