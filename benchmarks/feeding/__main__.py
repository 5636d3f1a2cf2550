"""Do pictures come as fast as they are used? On a folder of pictures.

    python -m benchmarks.feeding FOLDER [--workers 2] [--batch 1024] [--rounds 3]

Seconds per batch::

    reading     images, labels = next batch of the workers
    step        engine.forward_backward(images, labels, criterion)
    together    for images, labels in the workers' batches: step(images, labels)

The step is once the engine's, on this machine's devices, and once a wait as long as
reading a batch takes: an accelerator, which leaves the processor to the workers.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.timing import timed
from scatterpar import ScatterOnceParallel
from scatterpar.train.command_line import Options
from scatterpar.train.data import TRAIN, BatchRequest, Source, open_data
from scatterpar.train.feed import Feed
from scatterpar.train.models import build_model
from scatterpar.train.training import choose_devices

Step = Callable[[Tensor, Tensor], object]
Times = tuple[float, float, float]  # of reading, of the step, of both together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="cnn")
    options = parser.parse_args()
    source = open_data(Options(data=options.folder))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(source.parts[TRAIN].rows), generator=generator)
    batches = list(rows.split(options.batch))[: options.batches]
    devices = choose_devices(())
    classes = len(source.class_names)
    model = build_model(options.model, source.image_shape, classes).to(
        torch.device(devices[0])
    )
    criterion = nn.CrossEntropyLoss()
    with ScatterOnceParallel(model, accum=4, device_ids=devices) as engine:

        def compute(images: Tensor, labels: Tensor) -> None:
            engine.forward_backward(images, labels, criterion)
            model.zero_grad()

        rounds = []
        for _ in range(options.rounds):
            rounds.append(run_round(source, batches, options.workers, compute))
    sizes = f"batches of {options.batch}, {options.workers} workers"
    print(f"{source}; {sizes}, {len(devices)} devices")
    print_table(rounds)


def print_table(rounds: list[dict[str, Times]]) -> None:
    """Medians over the rounds, a line for each kind of step."""
    columns = f"{'reading':>10}{'step':>10}{'together':>10}{'/ slower':>10}"
    print(f"{'':24}{columns}   seconds a batch")
    for name in rounds[0]:
        times = [result[name] for result in rounds]
        reading, step, together = map(statistics.median, zip(*times, strict=True))
        ratio = together / max(reading, step)
        print(f"{name:24}{reading:10.3f}{step:10.3f}{together:10.3f}{ratio:10.2f}")


def run_round(
    source: Source, batches: list[Tensor], workers: int, compute: Step
) -> dict[str, Times]:
    """Seconds per batch, for each kind of step."""
    reading = seconds_per_batch(source, batches, workers, None)
    images, labels = next(read(source, batches[:1], 0))
    compute(images, labels)  # the first step also prepares what later ones use

    def compute_all() -> None:
        for _ in batches:
            compute(images, labels)

    def wait(images: Tensor, labels: Tensor) -> None:
        time.sleep(reading)

    computing = timed(compute_all) / len(batches)
    with_engine = seconds_per_batch(source, batches, workers, compute)
    with_wait = seconds_per_batch(source, batches, workers, wait)
    return {
        "the engine": (reading, computing, with_engine),
        "a wait as long": (reading, reading, with_wait),
    }


def seconds_per_batch(
    source: Source, batches: list[Tensor], workers: int, step: Step | None
) -> float:
    """Of all batches except the first, which waits for the workers to start."""
    start = 0.0
    for number, (images, labels) in enumerate(read(source, batches, workers)):
        if number == 0:
            start = time.perf_counter()
        elif step is not None:
            step(images, labels)
    return (time.perf_counter() - start) / (len(batches) - 1)


def read(
    source: Source, batches: list[Tensor], workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels of each batch of rows, read by worker processes."""
    requests = [BatchRequest(TRAIN, rows) for rows in batches]
    options = dataclasses.replace(source.options, workers=workers)
    with Feed(dataclasses.replace(source, options=options), requests) as feed:
        for _ in batches:
            _, batch = feed.take()
            yield batch.images, batch.labels


if __name__ == "__main__":
    main()
