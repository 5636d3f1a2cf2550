"""The options of `python -m scatterpar train`: dataclasses whose fields tyro reads."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

LARGE_BATCH = 4096
EMBEDDED = "embedded"
# The options that a resumed run may change, because they do not decide the result.
# Data may have moved: it is compared by its classes and the number of its files.
_CHANGEABLE = (
    "data data_root download workers skip_broken devices processes micro_batch_size "
    "compile channels_last config out checkpoint_every resume"
)
# Ranges of numbers: in words, as a test, and the options of all commands that they
# apply to.
_POSITIVE = (
    "batch epochs processes micro_batch_size image_size checkpoint_every base_lr clip "
    "ema top val patience"
)
_NOT_NEGATIVE = (
    "warmup_epochs workers skip_broken erase mixup cutmix momentum weight_decay "
    "label_smoothing freeze"
)
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("above zero", lambda x: 0 < x < math.inf, _POSITIVE),
    ("zero or above", lambda x: 0 <= x < math.inf, _NOT_NEGATIVE),
    ("below 1", lambda x: x < 1, "erase label_smoothing momentum ema val"),
)
# Options of other tools, and of earlier versions, without dashes, and what to use
# instead. Names that are more similar than these are answered by tyro.
_RATE = "--base-lr X is the learning rate for batches of 256 images"
_SIDE = "--image-size N is the side of a picture"
_GPUS = "--devices cuda:0,cuda:1 names them (default: every GPU)"
_INSTEAD = {
    "batchsize": "the images of a step are --batch N, those of a sub-step "
    "--micro-batch-size N",
    "bs": "the images of a step are --batch N",
    "lr": _RATE,
    "learningrate": _RATE,
    "imgsize": _SIDE,
    "imgsz": _SIDE,
    "gpus": _GPUS,
    "gpu": _GPUS,
    "device": _GPUS,
    "amp": "--autocast bfloat16 (or float16) computes in that precision",
    "datadir": "--data FOLDER names the images",
    "output": "--out FOLDER is where a run is written",
    "arch": "--model timm:resnet18 names the network",
    "wd": "--weight-decay X",
    "valsplit": "--val 0.1 tests on a tenth of each class",
    "weights": "--pretrained starts from the library's weights",
    "accum": "--micro-batch-size N sets the images of a sub-step",
    "wandb": "wandb.init(sync_tensorboard=True) before scatterpar.__main__.main logs "
    "the same curves, with tensorboard installed",
}


def _shown(metavar: str) -> Any:
    """Let `--help` show an option's value by a word. The text of an option says what a
    default of None means.
    """
    return tyro.conf.arg(help_behavior_hint="", metavar=metavar)


Number = Annotated[int | None, _shown("N")]
Rate = Annotated[float | None, _shown("X")]
Name = Annotated[str | None, _shown("NAME")]
Folder = Annotated[Path | None, _shown("PATH")]
Devices = Annotated[tuple[str, ...], _shown("DEVICE [DEVICE ...]")]


@dataclass(frozen=True)
class Options:
    """Train a network on large batches, with all GPUs of this machine,
    in one process or a few.
    """

    examples: ClassVar[str] = """examples:
  python -m scatterpar train                                      the included images
  python -m scatterpar train --data photos --val 0.1 --model timm:resnet18 --pretrained
  python -m scatterpar train --data photos --batch 2048 --autocast bfloat16 --out runs/a
  python -m scatterpar train --config photos.toml --epochs 90     options from a file
  python -m scatterpar train --out runs/a --resume                goes on with a run

Writes into --out: metrics.jsonl (a JSON object per line: starts, steps, epochs),
first_batch.png (images as the network sees them), curves.png, confusion.png,
checkpoint.pt, best.pt, and TensorBoard's event file if that is installed. Exit codes:
0 finished, 1 diverged, 2 wrong argument or data, 130 interrupted, 143 ended by SIGTERM;
both keep the run."""

    # folder with train/CLASS/ and test/CLASS/ or val/CLASS/ (with both, val chooses the
    # best epoch, and test is tested at the end), or with CLASS/ and --val; torch/NAME
    # of torchvision, such as torch/fashion_mnist; hfds/NAME of Hugging Face's hub, or a
    # folder of its datasets; a table of files and labels, x.csv; or embedded:
    # Fashion-MNIST's test set, in two parts
    data: str = EMBEDDED
    val: Rate = None  # part of each class to test on, such as 0.1, if there is no split
    train_folder: Name = None  # the folder in --data to train on, if its name differs
    val_folder: Name = None  # the folder in --data that chooses the best epoch
    test_folder: Name = None  # the folder in --data to test on
    # column of the pictures, in a table or data set of Hugging Face (default: by type
    # and name)
    column_image: Name = None
    column_label: Name = None  # column of their classes
    data_root: Path = Path("data")  # where the sets of libraries are stored
    download: bool = False  # fetch the library's set if it is missing
    # sides of pictures (default: the median of the shorter sides of a sample, from 32
    # to 224; 224 for timm's models)
    image_size: Number = None
    # how pictures vary: none, crop (and flip), or crop and timm's policy, such as
    # rand-m9-mstd0.5
    augment: str = "crop"
    erase: float = 0.0  # how often a rectangle is erased
    mixup: float = 0.0  # mix pictures and labels, with this alpha
    cutmix: float = 0.0  # the same by CutMix
    # reading processes (default: one per core, at most 16; 0: none)
    workers: Number = None
    # the number of pictures that may be left out because they cannot be read
    skip_broken: int = 0

    # cnn, timm:NAME such as timm:resnet50, or package.module:callable such as
    # torchvision.models:resnet101, called with num_classes if it has that parameter
    model: str = "cnn"
    # start from the library's weights for its model, or refuse (default: start from
    # them if --model is a name of timm or torchvision.models, images are in files, and
    # the weights are cached or can be fetched)
    pretrained: bool = False
    from_scratch: bool = False  # start from random weights
    freeze: int = 0  # epochs in which only the last layer is trained
    # images of a step (default: 4096 of the included images; of others as many as leave
    # 50 steps an epoch, from 32 to 4096)
    batch: Number = None
    # how often all images are used (default: 20; for the included images 15)
    epochs: Number = None
    patience: Number = None  # stop after so many epochs without a better accuracy
    # learning rate for batches of 256, scaled for the images of a step: linearly for
    # SGD and LARS, by the square root for others (default: by the optimizer)
    base_lr: Rate = None
    # epochs until the rate is reached; a cosine follows (default: a fifth of all, at
    # most 5)
    warmup_epochs: Number = None
    # epochs after which the rate is a tenth, such as 30 60 80
    drop_at: Annotated[tuple[int, ...], _shown("N [N ...]")] = ()
    # class of torch.optim, or timm's name such as lamb; SGD is Nesterov's (default:
    # AdamW from pretrained weights, SGD from random ones)
    optimizer: Name = None
    momentum: float = 0.9  # of SGD
    weight_decay: float = 5e-4  # on all but biases and normalisation
    label_smoothing: float = 0.0  # part of a label that is spread over all classes
    clip: Rate = None  # scale gradients down to at most this norm
    # test with a moving average of the weights, of this decay, such as 0.999
    ema: Rate = None
    seed: int = 0  # random seed: weights, order of the images, augmentation

    # a device for each replica, such as cuda:0,cuda:1 or cuda:0 cuda:1 (default: every
    # GPU; without any, two replicas on the CPU)
    devices: Devices = ()
    # processes that divide the devices and each batch, for many GPUs: one process
    # launches the work of all its GPUs
    processes: int = 1
    micro_batch_size: int = 64  # images of a sub-step of each replica
    compile: bool = False  # compile the network with torch.compile
    # compute in that precision where it is safe
    autocast: Annotated[
        Literal["bfloat16", "float16"] | None, _shown("{bfloat16,float16}")
    ] = None
    # channels last in memory, often faster for convolutions
    channels_last: bool = False

    # options from a TOML file; those of the command line override it
    config: Folder = None
    # folder for what is written (default: a new one in runs/)
    out: Annotated[Path, _shown("PATH")] = field(
        default_factory=lambda: Path(time.strftime("runs/train-%Y%m%d-%H%M%S"))
    )
    # steps between checkpoints; each epoch ends with one
    checkpoint_every: int = 100
    # go on from --out's checkpoint with its options, bit for bit on as many replicas
    resume: bool = False


def parse(arguments: Sequence[str], saved: Sequence[str] = ()) -> Options:
    """Read the command line, and fill in the defaults that depend on other options.

    With the `saved` words of a run that goes on, these come before the command line.
    A passed option that decides the result must be the saved one.
    """
    options: Options = read(Options, arguments, "train")
    first_words = list(saved)
    if options.config is not None:
        first_words += _words_of_file(options.config)
    if first_words:
        options = read(Options, arguments, "train", first_words)
    epochs = options.epochs
    if epochs is None:
        # 15: half a minute on two cores.
        epochs = 15 if options.data == EMBEDDED else 20
    warmup = options.warmup_epochs
    if warmup is None:
        warmup = min(5, epochs // 5)
    options = dataclasses.replace(options, epochs=epochs, warmup_epochs=warmup)
    if saved:
        _refuse_other_options(options, read(Options, (), "train", saved))
    milestones = [warmup, *options.drop_at, epochs]
    if milestones != sorted(set(milestones)):
        raise UsageError(
            f"--warmup-epochs, --drop-at and --epochs must rise, and are {milestones}"
        )
    return options


def _refuse_other_options(options: Options, saved: Options) -> None:
    for name, value in vars(options).items():
        saved_value = getattr(saved, name)
        if name in _CHANGEABLE.split() or value == saved_value:
            continue
        option = option_of(name)
        remedy = f"leave out {option}"
        if saved_value is not None:
            remedy = f"pass {option} {saved_value} or leave it out"
        raise UsageError(
            f"{options.out} is of a run with {option} {saved_value}, not {value}: "
            f"{remedy}"
        )


class UsageError(Exception):
    """An argument or a file of the user is wrong. The message is one line."""


def words_of(error: BaseException) -> str:
    """Return an error's message in one line, or its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def printable(text: str) -> str:
    """Return the text with escapes in the place of bytes that are no letters, which
    names of files may have.
    """
    return text.encode(errors="backslashreplace").decode()


def exit_code_of(command: str, action: Callable[[], int]) -> int:
    """Run a command and return its exit code. A wrong argument prints one line on
    stderr.
    """
    try:
        return action()
    except UsageError as error:
        print(f"scatterpar {command}: error: {error}", file=sys.stderr)
        return 2


def read(
    kind: type[Any],
    arguments: Sequence[str],
    command: str,
    first_words: Iterable[str] = (),
) -> Any:
    """Read a command's options.

    Args:
        kind: the dataclass of the options.
        arguments: the command line.
        command: the name of the command.
        first_words: options that come before those of the command line.
    """
    words = [*first_words, *arguments]
    if command == "train" and words and not words[0].startswith("-"):
        raise UsageError(f"{words[0]}: --data {words[0]} names the images")
    for word in words:
        option = word.partition("=")[0]
        name = re.sub("[-_]", "", option).lower()
        if option.startswith("--") and name in _INSTEAD:
            raise UsageError(f"there is no {option}: {_INSTEAD[name]}")
    options = tyro.cli(
        kind,
        prog=f"python -m scatterpar {command}",
        args=words,
        description=f"{inspect.getdoc(kind)}\n\n{kind.examples}",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    for range_words, fits, names in _RANGES:
        for name in names.split():
            value = getattr(options, name, None)
            if isinstance(value, int | float) and not fits(value):
                raise UsageError(f"{option_of(name)}: {value} is not {range_words}")
    return options


def _words_of_file(path: Path) -> Iterator[str]:
    """Return the options of a `--config` file, as words of a command line."""
    try:
        return as_words(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--config {path} cannot be read: {words_of(error)}"
        ) from error


def option_of(name: str) -> str:
    """Return how an option is written, by its name in a dataclass."""
    return "--" + name.replace("_", "-")


def as_words(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield options as words of a command line. None, an empty list, and False have
    none.
    """
    for name, value in options.items():
        if value in (None, [], ()) or value is False:
            continue
        yield option_of(name)
        if isinstance(value, list | tuple):
            yield from map(str, value)
        elif value is not True:
            yield str(value)
