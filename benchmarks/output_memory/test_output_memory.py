"""Outputs that stay home: peak bytes on the master, against gathering before the loss."""

import torch
from torch import nn

from benchmarks.output_memory.owned_bytes import metered
from benchmarks.per_call import Gather
from benchmarks.tables import Table
from scatterpar import DataParallelCriterion, DataParallelModel
from scatterpar.devices.runtime import resolve
from scatterpar.devices.transfers import Transfers

REPLICAS = (1, 2, 4, 8)
WORDS, TOKENS, SAMPLES = 40_000, 250, 32  # 1.28 GB of float32
FACTOR = 20
HIDDEN = 32


def test_output_memory(benchmark, publish, quick):
    words, tokens = (200, 25) if quick else (WORDS // 10, TOKENS // 2)
    found = benchmark.pedantic(measure, args=(words, tokens), rounds=1)
    rows = [
        [
            replicas,
            _mb(peaks["gathered"]),
            _mb(peaks["pair"]),
            f"{peaks['gathered'] / peaks['pair']:.2f}",
        ]
        for replicas, peaks in found.items()
    ]
    columns = ["replicas", "gather, then loss", "the pair", "ratio"]
    data = {"words": words, "tokens": tokens, "samples": SAMPLES, "peak_bytes_on_the_master": found}
    publish("peaks", Table(columns, rows), data, draw(found))
    if not quick:
        assert FACTOR * words * tokens == WORDS * TOKENS
        for replicas, peaks in found.items():
            assert peaks["gathered"] > 0.9 * replicas * peaks["pair"]


def measure(words, tokens):
    """Peak bytes in the master's memory, by number of replicas and by contender."""
    return {replicas: peaks_of(replicas, words, tokens) for replicas in REPLICAS}


def peaks_of(replicas, words, tokens):
    """Both ways over the same head and batch, and the same gradient from both."""
    devices = resolve([f"cpu:{i}" for i in range(replicas)])
    inputs = torch.randn(SAMPLES, tokens, HIDDEN)
    targets = torch.randint(words, (SAMPLES, tokens))
    gradients, peaks = {}, {}
    for name, step in {"gathered": gathered, "pair": pair}.items():
        torch.manual_seed(0)
        head = Head(words)
        with metered(devices[0]) as memories:
            step(head, devices, inputs, targets)
            peaks[name] = memories.peak[devices[0]]
        gradients[name] = head.linear.weight.grad
    torch.testing.assert_close(gradients["pair"], gradients["gathered"], rtol=1e-4, atol=1e-7)
    return peaks


class Head(nn.Module):
    """From hidden states to a score for every word, the words in dimension 1."""

    def __init__(self, words):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, words, bias=False)

    def forward(self, hidden):
        return self.linear(hidden).transpose(1, 2)


def pair(head, devices, inputs, targets):
    """Each loss next to its output."""
    model = DataParallelModel(head, devices)
    outputs = model(inputs)
    loss = DataParallelCriterion(nn.CrossEntropyLoss(), devices)(outputs, targets)
    loss.backward()


def gathered(head, devices, inputs, targets):
    """All outputs on the master, as ``nn.DataParallel`` brings them there, and one loss."""
    outputs = DataParallelModel(head, devices)(inputs)
    scores = outputs[0] if len(devices) == 1 else Gather.apply(Transfers(), devices, *outputs)
    nn.CrossEntropyLoss()(scores, targets).backward()


def _mb(size):
    return f"{size / 1e6:.1f} MB"


def draw(found):
    """Two bars for each number of replicas."""

    def on(axes):
        places = range(len(found))
        for offset, (name, label) in enumerate(
            [("gathered", "gather, then loss"), ("pair", "the pair")]
        ):
            heights = [peaks[name] / 1e6 for peaks in found.values()]
            bars = axes.bar([x + 0.4 * offset - 0.2 for x in places], heights, 0.4, label=label)
            axes.bar_label(bars, fmt="%.0f")
        axes.set_xticks(list(places), [str(replicas) for replicas in found])
        axes.set_xlabel("replicas")
        axes.set_ylabel("peak bytes in the master's memory, MB")
        axes.set_ylim(0, 1.2 * max(peaks["gathered"] for peaks in found.values()) / 1e6)
        axes.legend(loc="upper center", ncols=2)

    return on
