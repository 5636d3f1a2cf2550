"""Checks of memory: the documented peaks, and what graphs reserve."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scatterpar import ScatterOnceParallel
from scatterpar.checkup.card.setting import Finding, Setting

_MB, _MIB = 10**6, 2**20
# In MB, from docs/on-your-cards.md: the first GPU, the first GPU if .grad is kept, the others.
_DOCUMENTED = {"first": 565, "first, .grad kept": 814, "others": 565}
_WIDTH = 1024


class _Parameters(nn.Module):
    """The parameters of GPT-2 small and next to no activations: the loss is the sum of all."""

    def __init__(self, width: int = 768, blocks: int = 12) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(50257, width), nn.Embedding(1024, width)])
        shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        self.layers = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks + 1))
        self.layers.extend(nn.Linear(*shape) for _ in range(blocks) for shape in shapes)

    def forward(self, rows: Tensor) -> Tensor:
        """A loss, 0-dim."""
        return rows.mean() * torch.stack([p.sum() for p in self.parameters()]).sum()


def peaks(setting: Setting) -> Finding:
    """The peak memory of a step that has parameters and gradients, but hardly any activations."""
    devices = setting.devices
    module = _Parameters().to(devices[0], torch.bfloat16)
    rows, found = torch.ones(len(devices), 1, dtype=torch.bfloat16), dict[str, float]()
    optimizer = torch.optim.SGD(module.parameters(), 1e-3, foreach=False)
    with ScatterOnceParallel(module, 1, devices, verify=False) as engine:
        for name in ("warm-up", "first", "first, .grad kept"):
            if "kept" not in name:
                optimizer.zero_grad()
            _start(devices)
            engine.forward_backward(rows)
            most = [torch.cuda.max_memory_allocated(device) / _MB for device in devices]
            found |= {name: most[0]} | ({"others": max(most[1:])} if name == "first" else {})
            optimizer.step()
    off = max(abs(found[name] / size - 1) for name, size in _DOCUMENTED.items())
    words = (f"{name} {found[name]:.0f} MB ({size})" for name, size in _DOCUMENTED.items())
    return Finding(off <= 0.05, ", ".join(words))


def reserved(setting: Setting) -> Finding:
    """The memory reserved with graphs, relative to that without, if 90 % of it was taken before."""
    most: list[list[float]] = []
    room = "180" if setting.small else ""
    for mode in ("eager", "graphs"):  # in two processes, since workspaces stay reserved
        names = map(str, setting.devices[:2])
        with setting.start("scatterpar.checkup.card.memory", mode, room, *names) as process:
            assert process.stdout is not None
            lines = process.stdout.read().strip().splitlines()
        if process.returncode:
            return Finding(False, f"{mode}: code {process.returncode}; {lines[-1]}")
        most.append(list(map(float, lines[-1].split())))
    ratio = max(captured / eager for eager, captured in zip(*most, strict=True))
    words = f"{max(most[1]):.0f} MiB, and {max(most[0]):.0f} MiB without graphs: {ratio:.2f}"
    return Finding(ratio <= 1.15, words)


def print_reserved(mode: str, mebibytes: str, devices: Sequence[torch.device]) -> None:
    """Take all memory except ``mebibytes``, or a tenth. Print the MiB that steps then reserve."""
    taken, room = [], 0
    for device in devices:
        free, total = torch.cuda.mem_get_info(device)
        room = int(mebibytes) * _MIB if mebibytes else total // 10
        taken.append(torch.empty(free - room, dtype=torch.uint8, device=device))
    _train_deep(devices, 2 * room // (24 * 4 * _WIDTH), mode == "graphs")
    both = zip(devices, taken, strict=True)
    print(*[(torch.cuda.max_memory_reserved(d) - t.nbytes) / _MIB for d, t in both])


class _Deep(nn.Module):
    """A module whose nine activations are most of the memory of a sub-step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, _WIDTH), nn.Linear(_WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Four logits for each row."""
        x = self.first(x)
        for _ in range(8):
            x = x.sigmoid()
        logits: Tensor = self.last(x)
        return logits


def _train_deep(devices: Sequence[torch.device], rows: int, graphs: bool) -> None:
    """Train with batches of three sizes, of at most ``rows`` for each device."""
    inputs = torch.randn(len(devices) * rows, 16)
    targets = torch.zeros(len(inputs), dtype=torch.long)
    module = _Deep().to(devices[0])
    with (
        warnings.catch_warnings(),
        ScatterOnceParallel(module, 2, devices, graphs=graphs) as engine,
    ):
        warnings.filterwarnings("error", message="graphs=True")
        for part in (1.0, 1.0, 0.97, 0.94):
            count = int(part * len(inputs))
            engine.forward_backward(inputs[:count], targets[:count], F.cross_entropy)


def _start(devices: Sequence[torch.device]) -> None:
    """Count the most memory of each device from now on."""
    for device in devices:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


if __name__ == "__main__":
    print_reserved(sys.argv[1], sys.argv[2], [torch.device(name) for name in sys.argv[3:]])
