"""The options of `python -m scatterpar train`."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from scatterpar.train.data import EMBEDDED, INSTALLED_NAME
from scatterpar.train.errors import UsageError
from scatterpar.train.machines import run_id
from scatterpar.train.options import Options
from scatterpar.train.run import run

_PROGRAM = "scatterpar train"
_DEFAULT_ACCUM = 16
_LONGEST_DEFAULT_WARMUP = 5


def main(arguments: Sequence[str]) -> int:
    """Run the tool; return the exit code.

    0: finished; 1: a failed check or diverged training; 2: an argument or the data is wrong,
    with one line on stderr that says what; 130: interrupted.
    """
    try:
        return run(parse(arguments))
    except UsageError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        return 130


def parse(arguments: Sequence[str]) -> Options:
    """Turn the command line into options.

    Raises:
        UsageError: an argument is wrong.
        SystemExit: help was asked for.

    >>> options = parse(["--epochs", "10"])
    >>> options.batch, options.accum, options.warmup_epochs
    (4096, 16, 2)
    """
    given = _parser().parse_args(arguments)
    if given.micro_batch_size is not None and given.accum is not None:
        raise UsageError("--accum and --micro-batch-size say the same thing twice: give one")
    if given.devices is not None and given.replicas is not None:
        raise UsageError("--devices already says how many replicas there are: drop --replicas")
    if given.warmup_epochs is None:
        given.warmup_epochs = min(_LONGEST_DEFAULT_WARMUP, given.epochs // 5)
    if given.warmup_epochs >= given.epochs:
        raise UsageError(
            f"--warmup-epochs {given.warmup_epochs} must be less than --epochs {given.epochs}"
        )
    if given.accum is None:
        given.accum = _DEFAULT_ACCUM if given.micro_batch_size is None else 1
    if given.out is None:
        # With torchrun a name that a restart finds again, and that all its machines know.
        name = run_id() or time.strftime("%Y%m%d-%H%M%S")
        given.out = Path("runs") / f"train-{name}"
    return Options(**vars(given))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help)")


def _parser() -> _Parser:
    parser = _Parser(
        prog=f"python -m {_PROGRAM}",
        description="Train a network on large batches with ScatterOnceParallel, in one process; "
        "on several machines with torchrun, one process each.",
        epilog="Writes metrics.jsonl (one JSON object a line), curves.png and checkpoint.pt into "
        "--out. What torchrun starts again goes on from the checkpoint by itself. "
        "Exit codes: 0 finished, 1 failed check or diverged training, 2 wrong argument or data, "
        "130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--data",
        default=EMBEDDED,
        metavar="DIR",
        help="folder (or folder/prefix) of MNIST-family IDX files, gzip or not; or of images in "
        f"train/CLASS/ and test/CLASS/ (needs torchvision). Names: {EMBEDDED} (default; "
        "Fashion-MNIST's test set, 8,192 to train on and 1,808 to test), "
        f"{INSTALLED_NAME} (all of it, from Debian's package dataset-fashion-mnist). "
        "A folder of that name comes first",
    )
    add(
        "--image-size",
        type=_count,
        default=64,
        metavar="PIXELS",
        help="size that the images of an image folder are brought to (default 64)",
    )
    add(
        "--model",
        default="cnn",
        metavar="NAME",
        help="cnn (default), resnet20, or package.module:callable, called with num_classes where "
        "it has that parameter, such as torchvision.models:resnet101",
    )
    add(
        "--batch",
        type=_count,
        default=4096,
        metavar="N",
        help="images of a step, over all machines (default 4096)",
    )
    add(
        "--accum",
        type=_count,
        metavar="N",
        help="sub-steps of each replica (default 16)",
    )
    add(
        "--micro-batch-size",
        type=_count,
        metavar="N",
        help="the other way to say it: images of a sub-step",
    )
    add(
        "--replicas",
        type=_count,
        metavar="N",
        help="number of replicas (default: one for every GPU; without any, 4 on the CPU)",
    )
    add("--devices", metavar="LIST", help="a device for each replica, such as cuda:0,cuda:1")
    add("--epochs", type=_count, default=20, metavar="N", help="default 20")
    add(
        "--base-lr",
        type=_number(above=0.0),
        default=0.0125,
        metavar="RATE",
        help="learning rate for batches of 256; scaled with --batch (default 0.0125)",
    )
    add(
        "--warmup-epochs",
        type=_whole,
        metavar="N",
        help="epochs until the rate is reached; a cosine follows (default: a fifth of --epochs, "
        "at most 5)",
    )
    add(
        "--momentum",
        type=_number(least=0.0, below=1.0),
        default=0.9,
        metavar="M",
        help="Nesterov momentum (default 0.9)",
    )
    add(
        "--weight-decay",
        type=_number(least=0.0),
        default=5e-4,
        metavar="W",
        help="on all but biases and normalisation (default 5e-4)",
    )
    add("--seed", type=_seed, default=0, metavar="N", help="default 0")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for what is written (default: a new one in runs/; with torchrun "
        "runs/train-ID, after its --rdzv-id)",
    )
    add(
        "--checkpoint-every",
        type=_count,
        default=100,
        metavar="STEPS",
        help="steps between checkpoints; the last step always has one (default 100)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the checkpoint in --out: bit for bit on as many machines and replicas",
    )
    add(
        "--check",
        action="store_true",
        help="first compare the first step's gradients with a plain whole-batch backward; needs "
        "the memory for that, in float64",
    )
    return parser


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, zero or above")
    return int(text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def _seed(text: str) -> int:
    seed = _whole(text)
    if seed >= 2**31:
        raise argparse.ArgumentTypeError(f"{text} is too large: seeds are below 2**31")
    return seed


def _number(
    above: float = -math.inf, least: float = -math.inf, below: float = math.inf
) -> Callable[[str], float]:
    limits = {"above": above, "at least": least, "below": below}
    wanted = " and ".join(f"{word} {x:g}" for word, x in limits.items() if math.isfinite(x))

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (above < value < below and value >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}")
        return value

    return number
