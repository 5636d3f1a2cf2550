"""The command line of `python -m scatterpar train`: one field each, read by tyro."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import math
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro
from tyro.conf import UseAppendAction

from scatterpar.train.data import EMBEDDED
from scatterpar.train.errors import UsageError
from scatterpar.train.machines import run_id
from scatterpar.train.pictures import Augmentation, Reading

LARGE_BATCH = 4096
DEFAULT_ACCUM = 16
DEFAULT_MICRO_BATCH_SIZE = 64  # where the batch grows
_LONGEST_DEFAULT_WARMUP = 5
_DECISIVE = (
    *("data", "image_size", "augment", "smallest_crop", "erase", "mixup", "cutmix", "skip_broken"),
    *("model", "batch", "epochs", "base_lr", "warmup_epochs", "drop_at", "optimizer"),
    *("optimizer_option", "layer_decay", "momentum", "weight_decay", "label_smoothing", "clip"),
    *("ema", "autocast", "seed"),
)
_EXAMPLES = """examples:
  python -m scatterpar train                                    the images that are included
  python -m scatterpar train --data photos --model timm:resnet18 --batch 1024 --skip-broken 10
  python -m scatterpar train --data photos --batch auto --autocast bfloat16 --out runs/photos
  python -m scatterpar train --config photos.toml --epochs 90   a file of options, in TOML
  python -m scatterpar train --out runs/photos --resume …       goes on where that run was

Writes into --out: report.html (look at it in a browser), metrics.jsonl (one JSON object a line),
curves.png, run.json (options, versions, commit), checkpoint.pt, best.pt, and TensorBoard's event
file where that is installed. What torchrun starts again goes on from the checkpoint by itself.
Exit codes: 0 finished, 1 failed check or diverged training, 2 wrong argument or data, 130
interrupted, 143 ended by SIGTERM; both keep what was reached."""


def _read_as(
    kind: Callable[[str], Any], wanted: str, fits: Callable[[Any], bool], metavar: str = "N"
) -> Any:
    """What reads a value, and says what was wanted where it is another."""

    def read(words: list[str]) -> Any:
        with contextlib.suppress(ValueError):
            value = kind(words[0])
            if fits(value):
                return value
        raise ValueError(f"{words[0]!r} is not {wanted}")

    def shown(value: Any) -> list[str]:
        return [",".join(map(str, value)) if isinstance(value, tuple) else str(value)]

    return tyro.constructors.PrimitiveConstructorSpec(1, metavar, read, lambda _: True, shown)


def _number(
    above: float = -math.inf, least: float = -math.inf, below: float = math.inf, most: float = 1e38
) -> Any:
    limits = {"above": above, "at least": least, "below": below, "at most": most}
    wanted = " and ".join(f"{word} {x:g}" for word, x in limits.items() if abs(x) < 1e38)
    return _read_as(
        float, f"a number {wanted}", lambda x: above < x < below and least <= x <= most, "X"
    )


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(part) for part in text.split(","))


def _or_auto(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: text if text == "auto" else kind(text)


def _any(_: Any) -> bool:
    return True


def _is_positive(value: Any) -> bool:
    return value == "auto" or bool((min(value) if isinstance(value, tuple) else value) > 0)


_COUNT = _read_as(int, "a whole number above zero", _is_positive)
_WHOLE = _read_as(int, "a whole number, zero or above", lambda n: n >= 0)
# Where None is the default, the help's own words say what that means.
_OPTIONAL = tyro.conf.arg(help_behavior_hint="")
Count = Annotated[int, _COUNT]
CountOrNone = Annotated[int | None, _COUNT, _OPTIONAL]
Whole = Annotated[int, _WHOLE]
WholeOrNone = Annotated[int | None, _WHOLE, _OPTIONAL]
Seed = Annotated[int, _read_as(int, "a whole number below 2**31", lambda n: 0 <= n < 2**31)]
Batch = Annotated[
    int | Literal["auto"],
    _read_as(_or_auto(int), "auto, or a whole number above zero", _is_positive, "N|auto"),
]
Epochs = Annotated[
    tuple[int, ...],
    _read_as(_list_of(int), "whole numbers above zero, such as 30,60", _is_positive, "LIST"),
]
Shares = Annotated[
    tuple[float, ...] | Literal["auto"] | None,
    _read_as(_or_auto(_list_of(float)), "auto, or numbers such as 2,1", _is_positive, "LIST|auto"),
    _OPTIONAL,
]
Name = Annotated[str | None, _read_as(str, "a name", _any, "NAME"), _OPTIONAL]
Folder = Annotated[Path | None, _read_as(Path, "a path", _any, "PATH"), _OPTIONAL]


@dataclass(frozen=True)
class Options:
    """Train a network on large batches, in one process; with torchrun on several machines."""

    examples: ClassVar[str] = _EXAMPLES

    # options from a TOML file, such as `epochs = 90`; those of the command line come after it
    config: Folder = None

    # folder of images in train/CLASS/ and test/CLASS/ (or val); or folder (or folder/prefix) of
    # MNIST-family IDX files, gzip or not; or torchvision:NAME, a set of torchvision.datasets such
    # as torchvision:CIFAR10; or datasets:NAME, a set of Hugging Face's datasets or its folder.
    # Names: embedded (Fashion-MNIST's test set, 8,192 to train on and 1,808 to test), fashion-mnist
    # (all of it, from Debian's package dataset-fashion-mnist). A folder of that name comes first
    data: str = EMBEDDED
    # where the sets of libraries lie
    data_root: Path = Path("data")
    # fetch the library's set where it is missing
    download: bool = False
    # height and width that pictures are brought to (default: 224, or the shorter side of the
    # first picture where that is smaller)
    image_size: CountOrNone = None
    # how training pictures are varied: crop (random crop and flip, the default), trivial or rand
    # (that and TrivialAugment or RandAugment), a policy of timm's such as rand-m9-mstd0.5, or none
    augment: Name = None
    # smallest part of a picture's area that a random crop shows
    smallest_crop: Annotated[float, _number(above=0, most=1)] = 0.08
    # how often a rectangle is erased
    erase: Annotated[float, _number(least=0, most=1)] = 0.0
    # mix pictures and labels by mixup, with this alpha
    mixup: Annotated[float, _number(least=0)] = 0.0
    # mix pictures and labels by CutMix, with this alpha
    cutmix: Annotated[float, _number(least=0)] = 0.0
    # processes that read pictures (default: one for each core, at most 16; 0: none)
    workers: WholeOrNone = None
    # look at all pictures first, in parallel, and write the list of those that cannot be read
    # into broken.txt in --out
    check_data: bool = False
    # leave out so many pictures that cannot be read, and count them, rather than stop
    skip_broken: Whole = 0

    # cnn, resnet20, timm:NAME such as timm:resnet50, or package.module:callable, called with
    # num_classes where it has that parameter, such as torchvision.models:resnet101
    model: str = "cnn"
    # images of a step, over all machines; no more than there are to train on. auto: from 256 on,
    # doubled after an epoch if the gradient's noise scale has reached the double, as long as an
    # epoch keeps 8 steps; needs two replicas
    batch: Batch = LARGE_BATCH
    # how often all images are used
    epochs: Count = 20
    # learning rate for batches of 256; scaled for the images of a step
    base_lr: Annotated[float, _number(above=0)] = 0.0125
    # epochs until the rate is reached; a cosine follows (default: a fifth of --epochs, at most 5;
    # with --batch auto 0)
    warmup_epochs: WholeOrNone = None
    # let the rate fall to a tenth after these epochs, such as 30,60,80, in place of the cosine
    drop_at: Epochs = ()
    # class of torch.optim, or any name of timm's, such as lamb; SGD has Nesterov momentum
    optimizer: str = "SGD"
    # keyword of that class, such as betas=(0.9,0.95); may be given several times
    optimizer_option: UseAppendAction[tuple[str, ...]] = ()
    # rate of each layer over that of the one after it, by timm, such as 0.75 to fine-tune
    layer_decay: Annotated[float | None, _number(above=0, most=1), _OPTIONAL] = None
    # of SGD
    momentum: Annotated[float, _number(least=0, below=1)] = 0.9
    # on all but biases and normalisation
    weight_decay: Annotated[float, _number(least=0)] = 5e-4
    # part of a label that is spread over all classes
    label_smoothing: Annotated[float, _number(least=0, below=1)] = 0.0
    # scale gradients down to at most this norm
    clip: Annotated[float | None, _number(above=0), _OPTIONAL] = None
    # keep a moving average of the weights with this decay, such as 0.999, and test with it
    ema: Annotated[float | None, _number(above=0, below=1), _OPTIONAL] = None
    # let residual blocks start as the identity
    zero_init_residual: bool = False
    # start from the weights in a state dict or checkpoint, as far as they fit
    init: Folder = None
    # decides all that is random
    seed: Seed = 0

    # sub-steps of each replica (default: 16)
    accum: CountOrNone = None
    # the other way to say it: images of a sub-step (with --batch auto the only one, default 64)
    micro_batch_size: CountOrNone = None
    # number of replicas (default: one for every GPU; without any, 4 on the CPU)
    replicas: CountOrNone = None
    # a device for each replica, such as cuda:0,cuda:1
    devices: Name = None
    # relative sizes of the replicas' shares of a batch, such as 2,1,1, or auto: after the
    # devices' measured pace (default: equal)
    shares: Shares = None
    # measure the gradient's noise scale: about the batch beyond which more images buy few steps
    # (McCandlish et al. 2018); needs two replicas
    measure_noise: bool = False
    # keep the optimizer's state on all devices, a part on each, rather than on the first; same bits
    shard_optimizer: bool = False
    # compile the network with torch.compile
    compile: bool = False
    # compute in bfloat16 or float16 where that is safe; float16 with a gradient scaler
    autocast: Annotated[Literal["bfloat16", "float16"] | None, _OPTIONAL] = None
    # keep images with their channels last in memory, which convolutions like
    channels_last: bool = False

    # folder for what is written (default: a new one in runs/; with torchrun runs/train-ID, after
    # its --rdzv-id)
    out: Folder = None
    # epochs between tests; the last one always has one
    eval_every: Count = 1
    # steps between checkpoints; the last step always has one
    checkpoint_every: Count = 100
    # go on from the checkpoint in --out, which must be given: bit for bit on as many machines and
    # replicas
    resume: bool = False
    # first compare the first step's gradients with a plain whole-batch backward; needs the memory
    # for that, in float64
    check: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the options that decide the run, which must be the same when it goes on.

        How the work is divided is not among them: that may differ, and changes no more than
        rounding.
        """
        return {name: value for name, value in self.record().items() if name in _DECISIVE}

    def record(self) -> dict[str, Any]:
        """Return all options as values that JSON has."""
        values = dataclasses.asdict(self)
        return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        assert self.out is not None, "parse has named it"
        return self.out

    @property
    def tested_together(self) -> int:
        """How many images are tested at once."""
        return LARGE_BATCH if self.batch == "auto" else self.batch

    @property
    def reading(self) -> Reading:
        """How pictures in files are read."""
        wanted = Augmentation(
            self.augment or "crop", self.smallest_crop, self.erase, self.mixup, self.cutmix
        )
        varied = self.augment is not None or wanted != Augmentation()
        return Reading(
            self.image_size, wanted if varied else None, self.seed, self.data_root, self.download
        )


def parse(arguments: Sequence[str]) -> Options:
    """Turn the command line into options.

    Raises:
        UsageError: options do not go together.
        SystemExit: help was asked for, or an argument cannot be read.

    >>> options = parse(["--epochs", "10"])
    >>> options.batch, options.accum, options.warmup_epochs
    (4096, 16, 2)
    """
    given: Options = read(Options, arguments, "train")
    if given.micro_batch_size is not None and given.accum is not None:
        raise UsageError("--accum and --micro-batch-size say the same thing twice: give one")
    if given.devices is not None and given.replicas is not None:
        raise UsageError("--devices already says how many replicas there are: drop --replicas")
    grows, size, accum = given.batch == "auto", given.micro_batch_size, given.accum
    if grows and accum is not None:
        raise UsageError(
            "--batch auto keeps the size of a sub-step while the batch grows: give "
            "--micro-batch-size in place of --accum"
        )
    size = size or (DEFAULT_MICRO_BATCH_SIZE if grows else None)
    warmup = given.warmup_epochs
    if warmup is None:
        warmup = 0 if grows else min(_LONGEST_DEFAULT_WARMUP, given.epochs // 5)
    if warmup >= given.epochs:
        raise UsageError(f"--warmup-epochs {warmup} must be less than --epochs {given.epochs}")
    for earlier, epoch in zip((warmup, *given.drop_at), given.drop_at, strict=False):
        if not earlier < epoch < given.epochs:
            raise UsageError(
                f"--drop-at: {epoch} must be after the {earlier} before "
                f"it (the warm-up's end included) and below --epochs {given.epochs}"
            )
    keywords_of(given.optimizer_option)
    if given.out is None and given.resume and run_id() is None:
        raise UsageError("--resume goes on from a checkpoint: name the folder it is in with --out")
    # With torchrun a name that a restart finds again, and that all its machines know.
    name = run_id() or time.strftime("%Y%m%d-%H%M%S")
    return dataclasses.replace(
        given,
        accum=accum or (DEFAULT_ACCUM if size is None else 1),
        micro_batch_size=size,
        warmup_epochs=warmup,
        measure_noise=given.measure_noise or grows,
        out=given.out or Path("runs") / f"train-{name}",
    )


def read(kind: type[Any], arguments: Sequence[str], command: str) -> Any:
    """Read a command's options, those of a `--config` first.

    Raises:
        UsageError: the file cannot be read.
        SystemExit: help was asked for, or an argument cannot be read.
    """
    words = [part for word in arguments for part in _opened(word)]
    files = [later for word, later in pairwise(words) if word == "--config"]
    return tyro.cli(
        kind,
        prog=f"python -m scatterpar {command}",
        args=[*(word for file in files for word in _of_file(Path(file))), *words],
        description=f"{inspect.getdoc(kind)}\n\n{kind.examples}",
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _opened(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--config=") else [word]


def _of_file(path: Path) -> Iterable[str]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}") from error
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            yield from (option,) if value else ()
        elif name.replace("-", "_") == "optimizer_option":
            for entry in value:
                yield from (option, str(entry))
        else:
            yield from (
                option,
                ",".join(map(str, value)) if isinstance(value, list) else str(value),
            )


def keywords_of(texts: Iterable[str]) -> dict[str, Any]:
    """Read `name=value`s; a value is a Python literal, or else a string.

    Raises:
        UsageError: one is not of that form.

    >>> keywords_of(["betas=(0.9, 0.95)", "fused=True", "mode=fast"])
    {'betas': (0.9, 0.95), 'fused': True, 'mode': 'fast'}
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise UsageError(f"--optimizer-option: {text!r} is not of the form name=value")
        found[name] = value
        with contextlib.suppress(ValueError, SyntaxError):
            found[name] = ast.literal_eval(value)
    return found
