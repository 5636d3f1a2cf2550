"""The tables of README.md: ``tests/nullcuda/run python -m nullcuda.figures counts`` or ``time``.

``counts``: what one step does on each card, and the most memory that torch's allocator gave out.
``time``: how long the host is at work in one step, on cards whose kernels take no time. This is the
bound that launching sets: a real card is kept busy only where its own time for a sub-step is longer
than the host's. Nothing computes, so losses mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from nullcuda import card, values
from scatterpar import ScatterOnceParallel

ROWS = 64  # of each card
WORKSPACE = 32 << 20  # cuBLAS's, on this generation of cards
Step = Callable[[], None]


class GPT(nn.Module):
    """Twelve layers of GPT-2's size, in torch's own blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50257, 768)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(768, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(words)).mean(1))


def network(name: str) -> nn.Module:
    """ResNet-50 has 25.6 million parameters in 161 tensors."""
    torch.manual_seed(0)
    if name == "gpt":
        return GPT().to("cuda:0")
    from torchvision.models import resnet50

    return resnet50().to("cuda:0")


def batch(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pinned, as a loader for cards gives it."""
    is_text = name == "gpt"
    inputs = torch.randint(50257, (rows, 32)) if is_text else torch.randn(rows, 3, 64, 64)
    return inputs.pin_memory(), torch.zeros(rows, dtype=torch.long).pin_memory()


def plain_loop(name: str, model: nn.Module, accum: int) -> Step:
    """The sub-steps of one card without an engine."""
    inputs, targets = batch(name, ROWS)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        model.zero_grad()
        for x, y in zip(inputs.chunk(accum), targets.chunk(accum), strict=True):
            x, y = x.to("cuda:0", non_blocking=True), y.to("cuda:0", non_blocking=True)
            (criterion(model(x), y) / accum).backward()

    return step


def engine(name: str, model: nn.Module, accum: int, cards: int) -> Step:
    """The engine on so many cards, with as many rows for each."""
    inputs, targets = batch(name, ROWS * cards)
    criterion = nn.CrossEntropyLoss()
    made = ScatterOnceParallel(model, accum, list(range(cards)), verify=False)
    few = accum * cards  # its first steps compare values: these are computed for few rows
    for _ in range(2):
        made.forward_backward(inputs[:few], targets[:few], criterion)

    def step() -> None:
        model.zero_grad()
        made.forward_backward(inputs, targets, criterion)

    return step


def print_counts(name: str, layouts: list[int], accum: int) -> None:
    """A line for each card of each layout, each layout in a process of its own."""
    print(
        "| | card | kernels | library calls | waits of the host | copies in, out, to peers |",
        end="",
    )
    print(" peak, in models |\n|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for cards in [0, *layouts]:
        arguments = ["--model", name, "--cards", str(cards), "--accum", str(accum)]
        command = [sys.executable, "-W", "ignore", "-m", "nullcuda.figures", "layout", *arguments]
        subprocess.run(command, check=True)


def print_layout(name: str, cards: int, accum: int) -> None:
    """What a later step does, after an optimizer's step; no cards: the plain loop."""
    model = network(name)
    size = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = engine(name, model, accum, cards) if cards else plain_loop(name, model, accum)
    values.remove()
    for _ in range(2):
        step()
        optimizer.step()
    optimizer.zero_grad()
    card.reset()
    devices = range(max(cards, 1))
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    step()
    for device in devices:
        c = card.counts(device)
        waits = c["stream_sync"] + c["event_sync"] + c["device_sync"]
        copies = f"{c['copy_in']}, {c['copy_out']}, {c['copy_peer']}"
        peak = (torch.cuda.max_memory_allocated(device) - WORKSPACE) / size
        what = f"engine, {cards}" if cards else "plain loop"
        print(f"| {what} | {device} | {c['launch']:,} | {c['library']:,}", end="")
        print(f" | {waits} | {copies} | {peak:.2f} |")


def print_times(name: str, cards: list[int], accums: list[int], rounds: int) -> None:
    """All layouts in turn in every round."""
    print("| sub-steps | | ms, median | times the plain loop |\n|---:|---|---:|---:|")
    layouts = {}
    for accum in accums:
        model = network(name)
        layouts[accum] = {"plain loop, 1 card": plain_loop(name, model, accum)}
        layouts[accum] |= {f"engine, {n}": engine(name, model, accum, n) for n in cards}
    values.remove()
    for accum, each in layouts.items():
        seconds: dict[str, list[float]] = {what: [] for what in each}
        for number in range(rounds + 2):
            for what, step in each.items():
                start = time.perf_counter()
                step()
                if number >= 2:  # the first steps allocate, and look around
                    seconds[what].append(time.perf_counter() - start)
        plain = next(iter(seconds.values()))
        for what, taken in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(taken, plain, strict=True))
            print(f"| {accum} | {what} | {statistics.median(taken) * 1e3:.0f} | {ratio:.2f} |")


def main() -> None:
    """Parse the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["counts", "time", "layout"])
    parser.add_argument("--model", choices=["resnet50", "gpt"], default="resnet50")
    parser.add_argument("--cards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--accum", type=int, nargs="+", default=[16])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.what == "counts":
        print_counts(options.model, options.cards, options.accum[0])
        return
    values.install()
    if options.what == "layout":
        print_layout(options.model, options.cards[0], options.accum[0])
    else:
        print_times(options.model, options.cards, options.accum, options.rounds)


if __name__ == "__main__":
    main()
