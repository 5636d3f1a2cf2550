"""What does one step take on each card? Memory, messages and waits.

``python -m benchmarks.many_cards.count resnet101 4`` (see ``process.py``) prints the
counts of three steps::

    first     builds the replicas
    later     after optimizer.step() and optimizer.zero_grad()
    kept      after optimizer.step(); adds to gradients that are there
"""

from typing import Any

import torch
from simulated import NAME, control
from torch import Tensor, nn

from benchmarks.many_cards import process
from benchmarks.models import ResNet101Tree
from scatterpar import ScatterOnceParallel


class Bare(nn.Module):
    """The parameters and buffers of a module, with next to no activations.

    The loss is the sum of all parameters, or nearly. Each parameter gets a gradient as
    large as itself, and each buffer is written.
    """

    def __init__(self, tree: nn.Module) -> None:
        super().__init__()
        self.tree = tree

    def forward(self, rows: Tensor) -> Tensor:
        """A loss, 0-dim."""
        with torch.no_grad():
            for buffer in self.buffers():
                buffer.add_(1)
        sums = [parameter.sum() for parameter in self.parameters()]
        return rows.mean() * torch.stack(sums).sum()


def gpt2(
    width: int = 768, blocks: int = 12, words: int = 50257, positions: int = 1024
) -> nn.Module:
    """The parameters of GPT-2 small, its output tied to its embedding."""

    def block() -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    net = nn.Sequential(nn.Embedding(words, width), nn.Embedding(positions, width))
    for _ in range(blocks):
        net.append(block())
    net.append(nn.LayerNorm(width))
    return net


def small() -> nn.Module:
    """As many tensors as ResNet-101 has, and small ones."""
    return ResNet101Tree(4)


MODELS = {
    "resnet101": (ResNet101Tree, torch.float32),
    "gpt2": (gpt2, torch.bfloat16),
    "small": (small, torch.float32),
}


def count(name: str, devices: int) -> dict[str, Any]:
    """The counts by step, and the bytes of all parameters."""
    build, dtype = MODELS[name]
    model = Bare(build().to(dtype)).to(f"{NAME}:0")
    rows = torch.ones(devices, 1, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, foreach=False)
    size = sum(parameter.nbytes for parameter in model.parameters())
    counts: dict[str, Any] = {"parameters": size}
    with ScatterOnceParallel(model, 1, range(devices), verify=False) as engine:
        for step in ("first", "later", "kept"):
            if step != "kept":
                optimizer.zero_grad()
            counts[step] = _counted(engine, rows)
            optimizer.step()
    return counts


def _counted(engine: ScatterOnceParallel, rows: Tensor) -> dict[str, Any]:
    """Take a step. Returns its peaks, messages, bytes and waits."""
    devices = len(engine.device_ids)
    process.reset_peaks(devices)
    before = control.counters()
    engine.forward_backward(rows)
    difference = control.counters() - before
    report = engine.last_step
    assert report is not None
    peaks = process.peaks(devices)
    return {
        "master": peaks[0],
        "others": max(peaks[1:]),
        "messages": report.messages,
        "bytes": report.bytes,
        **vars(difference),
    }


if __name__ == "__main__":
    process.main(count)
