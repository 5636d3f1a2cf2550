"""The training tool beside timm's ``train.py``: accuracy and images per second.

    python -m benchmarks.feeding.accuracy_beside_timm --timm-train PATH/train.py

Both train the same network from random weights on the same pictures, with the same
optimizer, learning rates, batches, augmentation and epochs. They take turns::

    for each seed:                      the order alternates
        for both: train; accuracy = the best epoch's

Seconds are counted from the end of the first epoch to the end of the last one, with
tests, checkpoints and waiting. The pictures are PNG files of the included images.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import tempfile
from pathlib import Path

from PIL import Image

from benchmarks.environment import describe
from benchmarks.feeding.beside_timm import (
    OURS,
    START,
    THEIRS,
    Command,
    Figures,
    as_words,
    lines_of,
)
from benchmarks.tables import Publisher, Table
from benchmarks.timing import ratio
from scatterpar.train.data import TEST, TRAIN, load

NAME = "accuracy-beside-timm"
BASE_LR = 0.1  # for 256 images: timm's default
WEIGHT_DECAY = 5e-4  # the tool's default


class Epochs(Command):
    """A training program that is run to the end of its last epoch."""

    def count(self) -> int:
        """The epochs that are tested."""
        return len(self.accuracies())

    def accuracies(self) -> list[float]:
        """The accuracy of each epoch, by the tool's metrics, or timm's summary."""
        if self.name == OURS:
            records = map(json.loads, lines_of(self.out / "metrics.jsonl"))
            return [
                record["val_accuracy"]
                for record in records
                if record["kind"] == "epoch"
            ]
        rows = csv.DictReader(lines_of(self.out / NAME / "summary.csv"))
        return [float(row["eval_top1"]) / 100 for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--timm-train", type=Path, required=True, help="train.py of timm's sources"
    )
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--pictures", type=int, default=2000, help="to train on")
    parser.add_argument("--held-out", type=int, default=1000, help="to test on")
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--warmup-epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--micro-batch", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--print-only", action="store_true", help="leave the README as it is"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        write_pictures(Path(place) / "data", options.pictures, options.held_out)
        accuracies, speeds = measure(options, Path(place))
    table = table_of(options.seeds, accuracies, speeds)
    if options.print_only:
        print(table)
        return
    settings = {name: str(value) for name, value in vars(options).items()}
    del settings["timm_train"]  # a path of this machine
    data = {"options": settings, "accuracy": accuracies, "images_per_second": speeds}
    Publisher(Path(__file__).parent, describe())(NAME, table, data)


def write_pictures(folder: Path, train: int, held_out: int) -> None:
    """Write train/CLASS/ and val/CLASS/, with as many pictures of each class."""
    data = load()
    for part, name, count in ((TRAIN, "train", train), (TEST, "val", held_out)):
        pictures, rows, labels, _ = data.parts[part]
        for label, class_name in enumerate(data.class_names):
            place = folder / name / class_name.replace("/", "-")
            place.mkdir(parents=True)
            of_class = rows[labels == label][: count // len(data.class_names)]
            for row in of_class.tolist():
                picture = Image.fromarray(pictures[row, 0].numpy()).convert("RGB")
                picture.save(place / f"{row:05d}.png")


def measure(options: argparse.Namespace, place: Path) -> tuple[Figures, Figures]:
    """Best accuracy, and images per second, of both programs with each seed."""
    accuracies: Figures = {OURS: [], THEIRS: []}
    speeds: Figures = {OURS: [], THEIRS: []}
    order = [OURS, THEIRS]
    for seed in options.seeds:
        for name in order:
            out = place / f"{name.partition(' ')[0]}-{seed}"
            arguments = our_arguments if name == OURS else their_arguments
            words = arguments(options, place / "data", out, seed)
            command = Epochs(name, words, out)
            seconds, _ = command.run(options.epochs)
            accuracy = max(command.accuracies())
            speed = options.pictures * (options.epochs - 1) / seconds
            accuracies[name].append(accuracy)
            speeds[name].append(speed)
            said = f"{accuracy:.2%}, {speed:.1f} images/s"
            print(f"seed {seed}, {name}: {said}", flush=True)
        order.reverse()
    return accuracies, speeds


def our_arguments(
    options: argparse.Namespace, folder: Path, out: Path, seed: int
) -> list[str]:
    settings = {
        "--data": folder,
        "--model": f"timm:{options.model}",
        "--image-size": options.size,
        "--batch": options.batch,
        "--micro-batch-size": options.micro_batch,
        "--devices": "cpu,cpu",
        "--workers": options.workers,
        "--epochs": options.epochs,
        "--warmup-epochs": options.warmup_epochs,
        "--optimizer": "sgd",
        "--base-lr": BASE_LR,
        "--weight-decay": WEIGHT_DECAY,
        "--seed": seed,
        "--out": out,
    }
    return ["-m", "scatterpar", "train", *as_words(settings)]


def their_arguments(
    options: argparse.Namespace, folder: Path, out: Path, seed: int
) -> list[str]:
    settings = {
        "--data-dir": folder,
        "--train-split": "train",
        "--val-split": "val",
        "--num-classes": 10,
        "--model": options.model,
        "--img-size": options.size,
        "--crop-pct": 1,
        "--interpolation": "bilinear",
        "--train-interpolation": "bilinear",
        "--color-jitter": 0,
        "--batch-size": options.micro_batch,
        "--grad-accum-steps": options.batch // options.micro_batch,
        "--device": "cpu",
        "--workers": options.workers,
        "--epochs": options.epochs,
        "--warmup-epochs": options.warmup_epochs,
        "--opt": "sgd",
        "--lr-base": BASE_LR,
        "--weight-decay": WEIGHT_DECAY,
        "--smoothing": 0,
        "--seed": seed,
        "--output": out,
        "--experiment": NAME,
    }
    words = [*as_words(settings), "--sched-on-updates"]
    return ["-c", START, str(options.timm_train), *words]


def table_of(seeds: list[int], accuracies: Figures, speeds: Figures) -> Table:
    """The accuracy with each seed, its mean, and the median of the images per second."""
    rows = []
    for name in (OURS, THEIRS):
        of_seeds = [f"{accuracy:.1%}" for accuracy in accuracies[name]]
        mean = f"{statistics.mean(accuracies[name]):.1%}"
        speed = f"{statistics.median(speeds[name]):.1f}"
        rows.append([name, *of_seeds, mean, speed])
    compared = ratio(speeds[OURS], speeds[THEIRS])
    empty = [""] * (len(seeds) + 1)
    rows.append(["the first one over the second", *empty, str(compared)])
    columns = ["", *[f"seed {seed}" for seed in seeds], "mean", "images a second"]
    return Table(columns, rows)


if __name__ == "__main__":
    main()
