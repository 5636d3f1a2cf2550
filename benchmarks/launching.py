"""The tables of tests/nullcuda/README.md, printed on a CUDA without a card.

    tests/nullcuda/run python -m benchmarks.launching counts        (or: time, call)

``counts``: kernels, library calls, waits and copies of one step on each card, and the
most memory that torch's allocator gave out. ``time``: how long the host is at work in
one step, on cards whose kernels and copies take no time::

    for each round:
        plain loop      for each micro-batch: (criterion(model(x), y) / accum).backward()
        DDP             the same, all except the last under no_sync()
        engine          engine.forward_backward(inputs, targets, criterion)

This is the bound that launching sets: a real card is busy all the time only if its own
time for a sub-step is longer than the host's. Nothing computes, so losses mean nothing.
DDP is one process with one card: it fills its buckets, and exchanges nothing.

``call``: when each replica of ``engine(inputs)`` and of ``nn.DataParallel`` launches its
forward and its backward pass, from the beginning of the call. Other threads launch at
the same time, but only one of them runs Python.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from nullcuda import card, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.timing import timed
from scatterpar import ScatterOnceParallel

ROWS = 64  # of each card
WORKSPACE = 32 << 20  # cuBLAS's, on this generation of cards
_WARM_UPS = 2  # the first steps allocate memory and look at the module
_EVENTS = (
    "forward begins",
    "forward ends",
    "backward begins",
    "backward ends",
    "all is done",
)
# When something happened last, on which card: not the module's, so that replicas share it.
_TIMES: dict[tuple[int, str], float] = {}
Step = Callable[[], None]


class GPT(nn.Module):
    """Twelve layers in torch's own blocks; launching costs the same at any width."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1024, 192)
        layer = nn.TransformerEncoderLayer(192, 12, 768, 0.0, "gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(192, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.words(words))
        return self.head(hidden.mean(1))


def network(name: str) -> nn.Module:
    """The model on the first card. ResNet-50 has 25.6 million parameters in 161 tensors."""
    torch.manual_seed(0)
    if name == "gpt":
        return GPT().to("cuda:0")
    from torchvision.models import resnet50

    return resnet50().to("cuda:0")


def batch(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets in pinned memory, as a loader for cards gives them."""
    if name == "gpt":
        inputs = torch.randint(1024, (rows, 32))
    else:
        inputs = torch.randn(rows, 3, 64, 64)
    targets = torch.zeros(rows, dtype=torch.long)
    return inputs.pin_memory(), targets.pin_memory()


def plain_loop(name: str, model: nn.Module, accum: int) -> Step:
    """The sub-steps of one card without an engine. DDP reduces in the last one alone."""
    inputs, targets = batch(name, ROWS)
    criterion = nn.CrossEntropyLoss()
    is_ddp = isinstance(model, DistributedDataParallel)

    def step() -> None:
        model.zero_grad()
        pairs = zip(inputs.chunk(accum), targets.chunk(accum), strict=True)
        for number, (x, y) in enumerate(pairs, 1):
            x = x.to("cuda:0", non_blocking=True)
            y = y.to("cuda:0", non_blocking=True)
            is_silent = is_ddp and number < accum
            with model.no_sync() if is_silent else contextlib.nullcontext():
                (criterion(model(x), y) / accum).backward()

    return step


def ddp(model: nn.Module) -> nn.Module:
    """The module as one process of DistributedDataParallel has it, without exchange."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel = DistributedDataParallel(model, device_ids=[0])

    def exchange(_, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    parallel.register_comm_hook(None, exchange)
    return parallel


def engine(
    name: str, model: nn.Module, accum: int, cards: int, *, graphs: bool = False
) -> Step:
    """The engine on several cards, with as many rows for each as the plain loop has."""
    inputs, targets = batch(name, ROWS * cards)
    criterion = nn.CrossEntropyLoss()
    parallel = ScatterOnceParallel(
        model, accum, list(range(cards)), verify=False, graphs=graphs
    )
    # Its first steps compare values. These are computed here, so rows are few.
    for _ in range(2):
        parallel.forward_backward(inputs[:cards], targets[:cards], criterion)

    def step() -> None:
        model.zero_grad()
        parallel.forward_backward(inputs, targets, criterion)

    return step


def in_a_process(lines: str, name: str, *options: object) -> list[str]:
    """The command that prints some lines of a table, in a process of its own."""
    program = [sys.executable, "-W", "ignore", "-m", "benchmarks.launching"]
    return [*program, lines, "--model", name, *map(str, options)]


def print_counts(name: str, layouts: list[int], accum: int) -> None:
    """A line for each card of each layout, each layout in a process of its own."""
    columns = "card | kernels | library calls | waits of the host"
    columns += " | copies in, out, to peers | peak, in models"
    print(f"| | {columns} |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for cards in (0, *layouts):  # without cards: the plain loop
        options = "--cards", cards, "--accum", accum
        subprocess.run(in_a_process("layout", name, *options), check=True)


def print_layout(name: str, cards: int, accum: int) -> None:
    """The counts of a step after an optimizer's step. No cards: the plain loop."""
    model = network(name)
    size = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if cards:
        title = f"engine, {cards}"
        step = engine(name, model, accum, cards)
    else:
        title = "plain loop"
        step = plain_loop(name, model, accum)
    # Parameters of another version are sent. Others are compared, and the answer of a
    # kernel that does not run is that they were written unseen: then each step reads them.
    optimizer.step()
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
        counts = card.counts(device)
        waits = counts["stream_sync"] + counts["event_sync"] + counts["device_sync"]
        copies = f"{counts['copy_in']}, {counts['copy_out']}, {counts['copy_peer']}"
        peak = (torch.cuda.max_memory_allocated(device) - WORKSPACE) / size
        calls = f"{counts['launch']:,} | {counts['library']:,}"
        print(f"| {title} | {device} | {calls} | {waits} | {copies} | {peak:.2f} |")


def print_times(
    names: list[str], cards: list[int], accums: list[int], rounds: int
) -> None:
    """A line for each model and number of sub-steps, each in a process of its own."""
    load = f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores"
    print(f"{load}, torch {torch.__version__}; ms\n")
    columns = ["sub-steps", "plain loop, 1 card", "DDP, 1 card"]
    columns += [f"engine, {number}" for number in cards]
    columns += [f"graphs, {number}" for number in cards]
    print(f"| | {' | '.join(columns)} |")
    print("|---|" + "---:|" * len(columns), flush=True)
    environment = os.environ | {"NULLCUDA_DEVICES": str(max(4, *cards))}
    for name in names:
        for accum in accums:
            options = "--accum", accum, "--rounds", rounds, "--cards", *cards
            command = in_a_process("line", name, *options)
            subprocess.run(command, env=environment, check=True)


def print_line(name: str, cards: list[int], accum: int, rounds: int) -> None:
    """Medians of all layouts, in turn in every round, and ratios to the plain loop."""
    model = network(name)
    steps = [
        plain_loop(name, model, accum),
        plain_loop(name, ddp(network(name)), accum),
    ]
    steps += [engine(name, model, accum, number) for number in cards]
    steps += [engine(name, model, accum, number, graphs=True) for number in cards]
    values.remove()
    seconds: list[list[float]] = [[] for _ in steps]
    for number in range(_WARM_UPS + rounds):
        for step, times in zip(steps, seconds, strict=True):
            spent = timed(step)
            if number >= _WARM_UPS:
                times.append(spent)
    plain = seconds[0]
    cells = [f"{_median_ms(plain):.0f}"]
    for times in seconds[1:]:
        cells.append(f"{_median_ms(times):.0f} ({_ratio(times, plain):.2f})")
    print(f"| {name} | {accum} | {' | '.join(cells)} |", flush=True)


class Noted(nn.Module):
    """A network that notes when the passes of each of its replicas begin and end."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        next(network.children()).register_forward_hook(_note_end_of_backward)

    def forward(self, inputs: Tensor) -> Tensor:
        _note("forward begins", inputs)
        output: Tensor = self.network(inputs)
        output.register_hook(functools.partial(_note, "backward begins"))
        _note("forward ends", output)
        return output


def _note_end_of_backward(_: nn.Module, __: object, output: Tensor) -> None:
    output.register_hook(functools.partial(_note, "backward ends"))


def _note(event: str, tensor: Tensor) -> None:
    _TIMES[tensor.get_device(), event] = time.perf_counter()


def print_call(name: str, cards: int, rounds: int) -> None:
    """When passes of replicas begin and end, in ms from the call, medians of rounds."""
    inputs, targets = batch(name, ROWS * cards)
    targets = targets.to("cuda:0")
    criterion = nn.CrossEntropyLoss()
    device_ids = list(range(cards))
    model = Noted(network(name))
    called = ScatterOnceParallel(model, device_ids=device_ids, verify=False)
    parallel = nn.DataParallel(Noted(network(name)), device_ids)
    modules: dict[str, nn.Module] = {"nn.DataParallel": parallel, "engine(x)": called}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def end_step() -> None:
        """Take the last call of an accumulation, and the optimizer's step."""
        criterion(called(inputs), targets).backward()
        optimizer.step()

    end_step()
    values.remove()
    found: dict[tuple[str, int, str], list[float]] = collections.defaultdict(list)
    for number in range(_WARM_UPS + rounds):
        for title, module in modules.items():
            _TIMES.clear()
            start = time.perf_counter()
            with called.no_sync():
                criterion(module(inputs), targets).backward()
            _TIMES[0, "all is done"] = time.perf_counter()
            if number >= _WARM_UPS:
                for (device, event), moment in _TIMES.items():
                    found[title, device, event].append(moment - start)
        end_step()
    print(f"| {name} | GPU | {' | '.join(_EVENTS)} |")
    print("|---|" + "---:|" * (1 + len(_EVENTS)))
    for title in modules:
        for device in device_ids:
            cells = []
            for event in _EVENTS:
                moments = found[title, device, event]
                cells.append(f"{_median_ms(moments):.1f}" if moments else "")
            print(f"| {title} | {device} | {' | '.join(cells)} |")


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


def _ratio(times: Sequence[float], plain: Sequence[float]) -> float:
    """The median of the ratios, round by round."""
    return statistics.median(a / b for a, b in zip(times, plain, strict=True))


def main() -> None:
    """Parse the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", choices=["counts", "time", "call", "layout", "line"])
    parser.add_argument("--model", choices=["resnet50", "gpt"], nargs="+")
    parser.add_argument("--cards", type=int, nargs="+")
    parser.add_argument("--accum", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.lines == "time":
        models = options.model or ["resnet50", "gpt"]
        cards = options.cards or [1, 2, 4, 8]
        print_times(models, cards, options.accum or [1, 4, 16], options.rounds)
        return
    (model,) = options.model or ["resnet50"]
    (accum,) = options.accum or [16]
    cards = options.cards or [1, 2, 4]
    if options.lines == "counts":
        print_counts(model, cards, accum)
        return
    values.install()
    if options.lines == "call":
        print_call(model, cards[-1], options.rounds)
        return
    # The other two are processes that print lines.
    if options.lines == "layout":
        print_layout(model, cards[0], accum)
    else:
        print_line(model, cards, accum, options.rounds)


if __name__ == "__main__":
    main()
