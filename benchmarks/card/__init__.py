"""What can only be settled on GPUs, on one page, in five minutes: ``python -m benchmarks card``.

::

    machine        facts, rates, copies       one row after the other, since times are taken
    correctness    tests, looks, bits         several rows at a time
    speed          step times                 one row after the other

A row is a process with a time limit of its own (``row.py``). What it finds is a line of the page,
which is written when the row says it: whoever ends the run keeps all lines so far. README.md says
what is a failure.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.card.page import Page
from benchmarks.card.rows import GROUPS
from benchmarks.card.run import Run
from benchmarks.card.setting import Setting, draw
from scatterpar.devices.device_ids import parse_devices, resolve

# The longest time of the whole run. Rows have rounds for it, and more for more seconds.
SECONDS = 300.0


def main(arguments: Sequence[str]) -> int:
    """Write the page. Returns the exit code: 0 if no row failed, 1 if one did, 2 for arguments."""
    parser = argparse.ArgumentParser("python -m benchmarks card", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--devices", default="", help="such as 0,1; default: all GPUs")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="the longest time of all"
    )
    parser.add_argument(
        "--page", type=Path, default=Path("runs/card.md"), help="default: %(default)s"
    )
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="WORD", help="rows with such a name"
    )
    parser.add_argument(
        "--under", default="", metavar="MODULE", help="null GPUs: nullcuda.values"
    )
    options = parser.parse_args(arguments)
    try:
        setting = _setting(options)
    except (TypeError, ValueError) as error:
        print(f"benchmarks card: error: {error}", file=sys.stderr)
        return 2
    page = Page(options.page, setting)
    run = Run(setting, page, options.seconds)
    for group in GROUPS:
        rows = [row for row in group.rows if _is_chosen(row.name, options.only)]
        run.take(group, rows)
    page.end()
    print(f"the page to paste: {options.page}")
    return int(page.has_failed)


def _setting(options: argparse.Namespace) -> Setting:
    words = [options.devices] if options.devices else ()
    names = parse_devices(words) or None
    if names is None and not torch.accelerator.is_available():
        names = [f"cpu:{index}" for index in range(4)]
    devices = tuple(dict.fromkeys(resolve(names)))  # each of them once
    is_real = devices[0].type != "cpu" and not options.under
    folder = options.page.resolve().with_suffix("")
    draw(folder)
    scale = options.seconds / SECONDS
    return Setting(devices, not is_real, is_real, options.under, folder, scale)


def _is_chosen(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)
