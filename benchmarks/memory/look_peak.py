"""The peak memory of a step with looks, beside one without: a process for the two.

    python -m benchmarks.memory.look_peak head

Prints a line of JSON: peaks of five steps each, in logits of one micro-batch. Needs
Linux, and malloc's variables of ``ENVIRONMENT``: each large allocation is returned at
once, so peaks are those of tensors, and not of malloc's free lists.
"""

import json
import re
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scatterpar import ScatterOnceParallel

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
}
WORDS = 50_000
WIDTH = 16
TERMS = 64  # of a micro-batch
ACCUM = 4
STEPS = 5


class Logits(nn.Module):
    """A head over all words, or an embedding and a head."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows).flatten(0, -2)


def head() -> tuple[nn.Module, Tensor]:
    """A language model's last layer, and what the layer before gives it."""
    features = torch.randn(ACCUM * TERMS, WIDTH)
    return Logits(nn.Linear(WIDTH, WORDS, bias=False)), features


def bfloat16() -> tuple[nn.Module, Tensor]:
    """The last layer in half of the memory."""
    module, features = head()
    return module.bfloat16(), features.bfloat16()


def embedding() -> tuple[nn.Module, Tensor]:
    """An embedding and the last layer, for texts of 16 words."""
    layers = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    return Logits(*layers), torch.randint(WORDS, (ACCUM * TERMS // 16, 16))


NETWORKS = {
    "head, float32": head,
    "embedding and head, float32": embedding,
    "head, bfloat16": bfloat16,
}


def criterion(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels.flatten())


def peaks_of_steps(name: str, verify: bool) -> list[float]:
    """The peak of each step, in logits of one micro-batch."""
    torch.manual_seed(0)
    module, inputs = NETWORKS[name]()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    texts = inputs.shape if inputs.dtype == torch.long else inputs.shape[:1]
    labels = torch.randint(WORDS, texts)
    itemsize = next(module.parameters()).element_size()
    logits = TERMS * WORDS * itemsize
    peaks = []
    with ScatterOnceParallel(module, ACCUM, ["cpu"], verify=verify) as engine:
        for _ in range(STEPS):
            # The kernel counts the peak anew.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            before = _bytes_of_process("VmRSS")
            engine.forward_backward(inputs, labels, criterion)
            peaks.append((_bytes_of_process("VmHWM") - before) / logits)
    return peaks


def _bytes_of_process(key: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    [kilobytes] = re.findall(rf"{key}:\s+(\d+)", status)
    return int(kilobytes) * 1024


if __name__ == "__main__":
    both = {
        "without": peaks_of_steps(sys.argv[1], verify=False),
        "with": peaks_of_steps(sys.argv[1], verify=True),
    }
    print(json.dumps(both))
