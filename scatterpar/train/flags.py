"""What can be said on the command line of `python -m scatterpar train`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scatterpar.train.arguments import (
    Parser,
    batch,
    count,
    epochs,
    named_value,
    number,
    seed,
    shares,
    whole,
)
from scatterpar.train.data import EMBEDDED, INSTALLED_NAME
from scatterpar.train.growth import FEWEST_UPDATES, FIRST
from scatterpar.train.options import LARGE_BATCH

__all__ = ["DEFAULT_ACCUM", "DEFAULT_MICRO_BATCH_SIZE", "PROGRAM", "parser"]

PROGRAM = "scatterpar train"
DEFAULT_ACCUM = 16
DEFAULT_MICRO_BATCH_SIZE = 64  # where the batch grows


def parser() -> Parser:
    """The parser; what its options mean together is for ``cli.parse``."""
    made = Parser(
        prog=f"python -m {PROGRAM}",
        description="Train a network on large batches with ScatterOnceParallel, in one process; "
        "on several machines with torchrun, one process each.",
        epilog="Writes into --out: report.html (look at it in a browser), metrics.jsonl (one JSON "
        "object a line), curves.png, run.json (options, versions, commit), checkpoint.pt, best.pt, "
        "and TensorBoard's event file where that is installed. What torchrun starts again goes on "
        "from the checkpoint by itself. "
        "Exit codes: 0 finished, 1 failed check or diverged training, 2 wrong argument or data, "
        "130 interrupted, 143 ended by SIGTERM; both keep what was reached.",
        allow_abbrev=False,
    )
    _add_data(made.add_argument_group("data").add_argument)
    _add_training(made.add_argument_group("training").add_argument)
    _add_work(made.add_argument_group("how the work is done").add_argument)
    _add_results(made.add_argument_group("results").add_argument)
    return made


def _add_data(add: Callable[..., object]) -> None:
    add(
        "--data",
        default=EMBEDDED,
        metavar="DIR",
        help="folder of images in train/CLASS/ and test/CLASS/ (or val); or folder (or "
        "folder/prefix) of MNIST-family IDX files, gzip or not; or torchvision:NAME, a set of "
        "torchvision.datasets such as torchvision:CIFAR10; or datasets:NAME, a set of Hugging "
        f"Face's datasets or the folder of one. Names: {EMBEDDED} (default; "
        "Fashion-MNIST's test set, 8,192 to train on and 1,808 to test), "
        f"{INSTALLED_NAME} (all of it, from Debian's package dataset-fashion-mnist). "
        "A folder of that name comes first",
    )
    add(
        "--data-root",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="where the sets of libraries lie (default data)",
    )
    add("--download", action="store_true", help="fetch the library's set where it is missing")
    add(
        "--image-size",
        type=count,
        metavar="PIXELS",
        help="height and width that pictures are brought to (default 224, or the shorter side of "
        "the first picture where that is smaller)",
    )
    add(
        "--augment",
        choices=("none", "crop", "trivial", "rand"),
        help="how training pictures are varied: random crop and flip (default), that and "
        "TrivialAugment or RandAugment, or not at all",
    )
    add(
        "--smallest-crop",
        type=number(above=0.0, most=1.0),
        default=0.08,
        metavar="PART",
        help="smallest part of a picture's area that a random crop shows (default 0.08)",
    )
    add(
        "--erase",
        type=number(least=0.0, most=1.0),
        default=0.0,
        metavar="P",
        help="how often a rectangle is erased (default 0)",
    )
    for name in ("mixup", "cutmix"):
        add(
            f"--{name}",
            type=number(least=0.0),
            default=0.0,
            metavar="ALPHA",
            help=f"mix pictures and labels by {name} (default 0: no)",
        )
    add(
        "--workers",
        type=whole,
        metavar="N",
        help="processes that read pictures (default: one for each core, at most 16; 0: none)",
    )
    add(
        "--skip-broken",
        action="store_true",
        help="leave out pictures that cannot be read, and count them, rather than stop",
    )


def _add_training(add: Callable[..., object]) -> None:
    add(
        "--model",
        default="cnn",
        metavar="NAME",
        help="cnn (default), resnet20, or package.module:callable, called with num_classes where "
        "it has that parameter, such as torchvision.models:resnet101",
    )
    add(
        "--batch",
        type=batch,
        default=LARGE_BATCH,
        metavar="N",
        help=f"images of a step, over all machines (default {LARGE_BATCH}); no more than there are "
        f"to train on; auto: from {FIRST} on, "
        "doubled after an epoch if the gradient's noise scale has reached the double, as long as "
        f"an epoch keeps {FEWEST_UPDATES} steps; needs two replicas",
    )
    add("--epochs", type=count, default=20, metavar="N", help="default 20")
    add(
        "--base-lr",
        type=number(above=0.0),
        default=0.0125,
        metavar="RATE",
        help="learning rate for batches of 256; scaled for the images of a step (default 0.0125)",
    )
    add(
        "--warmup-epochs",
        type=whole,
        metavar="N",
        help="epochs until the rate is reached; a cosine follows (default: a fifth of --epochs, "
        "at most 5; with --batch auto 0)",
    )
    add(
        "--momentum",
        type=number(least=0.0, below=1.0),
        default=0.9,
        metavar="M",
        help="Nesterov momentum (default 0.9)",
    )
    add(
        "--weight-decay",
        type=number(least=0.0),
        default=5e-4,
        metavar="W",
        help="on all but biases and normalisation (default 5e-4)",
    )
    add("--seed", type=seed, default=0, metavar="N", help="default 0")
    add(
        "--drop-at",
        type=epochs,
        default=(),
        metavar="EPOCHS",
        help="let the rate fall to a tenth after these epochs, such as 30,60,80, in place of the "
        "cosine",
    )
    add(
        "--optimizer",
        default="SGD",
        metavar="NAME",
        help="class of torch.optim (default SGD, with --momentum)",
    )
    add(
        "--optimizer-option",
        action="append",
        default=[],
        type=named_value,
        dest="optimizer_options",
        metavar="NAME=VALUE",
        help="keyword of that class, such as betas=(0.9,0.95); may be given several times",
    )
    add(
        "--label-smoothing",
        type=number(least=0.0, below=1.0),
        default=0.0,
        metavar="PART",
        help="part of a label that is spread over all classes (default 0)",
    )
    add(
        "--clip",
        type=number(above=0.0),
        metavar="NORM",
        help="scale gradients down to at most this norm",
    )
    add(
        "--ema",
        type=number(above=0.0, below=1.0),
        metavar="DECAY",
        help="keep a moving average of the weights, such as 0.999, and test with it",
    )
    add(
        "--zero-init-residual",
        action="store_true",
        help="let residual blocks start as the identity",
    )
    add(
        "--init",
        type=Path,
        metavar="FILE",
        help="start from the weights in a state dict or checkpoint, as far as they fit",
    )


def _add_work(add: Callable[..., object]) -> None:
    add(
        "--accum",
        type=count,
        metavar="N",
        help=f"sub-steps of each replica (default {DEFAULT_ACCUM})",
    )
    add(
        "--micro-batch-size",
        type=count,
        metavar="N",
        help="the other way to say it: images of a sub-step (with --batch auto the only one, "
        f"default {DEFAULT_MICRO_BATCH_SIZE})",
    )
    add(
        "--replicas",
        type=count,
        metavar="N",
        help="number of replicas (default: one for every GPU; without any, 4 on the CPU)",
    )
    add("--devices", metavar="LIST", help="a device for each replica, such as cuda:0,cuda:1")
    add(
        "--shares",
        type=shares,
        metavar="LIST",
        help="relative sizes of the replicas' shares of a batch, such as 2,1,1, or auto: after the "
        "devices' measured pace (default: equal)",
    )
    add(
        "--measure-noise",
        action="store_true",
        help="measure the gradient's noise scale: about the batch beyond which more images buy "
        "few steps (McCandlish et al. 2018); needs two replicas",
    )
    add(
        "--compile",
        action="store_true",
        help="compile the network with torch.compile",
    )
    add(
        "--autocast",
        choices=("bfloat16", "float16"),
        metavar="DTYPE",
        help="compute in bfloat16 or float16 where that is safe; float16 with a gradient scaler",
    )
    add(
        "--channels-last",
        action="store_true",
        help="keep images with their channels last in memory, which convolutions like",
    )


def _add_results(add: Callable[..., object]) -> None:
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for what is written (default: a new one in runs/; with torchrun "
        "runs/train-ID, after its --rdzv-id)",
    )
    add(
        "--eval-every",
        type=count,
        default=1,
        metavar="EPOCHS",
        help="epochs between tests; the last one always has one (default 1)",
    )
    add(
        "--checkpoint-every",
        type=count,
        default=100,
        metavar="STEPS",
        help="steps between checkpoints; the last step always has one (default 100)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the checkpoint in --out, which must be given: bit for bit on as many "
        "machines and replicas",
    )
    add(
        "--check",
        action="store_true",
        help="first compare the first step's gradients with a plain whole-batch backward; needs "
        "the memory for that, in float64",
    )
