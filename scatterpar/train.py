"""Train a network on images, in large batches, with all devices of this machine.

    python -m scatterpar train                                   the included images
    python -m scatterpar train --data photos --model resnet18 --pretrained
    python -m scatterpar train --data hfds/food101 --model resnet50 --amp-dtype bfloat16
    python -m scatterpar train --resume runs/a                   continue this run

A run writes into a folder: metrics.jsonl (a line per epoch), curves.png, best.pt (the
weights of the best epoch) and checkpoint.pt (of the last epoch, for --resume). Ctrl-C
ends it after the present step. All networks except cnn, all optimizers except sgd, and
the reading of picture files are timm's.
"""

# From top to bottom: a run, its options, its images, its network and optimizer. The
# engine is built in `Run.__init__`, trains in `Run._train_epoch`, and computes scores
# in `Run._evaluate`.
#
# The order of the images, their augmentation, and the random numbers of a step depend
# on the seed, the epoch, and the place in the epoch. Nothing else decides them, so a
# resumed run computes the same bits.
#
# A picture is an image in a file, which timm reads. The included images are in memory.

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from scatterpar import ScatterOnceParallel, embedded
from scatterpar.recipe import gradual_warmup, linear_scaled_lr, weight_decay_groups

EMBEDDED = "embedded"
CHECKPOINT = "checkpoint.pt"
# Drawing takes half a second. After shorter epochs the curves wait for the end.
SECONDS_OF_A_LONG_EPOCH = 10.0


class UsageError(Exception):
    """An argument or a file is wrong. The message is one line."""


class Stopped(Exception):
    """A signal ended the run. Its argument is the signal's number."""


def main(arguments: Sequence[str]) -> int:
    """Train as the command line says. Returns the exit code."""
    try:
        options, checkpoint = read_options(arguments)
        run = Run(options, checkpoint)
        with run.engine:
            run.train()
    except UsageError as error:
        print(f"scatterpar train: error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"diverged: {error}; a lower --lr-base may help", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"stopped after {run.epochs_done} epochs", file=sys.stderr)
        if run.epochs_done:
            command = f"python -m scatterpar train --resume {run.folder}"
            print(f"this goes on from there: {command}", file=sys.stderr)
        return 128 + int(stopped.args[0])
    return 0


class Run:
    """A training run: data, network, optimizer, engine, and the figures so far.

    Attributes:
        folder: where the run writes its files.
        engine: computes gradients and scores, on all devices.
        records: the figures, a dictionary per completed epoch.
        signals: the numbers of the signals that `train` has received.
        bar: the progress bar of `train`, which counts images.

    Args:
        options: the values of the command line.
        checkpoint: what the run has saved, if it is resumed.
    """

    def __init__(
        self, options: argparse.Namespace, checkpoint: dict[str, Any] | None = None
    ) -> None:
        self.options = options
        self.folder = Path(options.output)
        self.data = open_data(options)
        self.train_batches = ImageBatches(self.data.train, options, is_shuffled=True)
        self.test_batches = ImageBatches(self.data.test, options, is_shuffled=False)
        torch.manual_seed(seed_of("run", options.seed))
        self.network = build_network(options, self.data)
        self.optimizer, self.scheduler = build_optimizer(
            options, self.network, self.train_batches
        )
        model = WithNormalisation(self.network, self.data.mean, self.data.std)
        self.engine = build_engine(options, model)
        self.criterion = nn.CrossEntropyLoss()  # a module: `train` adds a hook
        device_type = self.engine.device_ids[0].type
        self.autocast, self.scaler = mixed_precision(options.amp_dtype, device_type)
        # Saved, and compared if the run is resumed.
        num_images = [self.train_batches.num_images, self.test_batches.num_images]
        self.must_match: dict[str, Any] = {
            "classes": self.data.classes,
            "images": num_images,
        }
        # Saved, and loaded if the run is resumed.
        self.stateful: dict[str, Any] = {
            "network": self.network,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }
        self.records: list[dict[str, float]] = []
        if checkpoint is not None:
            self._load(checkpoint)
        make_folder(self.folder)

    @property
    def epochs_done(self) -> int:
        """The number of completed epochs."""
        return len(self.records)

    def train(self) -> None:
        """Train until the last epoch, and draw the curves. Raises `Stopped`."""
        images = self.train_batches.num_images
        print(
            f"writing to {self.folder}: {images:,} images to train on, "
            f"{self.test_batches.num_images:,} to test on, "
            f"{len(self.data.classes)} classes"
        )
        # How devices and sub-steps divide the largest batch.
        print(self.engine.plan(math.ceil(self.train_batches.mean_size)))
        with (
            deferred_signals() as self.signals,
            # Without a terminal there is no bar.
            tqdm(total=self.options.epochs * images, disable=None) as self.bar,
        ):
            # The engine calls the criterion in each sub-step, and a step may take long:
            # the bar moves in between.
            def move_bar(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
                scores = inputs[0]
                self.bar.update(len(scores))

            self.criterion.register_forward_hook(move_bar)
            try:
                while self.epochs_done < self.options.epochs:
                    self._run_epoch()
            except RuntimeError:
                # The loader raises if a signal to all processes ended its workers.
                self._stop_if_asked()
                raise
            finally:
                self._draw()
        best = max(self.records, key=lambda record: record["accuracy"])
        print(f"best epoch {best['epoch']}: accuracy {best['accuracy']:.2%}")

    def _run_epoch(self) -> None:
        """Train for an epoch, test, and write the files."""
        start = time.perf_counter()
        rate = self.optimizer.param_groups[0]["lr"]
        train_loss = self._train_epoch()
        train_seconds = time.perf_counter() - start
        images_per_second = self.train_batches.num_images / train_seconds
        test_loss, accuracy = self._evaluate()
        best_so_far = max((record["accuracy"] for record in self.records), default=-1.0)
        self.records.append(
            {
                "epoch": self.epochs_done + 1,
                "train_loss": train_loss,
                "test_loss": test_loss,
                "accuracy": accuracy,
                "learning_rate": rate,
                "images_per_second": images_per_second,
            }
        )
        if accuracy > best_so_far:
            self._save_best()
        # A run that ends before this line repeats the epoch if it is resumed.
        self._save_checkpoint()
        with atomic_file(self.folder / "metrics.jsonl") as file:
            for record in self.records:
                file.write(json.dumps(record).encode() + b"\n")
        tqdm.write(
            f"epoch {self.epochs_done}/{self.options.epochs}: loss {train_loss:.4f}, "
            f"test loss {test_loss:.4f}, accuracy {accuracy:.2%}, "
            f"{images_per_second:,.0f} images/s"
        )
        if time.perf_counter() - start > SECONDS_OF_A_LONG_EPOCH:
            self._draw()

    def _train_epoch(self) -> float:
        """Train on each image once. Returns the mean loss."""
        self.engine.train()
        epoch = self.epochs_done  # counted from 0
        images_done = 0
        loss_sum = 0.0
        for images, labels in self.train_batches.of_epoch(epoch):
            # Dropout draws the same numbers in a resumed run.
            seed = seed_of("step", self.options.seed, epoch, images_done)
            torch.manual_seed(seed)
            self.optimizer.zero_grad()
            with self.autocast:
                loss = self.engine.forward_backward(
                    images, labels, self.criterion, scaler=self.scaler
                )
            self.scaler.step(self.optimizer)  # optimizer.step(), if the scaler is off
            self.scaler.update()
            self.scheduler.step()
            images_done += len(labels)
            loss_sum += float(loss) * len(labels)
            # Correct the bar: the engine's check before a step has moved it, too.
            done = epoch * self.train_batches.num_images + images_done
            self.bar.update(done - self.bar.n)
            self.bar.set_postfix(epoch=epoch + 1, loss=f"{float(loss):.4f}")
            self._stop_if_asked()
        return loss_sum / images_done

    @torch.no_grad()
    def _evaluate(self) -> tuple[float, float]:
        """Returns the mean loss and the accuracy on the test images."""
        self.engine.eval()
        loss_sum = 0.0
        num_correct = 0
        for images, labels in self.test_batches.of_epoch(0):  # all epochs are alike
            with self.autocast:
                scores = self.engine(images).float().cpu()
            loss_sum += float(cross_entropy(scores, labels, reduction="sum"))
            num_correct += int((scores.argmax(1) == labels).sum())
            self._stop_if_asked()
        num_images = self.test_batches.num_images
        return loss_sum / num_images, num_correct / num_images

    def _stop_if_asked(self) -> None:
        """Raise `Stopped` if a signal was received."""
        if self.signals:
            raise Stopped(self.signals[0])

    def _save_best(self) -> None:
        """Write the weights as timm reads them: without `WithNormalisation`."""
        weights = self.network.state_dict()
        with atomic_file(self.folder / "best.pt") as file:
            torch.save({"state_dict": weights, "classes": self.data.classes}, file)

    def _save_checkpoint(self) -> None:
        checkpoint = {"options": vars(self.options), "records": self.records}
        checkpoint |= self.must_match
        for name, part in self.stateful.items():
            checkpoint[name] = part.state_dict()
        with atomic_file(self.folder / CHECKPOINT) as file:
            torch.save(checkpoint, file)

    def _load(self, checkpoint: dict[str, Any]) -> None:
        for name, value in self.must_match.items():
            if checkpoint[name] != value:
                raise UsageError(
                    f"--data {self.options.data}: its {name} differ from the run "
                    f"in {self.folder}; pass the data of that run, or start a new run"
                )
        for name, part in self.stateful.items():
            part.load_state_dict(checkpoint[name])
        self.records = checkpoint["records"]

    def _draw(self) -> None:
        """Draw losses and accuracy over epochs, unless there is none yet."""
        if not self.records:
            return
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        losses, accuracies = figure.subplots(1, 2)
        places = {"train_loss": losses, "test_loss": losses, "accuracy": accuracies}
        for name, axes in places.items():
            values = [record[name] for record in self.records]
            axes.plot(range(1, self.epochs_done + 1), values, "o-", label=name)
            axes.set(xlabel="epoch")
            axes.legend()
        with atomic_file(self.folder / "curves.png") as file:
            figure.savefig(file, dpi=120)


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Yield a list, to which the first Ctrl-C or SIGTERM is added: the body reads it
    after each step. A second signal ends the process.
    """
    received: list[int] = []
    previous_handlers: dict[int, Any] = {}

    def receive(number: int, _: object) -> None:
        if received:
            # An exception would not do: a library that waits may catch it.
            os._exit(128 + number)
        received.append(number)
        if hasattr(signal, "SIGCHLD"):
            # SIGTERM to all processes ends the loader's workers, too. Then the loader's
            # handler of SIGCHLD would raise in the middle of the step. Not SIG_DFL:
            # Python prints a traceback if a signal for it is waiting already.
            handler = signal.signal(signal.SIGCHLD, lambda *_: None)
            previous_handlers[signal.SIGCHLD] = handler
        # Not print: the signal may have interrupted another print.
        os.write(2, b"\nending after this step; again: ending now\n")

    for deferred in (signal.SIGINT, signal.SIGTERM):
        # A signal that is ignored stays so, such as SIGINT in a shell's background job.
        if signal.getsignal(deferred) is not signal.SIG_IGN:
            previous_handlers[deferred] = signal.signal(deferred, receive)
    try:
        yield received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which replaces `path` when the body ends without an exception.
    At any time `path` is the whole old file or the whole new one.
    """
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())  # or a power cut could leave an empty file
    os.replace(part, path)


def seed_of(*words: object) -> int:
    """Returns a seed that is a function of the words."""
    return random.Random(" ".join(map(str, words))).getrandbits(32)


# --- options ---

# Names, type, default and help. The names are those of timm's train.py, if it has the
# option. `fill_in_defaults` sets some of the defaults that are None here.
OPTIONS: tuple[tuple[str, type, Any, str], ...] = (
    ("--data", str, EMBEDDED, "folder of train/CLASS/ and val/CLASS/; hfds/NAME"),
    ("--train-split", str, "train", "part to train on, also train[:90%%]"),
    ("--val-split", str, "validation", "part to test on, also train[90%%:]"),
    ("--input-key", str, None, "column of the pictures, if it is not image"),
    ("--target-key", str, None, "column of the classes, if it is not label"),
    ("--img-size", int, None, "side of the pictures, if it is not the network's"),
    ("--aa", str, None, "augmentation beside crop and flip, such as rand-m6"),
    ("-j --workers", int, None, "processes that read pictures (default: 8, or CPUs)"),
    ("--model", str, None, "cnn, or timm's name (default of pictures: resnet18)"),
    ("--pretrained", bool, False, "start from timm's weights"),
    ("-b --batch-size", int, None, "images of a step (default: 4096; pictures: 256)"),
    ("--micro-batch-size", int, 64, "images of a sub-step of a device"),
    ("--amp-dtype", str, None, "bfloat16 or float16: autocast"),
    ("--devices", list, None, "such as cuda:0 cuda:1 (default: all)"),
    ("--epochs", int, 15, "epochs in all"),
    ("--warmup-epochs", int, None, "until the rate is reached (default: a fifth)"),
    ("--opt", str, "sgd", "timm's name of an optimizer"),
    ("--lr-base", float, None, "learning rate for 256 images (default: by --opt)"),
    ("--weight-decay", float, 5e-4, "of all but biases and normalisation"),
    ("--seed", int, 0, "of weights, order and augmentation"),
    ("--output", str, None, "folder of the run (default: a new one in runs/)"),
    ("--resume", str, None, "folder of a run to continue"),
)
ABOVE_ZERO = ("img_size", "batch_size", "micro_batch_size", "epochs", "lr_base")
ZERO_OR_ABOVE = ("workers", "warmup_epochs", "weight_decay")
# A resumed run may have other values of these.
CHANGEABLE = ("data", "workers", "devices", "output", "resume")
LEARNING_RATES = {"sgd": 0.0125, "adamw": 0.001}  # for 256 images


def option_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="scatterpar train",
        usage="python -m scatterpar train [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for names, kind, default, text in OPTIONS:
        keywords: dict[str, Any] = {"type": kind, "metavar": kind.__name__.upper()}
        if kind is list:
            keywords = {"nargs": "+", "metavar": "STR"}
        if kind is bool:
            keywords = {"action": "store_true"}
        elif default is not None:
            text += f" (default: {default})"
        parser.add_argument(*names.split(), default=default, help=text, **keywords)
    return parser


def read_options(
    arguments: Sequence[str],
) -> tuple[argparse.Namespace, dict[str, Any] | None]:
    """Returns the options, and the checkpoint if a run is resumed.

    A resumed run has the options that it has saved. Raises a `UsageError` if the
    command line has another value for one, unless the option is `CHANGEABLE`.
    """
    parser = option_parser()
    options = parser.parse_args(arguments)
    checkpoint = None
    if options.resume is not None:
        checkpoint = read_checkpoint(options.resume)
        saved = checkpoint["options"]
        # Read the command line again, with the saved options as defaults.
        parser.set_defaults(**saved)
        options = parser.parse_args(arguments)
        options.output = options.resume
        for name in saved.keys() - CHANGEABLE:
            if getattr(options, name) != saved[name]:
                raise UsageError(
                    f"{as_argument(options, name)}: the run in {options.resume} has "
                    f"{saved[name]}; leave it out, or start a new run"
                )
    fill_in_defaults(options)
    check_options(options)
    if checkpoint is None and (Path(options.output) / CHECKPOINT).exists():
        raise UsageError(
            f"--output {options.output}: a run is there; pass --resume "
            f"{options.output} to go on with it, or another folder"
        )
    return options, checkpoint


def read_checkpoint(folder: str) -> dict[str, Any]:
    """Returns what a run has saved. Raises a `UsageError` if it cannot be read."""
    path = Path(folder) / CHECKPOINT
    try:
        # `weights_only`: code in the file is not executed.
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["options"]["data"]  # another program's file has none
    except Exception as error:  # torch.load raises many kinds
        raise UsageError(
            f"--resume {folder}: {path} cannot be read ({in_a_line(error)}); pass the "
            "folder of a run that has completed an epoch"
        ) from error
    return checkpoint  # type: ignore[no-any-return]


def fill_in_defaults(options: argparse.Namespace) -> None:
    """Set the options whose defaults depend on others."""
    defaults = {
        "model": "resnet18",
        "batch_size": 256,
        "workers": min(8, os.cpu_count() or 1),
        "warmup_epochs": min(5, options.epochs // 5),
        "lr_base": LEARNING_RATES.get(options.opt),
        "output": time.strftime("runs/train-%Y%m%d-%H%M%S"),
    }
    if options.data == EMBEDDED:  # small, and in memory
        defaults |= {"model": "cnn", "batch_size": 4096, "workers": 0}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def check_options(options: argparse.Namespace) -> None:
    """Raise a `UsageError` for the first value that cannot be used."""
    problems: dict[str, str] = {}
    for name, value in vars(options).items():
        if name in ABOVE_ZERO and value is not None and not 0 < value < math.inf:
            problems[name] = "pass a number above zero"
        if name in ZERO_OR_ABOVE and not 0 <= value < math.inf:
            problems[name] = "pass zero or a number above it"
    if options.lr_base is None:
        problems["opt"] = "its usual rate is not known; pass --lr-base for 256 images"
    if options.warmup_epochs >= options.epochs:
        problems["warmup_epochs"] = f"pass a number below --epochs {options.epochs}"
    if options.amp_dtype not in (None, "bfloat16", "float16"):
        problems["amp_dtype"] = "pass bfloat16 or float16"
    if options.data == EMBEDDED and options.img_size:
        problems["img_size"] = "the included images are used as they are; leave it out"
    if options.data == EMBEDDED and options.aa:
        problems["aa"] = "the included images are used as they are; leave it out"
    if options.model == "cnn" and options.pretrained:
        problems["model"] = "it has no pretrained weights; pass resnet18, say"
    if problems:
        name, problem = next(iter(problems.items()))
        raise UsageError(f"{as_argument(options, name)}: {problem}")


def as_argument(options: argparse.Namespace, name: str) -> str:
    """Returns an option as the command line has it."""
    return f"--{name.replace('_', '-')} {getattr(options, name)}"


def default_devices() -> list[str]:
    """Returns all accelerators; without any, two replicas on the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu:0", "cpu:1"]
    numbers = range(torch.accelerator.device_count())
    return [f"{accelerator.type}:{number}" for number in numbers]


# --- images ---


LAYOUT = (
    "a data set is a folder with train/CLASS/1.jpg and val/CLASS/2.jpg (splitfolders "
    "makes one of CLASS/1.jpg), or hfds/NAME"
)


class ImagePiece(NamedTuple):
    """A piece of a batch: some of its images and labels. If pictures cannot be read, a
    line for each of them, and no images.
    """

    images: Tensor  # bytes: (rows, channels, height, width)
    labels: Tensor
    unreadable: Sequence[str] = ()


# A key of a data set is an epoch and the rows of a piece.
PieceKey = tuple[int, list[int]]


class Data(NamedTuple):
    """The images to train and to test on, and how to normalise them."""

    train: Dataset[ImagePiece]
    test: Dataset[ImagePiece]
    classes: Sequence[str]
    shape: tuple[int, int, int]  # channels, height, width
    mean: Tensor  # of each channel
    std: Tensor


def open_data(options: argparse.Namespace) -> Data:
    """Returns the images that `--data` names."""
    if options.data == EMBEDDED:
        return open_embedded()
    return open_with_timm(options)


def open_embedded() -> Data:
    """Returns the images that the package has, whose mean is computed."""
    train, test = embedded.load()
    pixels = train.images.float()
    std, mean = torch.std_mean(pixels, (0, 2, 3), correction=0)
    return Data(
        train=InMemory(*train),
        test=InMemory(*test),
        classes=list(embedded.CLASSES),
        shape=(1, 28, 28),
        mean=mean,
        std=std,
    )


def open_with_timm(options: argparse.Namespace) -> Data:
    """Returns the images of a folder or a hub, which timm reads."""
    timm = import_timm(f"--data {options.data}")
    train = open_reader(timm, options, options.train_split)
    test = open_reader(timm, options, options.val_split)
    check_parts(options.data, train, test)
    config = image_config(timm, options)
    train_transform = build_transform(timm, options, config, is_training=True)
    test_transform = build_transform(timm, options, config, is_training=False)
    mean = torch.tensor(config["mean"])
    std = torch.tensor(config["std"])
    return Data(
        train=Pictures(train, train_transform, options.seed),
        test=Pictures(test, test_transform, options.seed),
        classes=list(train.class_to_idx),
        shape=config["input_size"],
        mean=255 * mean,  # of bytes
        std=255 * std,
    )


def check_parts(data: str, train: Any, test: Any) -> None:
    """Refuse data without a part to test on, or with other classes there."""
    # If a folder lacks a part, timm reads the folder itself in its place. Data of a hub
    # have no root.
    roots = {data, train.root, test.root}
    if train.root is not None and len(roots) < 3:
        raise UsageError(f"--data {data}: it lacks a part; {LAYOUT}")
    classes = list(train.class_to_idx)
    classes_of_test = list(test.class_to_idx)
    if classes != classes_of_test or len(classes) < 2:
        raise UsageError(
            f"--data {data}: the training part has the classes {classes!s:.200}, and "
            f"the test part {classes_of_test!s:.200}; give both parts the same "
            "classes, at least two"
        )


def image_config(timm: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Returns timm's description of a network's images: their size, mean, and so on."""
    pretrained = None
    if options.model != "cnn":
        try:
            pretrained = timm.get_pretrained_cfg(options.model)
        except RuntimeError as error:  # of an unknown tag, such as resnet18.wrong
            raise UsageError(f"--model {options.model}: {in_a_line(error)}") from error
    config: dict[str, Any] = timm.data.resolve_data_config(
        {"img_size": options.img_size},
        pretrained_cfg=pretrained.to_dict() if pretrained else {},
    )
    return config


def build_transform(
    timm: Any, options: argparse.Namespace, config: Any, *, is_training: bool
) -> Any:
    """Returns timm's function from a picture to a tensor of bytes."""
    try:
        return timm.data.create_transform(
            **config,
            is_training=is_training,
            auto_augment=options.aa,
            color_jitter=0.0,
            normalize=False,  # `WithNormalisation` does it, on the device
        )
    except Exception as error:  # assertions and others, of a wrong policy
        raise UsageError(
            f"--aa {options.aa}: timm has no such policy ({in_a_line(error)}); pass "
            "rand-m6-mstd0.5, say"
        ) from error


def open_reader(timm: Any, options: argparse.Namespace, split: str) -> Any:
    """Returns timm's reader of a split: `reader[row]` is an open file and a label."""
    is_folder = os.path.isdir(options.data)
    if not is_folder and not options.data.startswith("hfds/"):
        raise UsageError(f"--data {options.data}: there is no such folder; {LAYOUT}")
    try:
        dataset = timm.data.create_dataset(
            "" if is_folder else options.data,
            root=options.data if is_folder else None,
            split=split,
            input_key=options.input_key,
            target_key=options.target_key,
        )
    except Exception as error:  # of timm, of datasets, of the hub
        raise UsageError(
            f"--data {options.data}: {in_a_line(error)}; {LAYOUT}"
        ) from error
    return dataset.reader


class InMemory(Dataset[ImagePiece]):
    """Images in memory, which are the same in each epoch."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: PieceKey) -> ImagePiece:
        _, rows = key
        return ImagePiece(self.images[rows], self.labels[rows])


class Pictures(Dataset[ImagePiece]):
    """Pictures in files. The transform may augment at random, in each epoch anew."""

    def __init__(self, reader: Any, transform: Any, seed: int) -> None:
        self.reader = reader
        self.transform = transform
        self.seed = seed

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, key: PieceKey) -> ImagePiece:
        epoch, rows = key
        images: list[Tensor] = []
        labels: list[int] = []
        unreadable: list[str] = []
        for row in rows:
            try:
                file, label = self.reader[row]
                with file:
                    picture = Image.open(file).convert("RGB")
            except Exception as error:  # Pillow's decoders raise many kinds
                name = self.reader.filename(row, absolute=True)
                unreadable.append(f"{name} ({in_a_line(error)})")
                continue
            # timm's transforms draw from all three generators. Seeded here, they give
            # the same image in whichever worker.
            seed = seed_of("image", self.seed, epoch, row)
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            images.append(self.transform(picture))
            labels.append(label)
        if unreadable:
            return ImagePiece(torch.empty(0), torch.empty(0), unreadable)
        return ImagePiece(torch.stack(images), torch.tensor(labels))


class ImageBatches:
    """The batches of a data set. Worker processes read each batch in pieces.

    Attributes:
        num_images: the number of images.
        num_batches: the number of batches in an epoch. Sizes differ by one at most.
        mean_size: the mean number of images in a batch.
    """

    def __init__(
        self,
        data: Dataset[ImagePiece],
        options: argparse.Namespace,
        *,
        is_shuffled: bool,
    ) -> None:
        self.num_images = len(data)  # type: ignore[arg-type]
        self.num_batches = math.ceil(self.num_images / options.batch_size)
        self.mean_size = self.num_images / self.num_batches
        self._seed = options.seed if is_shuffled else None
        # At most 64 pieces per batch: a worker needs an open file for each.
        self._piece_size = max(64, math.ceil(options.batch_size / 64))
        # The keys of an epoch's pieces. `of_epoch` writes them, the loader reads them.
        self._keys: list[PieceKey] = []
        prefetch_factor = None
        if options.workers:
            # Workers read about a batch ahead.
            pieces_per_batch = math.ceil(options.batch_size / self._piece_size)
            prefetch_factor = max(2, pieces_per_batch // options.workers)
        self._loader = DataLoader(
            data,
            batch_size=None,  # an item is a piece, as `data[key]` returns it
            sampler=self._keys,
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
            prefetch_factor=prefetch_factor,
            worker_init_fn=ignore_interrupts,
        )

    def of_epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels. Raises a `UsageError` for unreadable pictures."""
        rows = torch.arange(self.num_images)
        if self._seed is not None:
            seed = seed_of("order", self._seed, epoch)
            generator = torch.Generator().manual_seed(seed)
            rows = torch.randperm(self.num_images, generator=generator)
        batches = rows.tensor_split(self.num_batches)
        pieces_of_batches = [batch.split(self._piece_size) for batch in batches]
        # In place, because the loader has this list.
        self._keys[:] = [
            (epoch, piece.tolist()) for pieces in pieces_of_batches for piece in pieces
        ]
        loader = iter(self._loader)
        for rows_of_pieces in pieces_of_batches:
            pieces = [next(loader) for _ in rows_of_pieces]
            unreadable = [name for piece in pieces for name in piece.unreadable]
            if unreadable:
                raise UsageError(
                    f"these pictures cannot be read: {'; '.join(unreadable)}; mend or "
                    "remove them"
                )
            yield (
                torch.cat([piece.images for piece in pieces]),
                torch.cat([piece.labels for piece in pieces]),
            )


def ignore_interrupts(_: int) -> None:
    """Ignore Ctrl-C in a worker: a terminal sends it to all processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# --- network and optimizer ---


class WithNormalisation(nn.Module):
    """A network that normalises images on the device, to which bytes are copied."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean.view(-1, 1, 1))
        self.register_buffer("std", std.view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Returns the network's scores."""
        scores: Tensor = self.network((images - self.mean) / self.std)
        return scores


class SmallCNN(nn.Sequential):
    """Three convolutions and a hidden layer, for images of at least 8 x 8."""

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        channels, height, width = image_shape
        super().__init__()
        for out_channels in (16, 32, 64):
            # Without a bias: the normalisation would subtract it.
            self.append(nn.Conv2d(channels, out_channels, 3, padding=1, bias=False))
            self.append(nn.BatchNorm2d(out_channels))
            self.append(nn.ReLU())
            self.append(nn.MaxPool2d(2))
            channels = out_channels
        self.append(nn.Flatten())
        positions = (height // 8) * (width // 8)
        self.append(nn.Linear(channels * positions, 128, bias=False))
        self.append(nn.BatchNorm1d(128))
        self.append(nn.ReLU())
        self.append(nn.Linear(128, num_classes))


def build_network(options: argparse.Namespace, data: Data) -> nn.Module:
    """Returns the network that `--model` names."""
    if options.model == "cnn":
        return SmallCNN(data.shape, len(data.classes))
    timm = import_timm(f"--model {options.model}")
    try:
        network: nn.Module = timm.create_model(
            options.model,
            pretrained=options.pretrained,
            num_classes=len(data.classes),
            in_chans=data.shape[0],
            # Transformers are built for one size of images.
            pretrained_cfg_overlay={"input_size": data.shape},
        )
    except Exception as error:  # of timm, and of the hub
        hint = did_you_mean(options.model, timm.list_models())
        raise UsageError(
            f"--model {options.model}: {in_a_line(error)}{hint}"
        ) from error
    return network


def build_optimizer(
    options: argparse.Namespace, network: nn.Module, batches: ImageBatches
) -> tuple[Optimizer, LRScheduler]:
    """Returns the optimizer of `--opt`, and its schedule: a warm-up, then a cosine."""
    # The rate grows with the batch: linearly, or with the square root for adaptive
    # optimizers (arXiv:2205.10287). timm, too, knows these by their names.
    if "ada" in options.opt or "lamb" in options.opt:
        rate = options.lr_base * math.sqrt(batches.mean_size / 256)
    else:
        rate = linear_scaled_lr(options.lr_base, batches.mean_size)
    if options.opt == "sgd":
        groups = weight_decay_groups(network, options.weight_decay)
        optimizer: Optimizer = torch.optim.SGD(
            groups, rate, momentum=0.9, nesterov=True
        )
    else:
        timm = import_timm(f"--opt {options.opt}")
        try:
            optimizer = timm.optim.create_optimizer_v2(
                network, options.opt, rate, options.weight_decay
            )
        except Exception as error:  # timm's optimizers raise many kinds
            hint = did_you_mean(options.opt, timm.optim.list_optimizers())
            raise UsageError(
                f"--opt {options.opt}: {in_a_line(error)}{hint}"
            ) from error
    warmup_steps = options.warmup_epochs * batches.num_batches
    cosine_steps = options.epochs * batches.num_batches - warmup_steps
    scheduler: LRScheduler = CosineAnnealingLR(optimizer, cosine_steps)
    if warmup_steps:
        start = rate / (warmup_steps + 1)
        scheduler = gradual_warmup(optimizer, warmup_steps, start, after=scheduler)
    return optimizer, scheduler


def build_engine(options: argparse.Namespace, model: nn.Module) -> ScatterOnceParallel:
    """Returns the engine of the model, which it moves to the first device."""
    devices = options.devices or default_devices()
    return ScatterOnceParallel(
        model.to(devices[0]),
        device_ids=devices,
        micro_batch_size=options.micro_batch_size,
        buffers="batch",  # running statistics of all rows, not of micro-batches
        check_finite=True,
    )


def mixed_precision(
    name: str | None, device_type: str
) -> tuple[torch.autocast, torch.GradScaler]:
    """Returns autocast and scaler for `--amp-dtype`; without it both are off."""
    dtype = getattr(torch, name or "bfloat16")
    autocast = torch.autocast(device_type, dtype, enabled=name is not None)
    # Only float16 needs a scaler.
    scaler = torch.GradScaler(device_type, enabled=dtype == torch.float16)
    return autocast, scaler


def make_folder(folder: Path) -> None:
    """Make the folder of a run, unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: {error.strerror}") from error


def import_timm(option: str) -> Any:
    """Import timm, which takes seconds. Raises a `UsageError` if timm is missing or the
    torchvision does not fit; the message begins with `option`.
    """
    try:
        for module in ("timm.data", "timm.optim"):
            importlib.import_module(module)
        return importlib.import_module("timm")
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"{option}: this option needs timm, and a torchvision for this torch "
            f"({in_a_line(error)}); in a clone of scatterpar, run pip install -e "
            "'.[images]'"
        ) from error


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns "; did you mean …?" with the most similar names, or an empty string."""
    matches = difflib.get_close_matches(name, names)
    return f"; did you mean {', '.join(matches)}?" if matches else ""


def in_a_line(error: BaseException) -> str:
    """Returns an error's message in one line, or its class if it has no message."""
    return " ".join(str(error).split())[:300] or type(error).__name__
