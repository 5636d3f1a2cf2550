"""What one step takes on each device of the simulated accelerator, in a process of its
own.

``SIMULATED_ACCELERATOR=…/accelerator.so python -m benchmarks.many_cards.count resnet101
4`` prints one line of JSON; ``tests`` must be importable.
"""

import json
import sys
from typing import Any

import torch
from simulated import NAME, control, load_built
from torch import Tensor, nn

from benchmarks.models import ResNet101Tree
from scatterpar import ScatterOnceParallel


class Bare(nn.Module):
    """Somebody's parameters and buffers; the loss is the sum of all parameters, or
    nearly.

    Each parameter gets a gradient as large as itself, each buffer is written, and there
    is no activation to speak of.
    """

    def __init__(self, tree: nn.Module) -> None:
        super().__init__()
        self.tree = tree

    def forward(self, rows: Tensor) -> Tensor:
        """A loss, 0-dim."""
        with torch.no_grad():
            for buffer in self.buffers():
                buffer.add_(1)
        return rows.mean() * torch.stack([p.sum() for p in self.parameters()]).sum()


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

    tables = [nn.Embedding(words, width), nn.Embedding(positions, width)]
    return nn.Sequential(
        *tables, *[block() for _ in range(blocks)], nn.LayerNorm(width)
    )


MODELS = {
    "resnet101": (ResNet101Tree, torch.float32),
    "gpt2": (gpt2, torch.bfloat16),
    "small": (lambda: ResNet101Tree(4), torch.float32),
}


def count(name: str, devices: int) -> dict[str, Any]:
    """Peaks, messages and waits of a step: the first, and later ones with and without
    ``.grad``.
    """
    build, dtype = MODELS[name]
    model = Bare(build().to(dtype)).to(f"{NAME}:0")
    rows = torch.ones(devices, 1, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, foreach=False)
    size = sum(parameter.nbytes for parameter in model.parameters())
    found: dict[str, Any] = {"parameters": size}
    with ScatterOnceParallel(model, 1, range(devices), verify=False) as engine:
        for step in ("first", "later", "kept"):
            if step != "kept":
                optimizer.zero_grad()
            found[step] = _counted(engine, rows, devices)
            optimizer.step()
    return found


def _counted(engine: ScatterOnceParallel, rows: Tensor, devices: int) -> dict[str, Any]:
    for index in range(devices):
        torch.accelerator.synchronize(index)
        torch.accelerator.reset_peak_memory_stats(index)
    before = control.counters()
    engine.forward_backward(rows)
    happened = control.counters() - before
    report = engine.last_step
    assert report is not None
    peaks = [torch.accelerator.max_memory_allocated(index) for index in range(devices)]
    return {
        "master": peaks[0],
        "others": max(peaks[1:]),
        "messages": report.messages,
        "bytes": report.bytes,
        **vars(happened),
    }


if __name__ == "__main__":
    load_built()
    torch.set_num_threads(1)
    print(json.dumps(count(sys.argv[1], int(sys.argv[2]))))
