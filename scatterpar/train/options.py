"""The command line of `python -m scatterpar train`: a dataclass whose fields tyro reads."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from scatterpar.train.data import EMBEDDED, UsageError
from scatterpar.train.machines import run_id

LARGE_BATCH = 4096
_MICRO_BATCH_SIZE = 64
_LONGEST_DEFAULT_WARMUP = 5
_DECISIVE = """data val image_size augment smallest_crop erase mixup cutmix skip_broken model batch
    epochs base_lr warmup_epochs drop_at optimizer layer_decay momentum weight_decay label_smoothing
    clip ema autocast seed"""
# Ranges of numbers: in words, as a test, and the options of all commands that they apply to.
_POSITIVE = """batch epochs accum micro_batch_size image_size checkpoint_every drop_at shares
    base_lr clip smallest_crop layer_decay ema top val"""
_NOT_NEGATIVE = """warmup_epochs workers skip_broken erase mixup cutmix momentum weight_decay
    label_smoothing seed"""
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("above zero", lambda x: 0 < x < math.inf, _POSITIVE),
    ("zero or above", lambda x: 0 <= x < math.inf, _NOT_NEGATIVE),
    ("at most 1", lambda x: x <= 1, "smallest_crop layer_decay erase label_smoothing"),
    ("below 1", lambda x: x < 1, "momentum ema val"),
    ("below 2**31", lambda x: x < 2**31, "seed"),
)
_EXAMPLES = """examples:
  python -m scatterpar train                                    the images that are included
  python -m scatterpar train --data photos --val 0.1 --model timm:resnet18 --pretrained
  python -m scatterpar train --data photos --model timm:resnet50 --batch 1024 --skip-broken 10
  python -m scatterpar train --data photos --batch auto --autocast bfloat16 --out runs/photos
  python -m scatterpar train --config photos.toml --epochs 90   a file of options, in TOML
  python -m scatterpar train --out runs/photos --resume …       goes on where that run was

Writes into --out: report.html (look at it in a browser), metrics.jsonl (one JSON object a line:
options, versions and commit of each start, steps, epochs), curves.png, checkpoint.pt, best.pt, and
TensorBoard's event file if that is installed. What torchrun starts again goes on from the
checkpoint by itself. Exit codes: 0 finished, 1 diverged training, 2 wrong argument
or data, 130 interrupted, 143 ended by SIGTERM; both keep what was reached."""

# If the default is None, the help text says what that means.
_arg = tyro.conf.arg
Number = Annotated[int | None, _arg(help_behavior_hint="", metavar="N")]
Rate = Annotated[float | None, _arg(help_behavior_hint="", metavar="X")]
Name = Annotated[str | None, _arg(help_behavior_hint="", metavar="NAME")]
Folder = Annotated[Path | None, _arg(help_behavior_hint="", metavar="PATH")]
Devices = Annotated[tuple[str, ...], _arg(help_behavior_hint="", metavar="DEVICE [DEVICE ...]")]
_LISTS = ("--devices", "--shares", "--drop-at")  # their values are separated by spaces or commas


@dataclass(frozen=True)
class Options:
    """Train a network on large batches, in one process; with torchrun on several machines."""

    examples: ClassVar[str] = _EXAMPLES

    # options from a TOML file, such as `epochs = 90`; those of the command line come after it
    config: Folder = None

    # folder of images in train/CLASS/ and test/CLASS/ (or val), or in CLASS/ with --val; or timm's
    # name of a set:
    # torch/NAME, one of torchvision's such as torch/fashion_mnist; hfds/NAME, one of Hugging Face's
    # or a folder that its datasets can read; or embedded (Fashion-MNIST's test set, 8,192 to train
    # on and 1,808 to test)
    data: str = EMBEDDED
    # part of each class to test on, such as 0.1, for a folder of classes that has no split; the
    # same pictures in every run
    val: Rate = None
    # where the sets of libraries lie
    data_root: Path = Path("data")
    # fetch the library's set where it is missing
    download: bool = False
    # height and width that pictures are brought to (default: 224, or the shorter side of the
    # first picture where that is smaller)
    image_size: Number = None
    # how training pictures are varied: crop (random crop and flip, the default), a policy of
    # timm's such as rand-m9-mstd0.5 (that and the policy), or none
    augment: Name = None
    # smallest part of a picture's area that a random crop shows
    smallest_crop: float = 0.08
    # how often a rectangle is erased
    erase: float = 0.0
    # mix pictures and labels by mixup, with this alpha
    mixup: float = 0.0
    # mix pictures and labels by CutMix, with this alpha
    cutmix: float = 0.0
    # processes that read pictures (default: one for each core, at most 16; 0: none)
    workers: Number = None
    # look at all pictures first, in parallel, and write the list of those that cannot be read
    # into broken.txt in --out
    check_data: bool = False
    # leave out so many pictures that cannot be read, and count them, rather than stop
    skip_broken: int = 0

    # cnn, timm:NAME such as timm:resnet50, or package.module:callable, called with
    # num_classes where it has that parameter, such as torchvision.models:resnet101
    model: str = "cnn"
    # start from the weights that timm has for its model, which are fetched if they are missing
    pretrained: bool = False
    # images of a step, over all machines (default: as many as leave 50 steps an epoch, at most
    # 4096). auto: from 256 on, doubled after an epoch if the gradient's noise scale has reached the
    # double, as long as an epoch keeps 8 steps; needs two replicas
    batch: Annotated[
        int | Literal["auto"] | None, _arg(help_behavior_hint="", metavar="auto|N")
    ] = None
    # how often all images are used
    epochs: int = 20
    # learning rate for batches of 256; scaled for the images of a step
    base_lr: float = 0.0125
    # epochs until the rate is reached; a cosine follows (default: a fifth of --epochs, at most 5;
    # with --batch auto 0)
    warmup_epochs: Number = None
    # let the rate fall to a tenth after these epochs, such as 30 60 80, in place of the cosine
    drop_at: tuple[int, ...] = ()
    # class of torch.optim, or any name of timm's, such as lamb; SGD has Nesterov momentum
    optimizer: str = "SGD"
    # rate of each layer over that of the one after it, by timm, such as 0.75 to fine-tune
    layer_decay: Rate = None
    # of SGD
    momentum: float = 0.9
    # on all but biases and normalisation
    weight_decay: float = 5e-4
    # part of a label that is spread over all classes
    label_smoothing: float = 0.0
    # scale gradients down to at most this norm
    clip: Rate = None
    # keep a moving average of the weights with this decay, such as 0.999, and test with it
    ema: Rate = None
    # start from the weights in a state dict or checkpoint, as far as they fit
    init: Folder = None
    # random seed: weights, order of the images, augmentation
    seed: int = 0

    # sub-steps of each replica, in place of --micro-batch-size
    accum: Number = None
    # images of a sub-step (default: 64)
    micro_batch_size: Number = None
    # a device for each replica, such as cuda:0,cuda:1 or cuda:0 cuda:1 (default: every GPU; without
    # any, four replicas on the CPU)
    devices: Devices = ()
    # relative sizes of the replicas' shares of a batch, such as 2,1,1 or 2 1 1, or auto: after the
    # devices' measured pace (default: equal)
    shares: Annotated[
        Literal["auto"] | tuple[float, ...] | None,
        _arg(help_behavior_hint="", metavar="auto|X [X ...]"),
    ] = None
    # measure the gradient's noise scale: about the batch beyond which more images buy few steps
    # (McCandlish et al. 2018); needs two replicas
    measure_noise: bool = False
    # keep the optimizer's state on all devices, a part on each, rather than on the first; same bits
    shard_optimizer: bool = False
    # compile the network with torch.compile
    compile: bool = False
    # compute in bfloat16 or float16 where that is safe; float16 with a gradient scaler
    autocast: Annotated[Literal["bfloat16", "float16"] | None, _arg(help_behavior_hint="")] = None
    # keep images with their channels last in memory, often faster for convolutions
    channels_last: bool = False

    # log to this project of Weights & Biases, too (WANDB_MODE=offline: without a network)
    wandb: Name = None
    # folder for what is written (default: a new one in runs/; with torchrun runs/train-ID, after
    # its --rdzv-id)
    out: Annotated[Path, _arg(help_behavior_hint="", metavar="PATH")] = field(
        default_factory=lambda: Path("runs") / f"train-{run_id() or time.strftime('%Y%m%d-%H%M%S')}"
    )
    # steps between checkpoints; the last step always has one
    checkpoint_every: int = 100
    # go on from the checkpoint in --out, which must be given: bit for bit on as many machines and
    # replicas
    resume: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the options that determine the result of the run, up to rounding."""
        return {name: value for name, value in self.record().items() if name in _DECISIVE.split()}

    def record(self) -> dict[str, Any]:
        """Return all options as values that JSON can represent."""
        values = dataclasses.asdict(self)
        return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line, and fill in the defaults that depend on other options."""
    options: Options = read(Options, arguments, "train")
    grows, size, warmup = options.batch == "auto", options.micro_batch_size, options.warmup_epochs
    if options.accum is not None and (grows or size is not None):
        raise UsageError(
            "--accum and --micro-batch-size say the same thing twice: give one; --batch auto keeps "
            "the size of a sub-step while the batch grows, so it takes --micro-batch-size"
        )
    size = size or (None if options.accum else _MICRO_BATCH_SIZE)
    if warmup is None:
        warmup = 0 if grows else min(_LONGEST_DEFAULT_WARMUP, options.epochs // 5)
    for earlier, later in pairwise((warmup, *options.drop_at, options.epochs)):
        if earlier >= later:
            raise UsageError(
                f"--warmup-epochs, --drop-at and --epochs must rise, and {later} follows {earlier}"
            )
    return dataclasses.replace(
        options,
        warmup_epochs=warmup,
        micro_batch_size=size,
        accum=options.accum or 1,
        measure_noise=options.measure_noise or grows,
    )


def exit_code_of(command: str, action: Callable[[], int]) -> int:
    """Run a command and return its exit code. A wrong argument prints one line on stderr."""
    try:
        return action()
    except UsageError as error:
        print(f"scatterpar {command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"scatterpar {command}: interrupted", file=sys.stderr)
        return 130


def read(kind: type[Any], arguments: Sequence[str], command: str) -> Any:
    """Read a command's options; those of a `--config` file come first."""
    words = [part for w in arguments for part in (w.split("=", 1) if w[:2] == "--" else [w])]
    files = [later for word, later in pairwise(words) if word == "--config"]
    options = tyro.cli(
        kind,
        prog=f"python -m scatterpar {command}",
        args=[*_separated([*(word for file in files for word in _of_file(Path(file))), *words])],
        description=f"{inspect.getdoc(kind)}\n\n{kind.examples}",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    for range_, fits, names in _RANGES:
        for name in names.split():
            value = getattr(options, name, None)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(fits(x) for x in numbers if isinstance(x, int | float)):
                raise UsageError(f"--{name.replace('_', '-')}: {value} is not {range_}")
    return options


def _separated(words: Sequence[str]) -> Iterator[str]:
    """Split the values of `_LISTS` at commas."""
    option = ""
    for word in words:
        option = word if word[:2] == "--" else option
        yield from word.replace(",", " ").split() if option in _LISTS else [word]


def _of_file(path: Path) -> Iterator[str]:
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}") from error
    for name, value in options.items():
        if value is not False:
            yield "--" + name.replace("_", "-")
        if not isinstance(value, bool):
            yield from map(str, value if isinstance(value, list) else [value])
