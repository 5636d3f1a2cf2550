"""The tables of tests/nullcuda/README.md, printed on a CUDA without a card.

    tests/nullcuda/run python -m benchmarks.launching counts        (or: time)

``counts``: what one step does on each card, and the most memory that torch's allocator
gave out. ``time``: how long the host is at work in one step, on cards whose kernels and
copies take no time. This is the bound that launching sets: a real card is kept busy
only where its own time for a sub-step is longer than the host's. Nothing computes, so
losses mean nothing. DDP is one process with one card; the exchange is left out, and its
buckets are not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from nullcuda import card, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scatterpar import ScatterOnceParallel

ROWS = 64  # of each card
WORKSPACE = 32 << 20  # cuBLAS's, on this generation of cards
Step = Callable[[], None]


class GPT(nn.Module):
    """Twelve layers in torch's own blocks; narrow, since launching costs the same at
    any width.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1024, 192)
        layer = nn.TransformerEncoderLayer(192, 12, 768, 0.0, "gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(192, 4)

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
    inputs = (
        torch.randint(1024, (rows, 32)) if is_text else torch.randn(rows, 3, 64, 64)
    )
    return inputs.pin_memory(), torch.zeros(rows, dtype=torch.long).pin_memory()


def plain_loop(name: str, model: nn.Module, accum: int) -> Step:
    """The sub-steps of one card without an engine; of DDP all but the last without a
    reduction.
    """
    inputs, targets = batch(name, ROWS)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        model.zero_grad()
        pairs = zip(inputs.chunk(accum), targets.chunk(accum), strict=True)
        for number, (x, y) in enumerate(pairs, 1):
            x, y = x.to("cuda:0", non_blocking=True), y.to("cuda:0", non_blocking=True)
            silent = isinstance(model, DistributedDataParallel) and number < accum
            with model.no_sync() if silent else contextlib.nullcontext():
                (criterion(model(x), y) / accum).backward()

    return step


def ddp(model: nn.Module) -> nn.Module:
    """The module as one process of DistributedDataParallel has it, but for the
    exchange.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = DistributedDataParallel(model, device_ids=[0])

    def exchange(_, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    made.register_comm_hook(None, exchange)
    return made


def engine(
    name: str, model: nn.Module, accum: int, cards: int, *, graphs: bool = False
) -> Step:
    """The engine on so many cards, with as many rows for each."""
    inputs, targets = batch(name, ROWS * cards)
    criterion = nn.CrossEntropyLoss()
    made = ScatterOnceParallel(
        model, accum, list(range(cards)), verify=False, graphs=graphs
    )
    # its first steps compare values: these are computed for few rows
    for _ in range(2):
        made.forward_backward(inputs[:cards], targets[:cards], criterion)

    def step() -> None:
        model.zero_grad()
        made.forward_backward(inputs, targets, criterion)

    return step


def print_counts(name: str, layouts: list[int], accum: int) -> None:
    """A line for each card of each layout, each layout in a process of its own."""
    print(
        "| | card | kernels | library calls | waits of the host | copies in, out, to "
        "peers |",
        end="",
    )
    print(" peak, in models |\n|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for cards in [0, *layouts]:
        arguments = ["--model", name, "--cards", str(cards), "--accum", str(accum)]
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks.launching",
            "layout",
            *arguments,
        ]
        subprocess.run([*command, *arguments], check=True)


def print_layout(name: str, cards: int, accum: int) -> None:
    """What a later step does, after an optimizer's step; no cards: the plain loop."""
    model = network(name)
    size = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = (
        engine(name, model, accum, cards) if cards else plain_loop(name, model, accum)
    )
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


def print_times(
    names: list[str], cards: list[int], accums: list[int], rounds: int
) -> None:
    """A line for each model and number of sub-steps, each in a process of its own."""
    print(
        f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}; ms\n"
    )
    print("| | sub-steps | plain loop, 1 card | DDP, 1 card |", end="")
    print(
        "".join(f" engine, {n} |" for n in cards)
        + "".join(f" graphs, {n} |" for n in cards)
    )
    print("|---|---:|---:|---:|" + "---:|" * 2 * len(cards), flush=True)
    for name in names:
        for accum in accums:
            arguments = [
                "--model",
                name,
                "--accum",
                str(accum),
                "--rounds",
                str(rounds),
            ]
            arguments += ["--cards", *map(str, cards)]
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "benchmarks.launching",
                "line",
            ]
            variables = os.environ | {"NULLCUDA_DEVICES": str(max(4, *cards))}
            subprocess.run([*command, *arguments], env=variables, check=True)


def print_line(name: str, cards: list[int], accum: int, rounds: int) -> None:
    """Medians of all layouts, in turn in every round, and their ratios to the plain
    loop.
    """
    model = network(name)
    steps = [
        plain_loop(name, model, accum),
        plain_loop(name, ddp(network(name)), accum),
    ]
    steps += [engine(name, model, accum, n) for n in cards]
    steps += [engine(name, model, accum, n, graphs=True) for n in cards]
    values.remove()
    seconds: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + 2):
        for step, taken in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            step()
            if number >= 2:  # the first steps allocate, and look around
                taken.append(time.perf_counter() - start)
    print(f"| {name} | {accum} | {statistics.median(seconds[0]) * 1e3:.0f}", end="")
    for taken in seconds[1:]:
        ratio = statistics.median(a / b for a, b in zip(taken, seconds[0], strict=True))
        print(f" | {statistics.median(taken) * 1e3:.0f} ({ratio:.2f})", end="")
    print(" |", flush=True)


def main() -> None:
    """Parse the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["counts", "time", "layout", "line"])
    parser.add_argument("--model", choices=["resnet50", "gpt"], nargs="+")
    parser.add_argument("--cards", type=int, nargs="+")
    parser.add_argument("--accum", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    models, cards = options.model or ["resnet50"], options.cards or [1, 2, 4]
    accums = options.accum or [16]
    if options.what == "counts":
        print_counts(models[0], cards, accums[0])
    elif options.what == "time":
        models, cards = (
            options.model or ["resnet50", "gpt"],
            options.cards or [1, 2, 4, 8],
        )
        print_times(models, cards, options.accum or [1, 4, 16], options.rounds)
    else:
        values.install()
        if options.what == "layout":
            print_layout(models[0], cards[0], accums[0])
        else:
            print_line(models[0], cards, accums[0], options.rounds)


if __name__ == "__main__":
    main()
