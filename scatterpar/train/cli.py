"""`python -m scatterpar train`: what its options mean together, and its exit code."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scatterpar.train.errors import UsageError
from scatterpar.train.flags import DEFAULT_ACCUM, DEFAULT_MICRO_BATCH_SIZE, PROGRAM, parser
from scatterpar.train.machines import run_id
from scatterpar.train.options import Options
from scatterpar.train.run import run

_LONGEST_DEFAULT_WARMUP = 5


def main(arguments: Sequence[str]) -> int:
    """Run the tool; return the exit code.

    0: finished; 1: a failed check or diverged training; 2: an argument or the data is wrong,
    with one line on stderr that says what; 130: interrupted; 143: ended by SIGTERM.
    """
    try:
        return run(parse(arguments))
    except UsageError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
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
    given = parser().parse_args(arguments)
    if given.micro_batch_size is not None and given.accum is not None:
        raise UsageError("--accum and --micro-batch-size say the same thing twice: give one")
    if given.devices is not None and given.replicas is not None:
        raise UsageError("--devices already says how many replicas there are: drop --replicas")
    grows = given.batch == "auto"
    if grows:
        _let_grow(given)
    if given.warmup_epochs is None:
        given.warmup_epochs = 0 if grows else min(_LONGEST_DEFAULT_WARMUP, given.epochs // 5)
    if given.warmup_epochs >= given.epochs:
        raise UsageError(
            f"--warmup-epochs {given.warmup_epochs} must be less than --epochs {given.epochs}"
        )
    for earlier, epoch in zip((given.warmup_epochs, *given.drop_at), given.drop_at, strict=False):
        if not max(earlier, given.warmup_epochs) < epoch < given.epochs:
            raise UsageError(
                f"--drop-at: {epoch} must be after the {max(earlier, given.warmup_epochs)} before "
                f"it (the warm-up's end included) and below --epochs {given.epochs}"
            )
    given.optimizer_options = dict(given.optimizer_options)
    if given.accum is None:
        given.accum = DEFAULT_ACCUM if given.micro_batch_size is None else 1
    if given.out is None and given.resume and run_id() is None:
        raise UsageError("--resume goes on from a checkpoint: name the folder it is in with --out")
    if given.out is None:
        # With torchrun a name that a restart finds again, and that all its machines know.
        name = run_id() or time.strftime("%Y%m%d-%H%M%S")
        given.out = Path("runs") / f"train-{name}"
    return Options(**vars(given))


def _let_grow(given: argparse.Namespace) -> None:
    """Measure what the batch follows, and keep the size of a sub-step while it grows."""
    if given.accum is not None:
        raise UsageError(
            "--batch auto keeps the size of a sub-step while the batch grows: give "
            "--micro-batch-size in place of --accum"
        )
    given.measure_noise = True
    given.micro_batch_size = given.micro_batch_size or DEFAULT_MICRO_BATCH_SIZE
