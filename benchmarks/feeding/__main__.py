"""Reading pictures alone, computing alone, and both together, on a folder of pictures.

    python -m benchmarks.feeding FOLDER [--workers 2] [--batch 1024] [--rounds 3]

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

from scatterpar import ScatterOnceParallel
from scatterpar.train.data import BatchRequest, Source, open_data
from scatterpar.train.feed import Feed
from scatterpar.train.folders import TRAIN
from scatterpar.train.models import build_model
from scatterpar.train.options import Options
from scatterpar.train.training import choose_devices

Step = Callable[[Tensor, Tensor], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="cnn")
    given = parser.parse_args()
    source = open_data(Options(data=given.folder))
    rows = torch.randperm(len(source.train), generator=torch.Generator().manual_seed(0))
    batches = list(rows.split(given.batch))[: given.batches]
    devices = choose_devices(None)
    model = build_model(given.model, source.image_shape, len(source.class_names)).to(
        devices[0]
    )
    with ScatterOnceParallel(model, accum=4, device_ids=devices) as engine:
        criterion = nn.CrossEntropyLoss()

        def compute(images: Tensor, labels: Tensor) -> None:
            engine.forward_backward(images, labels, criterion)
            model.zero_grad()

        rounds = [
            one_round(source, batches, given.workers, compute)
            for _ in range(given.rounds)
        ]
    print(
        f"{source}; batches of {given.batch}, {given.workers} workers, {len(devices)} "
        "devices"
    )
    print(
        f"{'':24}{'reading':>10}{'step':>10}{'together':>10}{'/ slower':>10}   "
        "seconds a batch"
    )
    for name in rounds[0]:
        reading, step, both = (
            statistics.median(entry[name][i] for entry in rounds) for i in range(3)
        )
        ratio = both / max(reading, step)
        print(f"{name:24}{reading:10.3f}{step:10.3f}{both:10.3f}{ratio:10.2f}")


def one_round(
    source: Source, batches: list[Tensor], workers: int, compute: Step
) -> dict[str, tuple[float, float, float]]:
    """Seconds a batch of reading, of the step, and of both, for each kind of step."""
    reading = timed(source, batches, workers, None)
    (images, labels) = next(read(source, batches[:1], 0))
    compute(images, labels)  # the first step also prepares what later ones use
    start = time.perf_counter()
    for _ in batches:
        compute(images, labels)
    computing = (time.perf_counter() - start) / len(batches)

    def wait(images: Tensor, labels: Tensor) -> None:
        time.sleep(reading)

    return {
        "the engine": (reading, computing, timed(source, batches, workers, compute)),
        "a wait as long": (reading, reading, timed(source, batches, workers, wait)),
    }


def timed(
    source: Source, batches: list[Tensor], workers: int, step: Step | None
) -> float:
    """Seconds a batch, from the second one on: the first waits for the workers to
    start.
    """
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
    requests = [BatchRequest(TRAIN, rows) for rows in batches]
    options = dataclasses.replace(source.options, workers=workers)
    with Feed(dataclasses.replace(source, options=options), requests) as feed:
        for _ in batches:
            _, found = feed.take()
            yield found.images, found.labels


if __name__ == "__main__":
    main()
