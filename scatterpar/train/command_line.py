"""The options of `python -m scatterpar train`, and how the tool's commands read theirs.

An option has the names that it has in timm's train.py, too, if it is there.
"""

from __future__ import annotations

import argparse
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
from typing import Any, ClassVar, TextIO

from tqdm import tqdm

LARGE_BATCH = 4096
EMBEDDED = "embedded"
# A folder with one of these files is that of a run.
METRICS_FILE = "metrics.jsonl"
LOCK_FILE = ".lock"
# The options that a resumed run may change, because they do not decide the result.
# Data may have moved: it is compared by a digest of its names.
_CHANGEABLE = (
    "data download workers devices micro_batch_size compile channels_last config out "
    "checkpoint_every resume"
)
# Ranges of numbers: in words, as a test, and the options of all commands that they
# apply to.
_POSITIVE = "batch epochs micro_batch_size image_size checkpoint_every base_lr clip ema"
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("above zero", lambda x: 0 < x < math.inf, f"{_POSITIVE} top val"),
    (
        "zero or above",
        lambda x: 0 <= x < math.inf,
        "warmup_epochs workers skip_broken weight_decay label_smoothing",
    ),
    ("below 1", lambda x: x < 1, "label_smoothing ema val"),
)
# Options of other tools, and of earlier versions, without dashes, and what to use
# instead.
_FOLDERS = "a data set is train/CLASS and val/CLASS, or CLASS with --val 0.1"
_MORE_VARIED = "--augment rand-m9-mstd0.5 varies pictures more"
_STORED = (
    "--data FOLDER names the pictures; sets of torchvision are stored in data/, the "
    "hub's in $HF_HOME"
)
_COSINE = "the learning rate warms up, and a cosine to zero follows"
_SUB_STEPS = "--micro-batch-size N sets the images of a sub-step"
_ONE_PROCESS = "one process uses all GPUs (for several: docs/several-machines.md)"
_INSTEAD = {
    "bs": "the images of a step are --batch N",
    "lr": "--base-lr X is the learning rate for batches of 256 images",
    "learningrate": "--base-lr X is the learning rate for batches of 256 images",
    "imgsz": "--image-size N is the side of a picture",
    "gpus": "--devices cuda:0,cuda:1 names them (default: every GPU)",
    "gpu": "--devices cuda:0,cuda:1 names them (default: every GPU)",
    "device": "--devices cuda:0,cuda:1 names them (default: every GPU)",
    "amp": "--autocast bfloat16 (or float16) computes in that precision",
    "dataset": "--data hfds/NAME or --data torch/NAME is a data set of a library",
    "dataroot": _STORED,
    "datadir": _STORED,
    "noaug": "--augment none",
    "arch": "--model timm:resnet18 names the network",
    "wd": "--weight-decay X",
    "valsplit": "--val 0.1 tests on a tenth of the pictures",
    "accum": _SUB_STEPS,
    "gradaccumsteps": _SUB_STEPS,
    "fromscratch": "weights are random without --pretrained and --weights",
    "wandb": "wandb.init(sync_tensorboard=True) before scatterpar.__main__.main logs "
    "the same curves, with tensorboard installed",
    "processes": _ONE_PROCESS,
    "trainfolder": _FOLDERS,
    "valfolder": _FOLDERS,
    "testfolder": _FOLDERS,
    "columnimage": "--input-key NAME is the column of the pictures",
    "columnlabel": "--target-key NAME is the column of the classes",
    "dropat": _COSINE,
    "decaymilestones": _COSINE,
    "sched": _COSINE,
    "patience": "the best epoch is kept in best.pt, and Ctrl-C ends a run",
    "freeze": "all layers are trained",
    "momentum": "SGD has a momentum of 0.9",
    "erase": _MORE_VARIED,
    "reprob": _MORE_VARIED,
    "mixup": _MORE_VARIED,
    "cutmix": _MORE_VARIED,
}


def option(
    default: Any,
    text: str,
    *names: str,
    kind: Callable[[str], Any] = str,
    metavar: str | None = None,
    **more: Any,
) -> Any:
    """Return a dataclass's field that is an option of a command, or a positional
    argument if ``names`` is ``("",)``.

    Args:
        default: its value if it is not given; a callable makes it.
        text: what `--help` says.
        names: more names of the option, those of timm's train.py.
        kind: makes a value of a word.
        metavar: the name of its value in `--help`.
        more: of argparse's `add_argument`.
    """
    if default is False:
        more["action"] = "store_true"
    else:
        more["type"] = kind
        if "choices" not in more:
            more["metavar"] = metavar or ("N" if kind is int else "X")
    metadata = {"text": text, "names": names, "more": more}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _folder(word: str) -> Path:
    return Path(word).expanduser()


def _data(word: str) -> str:
    return str(_folder(word)) if word.startswith("~") else word


def _new_folder() -> Path:
    return Path(time.strftime("runs/train-%Y%m%d-%H%M%S"))


MICRO_BATCH_SIZE = "images of a sub-step of each replica"
WORKERS = "reading processes (default: one per core, at most 16; 0: none)"
DEVICES = (
    "a device for each replica, such as cuda:0,cuda:1 or cuda:0 cuda:1 (default: "
    "every GPU; without any, two replicas on the CPU)"
)


@dataclass(frozen=True)
class Options:
    """Train a network on large batches, with all GPUs of this machine, in one
    process.
    """

    examples: ClassVar[str] = """examples:
  python -m scatterpar train                                  the included images
  python -m scatterpar train --data photos --val 0.1 --model timm:resnet18 --pretrained
  python -m scatterpar train --data photos --autocast bfloat16 --out runs/a
  python -m scatterpar train --config photos.toml --epochs 90  options from a file
  python -m scatterpar train --resume runs/a                  goes on with a run

Writes into --out: metrics.jsonl (a JSON object per line: starts, steps, epochs),
first_batch.png (images as the network sees them), curves.png, confusion.png,
mistakes.png, checkpoint.pt, best.pt, and TensorBoard's event file if that is installed.
Exit codes: 0 finished, 1 diverged, 2 wrong argument or data, 130 interrupted, 143 ended
by SIGTERM; both keep the run."""

    data: str = option(
        EMBEDDED,
        "folder with train/CLASS and val/CLASS (a test/CLASS is tested once, at the "
        "end), or with CLASS and --val; hfds/NAME of Hugging Face's hub or torch/NAME "
        "of torchvision, as timm names them; or embedded: 10,000 included images",
        kind=_data,
        metavar="DATA",
    )
    val: float | None = option(
        None,
        "part of the pictures that is held out as val, such as 0.1, if there is no "
        "val/",
        kind=float,
    )
    download: bool = option(
        False, "fetch the library's set if it is missing", "--dataset-download"
    )
    input_key: str = option(
        "image", "column of the pictures, of hfds/NAME", metavar="NAME"
    )
    target_key: str = option(
        "label", "column of the classes, of hfds/NAME", metavar="NAME"
    )
    image_size: int | None = option(
        None,
        "side of the pictures (default: that of timm's configuration for timm's "
        "models, else the median of the shorter sides of a sample, from 32 to 224)",
        "--img-size",
        kind=int,
    )
    augment: str = option(
        "crop",
        "how pictures vary: none, crop (and flip), or crop and timm's policy, such as "
        "rand-m9-mstd0.5",
        "--aa",
        metavar="NAME",
    )
    workers: int | None = option(None, WORKERS, "-j", kind=int)
    skip_broken: int = option(
        0, "pictures that may be left out because they cannot be read", kind=int
    )

    model: str = option(
        "cnn",
        "cnn; timm:NAME, such as timm:resnet50; or package.module:callable, such as "
        "torchvision.models:resnet101, called with num_classes if it has that "
        "parameter",
        metavar="NAME",
    )
    pretrained: bool = option(False, "start from the library's weights for its model")
    weights: Path | None = option(
        None,
        "start from a file of weights: .pth, .pt, .safetensors, or a run's best.pt",
        "--initial-checkpoint",
        kind=_folder,
        metavar="FILE",
    )

    batch: int | None = option(
        None,
        "images of a step (default: 4096 of the included images; of others as many as "
        "leave 50 steps an epoch, from 32 to 4096)",
        "--batch-size",
        "-b",
        kind=int,
    )
    epochs: int | None = option(
        None,
        "how often all images are used (default: 20; 15 for the included images)",
        kind=int,
    )
    base_lr: float | None = option(
        None,
        "learning rate for batches of 256, scaled for the images of a step: linearly "
        "for SGD and LARS, by the square root for others (default: by the optimizer)",
        "--lr-base",
        kind=float,
    )
    warmup_epochs: int | None = option(
        None,
        "epochs until the rate is reached; a cosine follows (default: a fifth of all, "
        "at most 5)",
        kind=int,
    )
    optimizer: str | None = option(
        None,
        "class of torch.optim, or timm's name such as lamb; SGD is Nesterov's "
        "(default: AdamW from pretrained weights, SGD from random ones)",
        "--opt",
        metavar="NAME",
    )
    weight_decay: float = option(
        5e-4, "on all but biases and normalisation", kind=float
    )
    label_smoothing: float = option(
        0.0,
        "part of a label that is spread over all classes",
        "--smoothing",
        kind=float,
    )
    clip: float | None = option(
        None, "scale gradients down to at most this norm", "--clip-grad", kind=float
    )
    ema: float | None = option(
        None,
        "test with a moving average of the weights, of this decay, such as 0.999",
        "--model-ema-decay",
        kind=float,
    )
    seed: int = option(
        0, "random seed: weights, order of the images, augmentation", kind=int
    )

    devices: tuple[str, ...] = option((), DEVICES, nargs="+", metavar="DEVICE")
    micro_batch_size: int = option(64, MICRO_BATCH_SIZE, kind=int)
    autocast: str | None = option(
        None,
        "compute in that precision where it is safe",
        "--amp-dtype",
        choices=("bfloat16", "float16"),
    )
    channels_last: bool = option(
        False, "channels last in memory, often faster for convolutions"
    )
    compile: bool = option(
        False, "compile the network with torch.compile", "--torchcompile"
    )

    config: Path | None = option(
        None,
        "options from a TOML file; those of the command line override it",
        "-c",
        kind=_folder,
        metavar="FILE",
    )
    out: Path = option(
        _new_folder,
        "folder for what is written (default: a new one in runs/)",
        "--output",
        kind=_folder,
        metavar="FOLDER",
    )
    checkpoint_every: int = option(
        100,
        "steps between checkpoints; each epoch ends with one",
        "--recovery-interval",
        kind=int,
    )
    resume: str | None = option(
        None,
        "go on with the run in this folder, or in --out, with its options, bit for bit "
        "on as many replicas",
        metavar="FOLDER",
        nargs="?",
        const="",
    )


def parse(arguments: Sequence[str], saved: Sequence[str] = ()) -> Options:
    """Read the command line, and fill in the defaults that depend on other options.

    With the `saved` words of a run that goes on, these come before the command line.
    A passed option that decides the result must be the saved one.
    """
    # Read once for the file of --config, and again with its words before these.
    options: Options = read(Options, arguments, "train")
    first_words = list(saved)
    if options.config is not None:
        first_words += _words_of_file(options.config)
    if first_words:
        options = read(Options, arguments, "train", first_words)
    if options.resume is not None:
        folder = _folder(options.resume) if options.resume else options.out
        options = dataclasses.replace(options, out=folder, resume=str(folder))
    epochs = options.epochs
    if epochs is None:
        # 15: half a minute on two cores.
        epochs = 15 if options.data == EMBEDDED else 20
    warmup = options.warmup_epochs
    if warmup is None:
        warmup = min(5, epochs // 5)
    options = dataclasses.replace(options, epochs=epochs, warmup_epochs=warmup)
    # After the defaults are filled in, as the saved words have them.
    if saved:
        _refuse_other_options(options, read(Options, (), "train", saved))
    if warmup >= epochs:
        raise UsageError(
            f"--warmup-epochs: {warmup} is not below the {epochs} of --epochs"
        )
    return options


def _refuse_other_options(options: Options, saved: Options) -> None:
    for name, value in vars(options).items():
        saved_value = getattr(saved, name)
        if name in _CHANGEABLE.split() or value == saved_value:
            continue
        words = option_of(name)
        remedy = f"leave out {words}"
        if saved_value is not None:
            remedy = f"pass {words} {saved_value} or leave it out"
        raise UsageError(
            f"{options.out} is of a run with {words} {saved_value}, not {value}: "
            f"{remedy}"
        )


class UsageError(Exception):
    """An argument or a file of the user is wrong. The message is one line."""


def words_of(error: BaseException) -> str:
    """Return an error's message in one line, or its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def printable(text: str, encoding: str = "utf-8") -> str:
    """Return the text with escapes in the place of what the encoding lacks: bytes of
    names that are no letters, and the letters of other languages on some consoles.
    """
    return text.encode(encoding, "backslashreplace").decode(encoding)


def printed(text: str) -> str:
    """Return the text as standard output can show it."""
    return printable(text, sys.stdout.encoding or "utf-8")


def say(*lines: str, file: TextIO | None = None) -> None:
    """Print lines beside a bar."""
    # A plain print would be in the middle of the bar.
    tqdm.write(printed("\n".join(lines)), file=file or sys.stdout)
    sys.stdout.flush()


def exit_code_of(command: str, action: Callable[[], int]) -> int:
    """Run a command and return its exit code. A wrong argument prints one line on
    stderr.
    """
    try:
        return action()
    except UsageError as error:
        line = f"scatterpar {command}: error: {error}"
        print(printable(line, sys.stderr.encoding or "utf-8"), file=sys.stderr)
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
    # As timm's train.py takes the folder.
    if command == "train" and words and not words[0].startswith("-"):
        raise UsageError(f"{words[0]}: --data {words[0]} names the images")
    for word in words:
        name = word.partition("=")[0]
        # --batch_size and --batchSize of other tools, too.
        letters = re.sub("[-_]", "", name).lower()
        if name.startswith("--") and letters in _INSTEAD:
            raise UsageError(f"there is no {name}: {_INSTEAD[letters]}")
    values = vars(_parser_of(kind, command).parse_args(words))
    for name, value in values.items():
        # Options are frozen, and compared with those of a run that goes on.
        if isinstance(value, list):
            values[name] = tuple(value)
    options = kind(**values)
    for range_words, fits, names in _RANGES:
        for name in names.split():
            value = getattr(options, name, None)
            if isinstance(value, int | float) and not fits(value):
                raise UsageError(f"{option_of(name)}: {value} is not {range_words}")
    return options


def _parser_of(kind: type[Any], command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m scatterpar {command}",
        description=inspect.cleandoc(kind.__doc__ or ""),
        epilog=kind.examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # The words of a run are saved: a new option could make one ambiguous.
        allow_abbrev=False,
    )
    for item in dataclasses.fields(kind):
        metadata = item.metadata
        more = dict(metadata["more"])
        names = metadata["names"]
        if names == ("",):
            more["metavar"] = item.name.upper()
            parser.add_argument(item.name, help=metadata["text"], **more)
            continue
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        text = metadata["text"]
        if default not in (None, (), False) and "(default" not in text:
            text += f" (default: {default})"
        # argparse formats the help with %.
        more |= {"default": default, "help": text.replace("%", "%%"), "dest": item.name}
        parser.add_argument(option_of(item.name), *names, **more)
    return parser


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
