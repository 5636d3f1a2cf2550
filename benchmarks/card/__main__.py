"""Figures from a machine's cards: one command, ten minutes, one tar file to keep or to send.

``python -m benchmarks card`` runs, each in a process of its own and within a time limit: the
tests marked ``cuda``, the doctor, looks at the first card from inside, threads that launch, an
assertion on the card, and the step time of ResNet-50 and of GPT-2 small beside its peers. A part
that fails says so, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.card.page import write_page
from benchmarks.card.parts import PARTS, TESTS, run_part
from benchmarks.environment import describe
from scatterpar.devices.runtime import resolve

_SIMULATED = "SIMULATED_ACCELERATOR"  # where the tests' simulated accelerator was built


def main(arguments: Sequence[str]) -> int:
    """Run the parts; 0 if all of them went well, 1 if one did not, 2 for a wrong argument."""
    given = _parser().parse_args(arguments)
    try:
        devices = _devices(given.devices, given.simulated)
    except (TypeError, ValueError) as error:
        print(f"benchmarks card: error: {error}", file=sys.stderr)
        return 2
    folder = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    is_there = not (given.simulated or given.under or devices[0].startswith("cpu"))
    small = given.quick or given.simulated or devices[0].startswith("cpu")
    if small and not given.quick:
        print("no card here: everything runs in tiny sizes, and the times mean nothing")
    facts = {"devices": ", ".join(devices), **describe()}
    outcomes = []
    under = "benchmarks.card.simulated" if given.simulated else given.under
    with _accelerator(given.simulated) as environment:
        for part in PARTS:
            if part.name in (given.only or [part.name]):
                if not is_there:  # nobody pays for a card by the minute, and the host may be busy
                    part = replace(part, seconds=10 * part.seconds)
                print(f"{part.name}: at most {part.seconds:g} s ...", end=" ", flush=True)
                outcomes.append(run_part(part, devices, folder, small, environment, under))
                print(outcomes[-1].words, flush=True)
                write_page(folder, facts, outcomes, small)
    packed = shutil.make_archive(str(folder), "gztar", folder.parent, folder.name)
    print(f"\n{folder / 'README.md'}, and all of it: {packed}")
    return 0 if all(outcome.went_well for outcome in outcomes) else 1


def _devices(given: str | None, simulated: bool) -> list[str]:
    """One for each replica."""
    if simulated:  # another process has them
        return (given or "simulated:0,simulated:1").split(",")
    names: list[int | str] | None = None
    if given is not None:
        names = [int(name) if name.isdecimal() else name for name in given.split(",")]
    elif not torch.accelerator.is_available():
        names = ["cpu:0", "cpu:1"]
    return [str(device) for device in resolve(names)]


@contextlib.contextmanager
def _accelerator(simulated: bool) -> Iterator[dict[str, str]]:
    """The environment of the parts, with a simulated accelerator if one is asked for."""
    if not simulated:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        library = os.environ.get(_SIMULATED)
        if library is None:
            if shutil.which("g++") is None:
                raise SystemExit("benchmarks card: error: --simulated needs g++ to build it")
            sys.path.insert(0, str(TESTS))
            from simulated import build

            library = str(build(Path(folder)))
        yield {_SIMULATED: library, "OMP_NUM_THREADS": "1"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks card", description=__doc__)
    parser.add_argument(
        "--devices", help="one for each replica, such as 0,1 or cpu:0,cpu:1; default: all cards"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/card"), help="the folder; default: %(default)s"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[part.name for part in PARTS], help="these parts alone"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try it out")
    parser.add_argument(
        "--simulated",
        action="store_true",
        help="try it out on the accelerator of tests/simulated, which takes g++; tiny sizes",
    )
    parser.add_argument(
        "--under", metavar="MODULE", help="run each part as python -m MODULE PART, such as nullcuda"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
