"""What the machine has, what a launch and a copy cost, one exact step, and the documented memory."""

import time
from statistics import median

import torch
from torch import nn

from benchmarks.card.networks import Network
from benchmarks.card.page import FAILED
from scatterpar import ScatterOnceParallel
from scatterpar.checkup.copies import examine
from scatterpar.checkup.doctor import describe, load_per_core
from scatterpar.checkup.training import take_step

_PEAK = 565  # MB of each GPU, from docs/gpus.md
_LAUNCHES = 2000


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
    host, both, reads = [], [], []
    for _ in range(setting.rounds(7, least=3)):
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            number.add_(1)
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize(device)
        both.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(_LAUNCHES // 10):
            number.item()
        reads.append(time.perf_counter() - start)
    microseconds = 1e6 / _LAUNCHES
    say(
        f"a launch takes the host {median(host) * microseconds:.1f} µs, launch and kernel "
        f"{median(both) * microseconds:.1f} µs, .item() {median(reads) * microseconds * 10:.1f} µs"
    )


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
    found = take_step(setting.devices)
    assert found.is_exact, found.words
    say(found.words)


class _Sum(nn.Module):
    """The parameters of a network and next to no activations: the loss is the sum of all."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, rows):
        return rows.mean() * torch.stack([p.sum() for p in self.net.parameters()]).sum()


def peak(setting, say):
    """The memory of GPT-2's parameters, in a step after the first one."""
    before = [
        torch.cuda.memory_allocated(device) for device in setting.devices
    ]  # of cuBLAS
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


def environment(setting, say):
    """All that torch tells of the machine."""
    file = setting.folder / "environment.txt"
    facts = describe(load_per_core())
    text = "".join(f"{name}: {value}\n" for name, value in facts.items())
    file.write_text(text, encoding="utf-8")
    say(f"written to {file.name}, in the folder beside this page")
