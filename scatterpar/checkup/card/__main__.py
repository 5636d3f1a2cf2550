"""What can only be settled on GPUs, in ten minutes on eight of them, on one page to paste.

Each check has a threshold and a verdict. Checks run in processes with a time limit: one that hangs
or crashes fails, and the others go on. The page says what cannot run on this machine, and why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from scatterpar.checkup.card.checks import CHECKS
from scatterpar.checkup.card.setting import NotRun, Setting
from scatterpar.checkup.doctor import describe, load_per_core
from scatterpar.devices.runtime import parse_devices, resolve

_RESULT = "@result "  # begins a line of a process's output
PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


class Result(NamedTuple):
    """How a check went."""

    verdict: str
    words: str


Results = Mapping[str, Mapping[int, Result]]  # by process and number of the check


def main(arguments: Sequence[str]) -> int:
    """Run the checks; 0 if none failed, 1 if one did, 2 for a wrong argument."""
    given = _parser().parse_args(arguments)
    try:
        setting = _setting(given)
    except (TypeError, ValueError) as error:
        print(f"benchmarks card: error: {error}", file=sys.stderr)
        return 2
    if given.numbers is not None:
        find(given.only[0], given.numbers, setting)
        return 0
    folder, start = given.out.resolve(), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    facts = describe(setting.devices, load_per_core())
    results: dict[str, dict[int, Result]] = {}
    for process in given.only or CHECKS:
        print(f"{process} ({folder / process}.txt)", flush=True)
        results[process] = run(process, setting, folder)
        for number, result in results[process].items():
            print(f"  {CHECKS[process][number].what}: {': '.join(result)}", flush=True)
        words = page(results, facts, setting, time.monotonic() - start)
        folder.with_suffix(".md").write_text(words, encoding="utf-8")
    print(f"the page to paste: {folder.with_suffix('.md')}")
    verdicts = [result.verdict for each in results.values() for result in each.values()]
    return int(FAILED in verdicts)


def run(process: str, setting: Setting, folder: Path) -> dict[int, Result]:
    """Run the checks of one process; if it ends early, those that are left run in another one."""
    results, waiting = {}, []
    for number, check in enumerate(CHECKS[process]):
        if why := check.missing(setting):
            results[number] = Result(NOT_RUN, why)
        else:
            waiting.append(number)
    log = folder / f"{process}.txt"
    log.write_text("")
    while waiting:
        found, how = _run_some(process, waiting, setting, log)
        results |= found
        waiting = [number for number in waiting if number not in found]
        if waiting:
            results[waiting.pop(0)] = Result(FAILED, how)
    return dict(sorted(results.items()))


def _run_some(
    process: str, numbers: Sequence[int], setting: Setting, log: Path
) -> tuple[dict[int, Result], str]:
    """Run these checks until the process ends, or one of them takes too long.

    Returns the results so far, and how the process ended.
    """
    command = ["scatterpar.checkup.card", "--only", process, "--numbers", *map(str, numbers)]
    command += ["--devices", *map(str, setting.devices), *["--quick"] * setting.small]
    command += ["--under", setting.under] if setting.under else []
    begin, found, since = log.stat().st_size, dict[int, Result](), time.monotonic()
    with log.open("a") as file:
        running = setting.start(*command, stdout=file, session=True)
    try:
        while True:
            code = running.poll()
            with log.open(errors="replace") as file:
                file.seek(begin)
                lines = [line for line in file if line.startswith(_RESULT) and line[-1] == "\n"]
            if len(lines) > len(found):
                pairs = (json.loads(line.removeprefix(_RESULT)) for line in lines)
                found, since = {n: Result(*result) for n, result in pairs}, time.monotonic()
            if code is not None or len(found) == len(numbers):
                return found, f"its process ended with {code}; see {log.name}"
            limit = setting.limit(CHECKS[process][numbers[len(found)]].seconds)
            if time.monotonic() - since > limit:
                return found, f"not done after {limit:g} s, and ended"
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def find(process: str, numbers: Sequence[int], setting: Setting) -> None:
    """Do these checks in this process, and print their results."""
    for number in numbers:
        try:
            passed, words = CHECKS[process][number].find(setting)
            result = Result(PASSED if passed else FAILED, words)
        except NotRun as why:
            result = Result(NOT_RUN, str(why))
        except Exception as error:
            traceback.print_exc()
            result = Result(FAILED, f"{type(error).__name__}: {error}".splitlines()[0][:300])
        print(f"\n{_RESULT}{json.dumps([number, result])}", flush=True)


def page(results: Results, facts: Mapping[str, str], setting: Setting, seconds: float) -> str:
    """The page, in Markdown: the table first."""
    lines = ["| check | needs | threshold | result | verdict |", "|---|---|---|---|---|"]
    for process, each in results.items():
        for number, (verdict, words) in each.items():
            check = CHECKS[process][number]
            cells = check.what, check.needs, check.threshold, words, verdict
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    count = len(lines) - 2
    lines += ["", f"{count} checks in {seconds / 60:.0f} minutes, by `python -m benchmarks card`."]
    if not setting.is_real:
        lines += ["", "**No GPU computed this: null GPUs, or replicas on a processor.**"]
    if setting.small:
        lines += ["", "Tiny sizes, to try the checks."]
    lines += ["", "```text", *(f"{name}: {words}" for name, words in facts.items()), "```", ""]
    return "\n".join(lines)


def _setting(given: argparse.Namespace) -> Setting:
    """Where the checks run; without a GPU on virtual devices, in tiny sizes."""
    names = parse_devices(given.devices or ()) or None
    if names is None and not torch.accelerator.is_available():
        names = [f"cpu:{i}" for i in range(4)]
    devices = tuple(dict.fromkeys(resolve(names)))
    setting = Setting(devices, given.quick, given.under)
    return setting if setting.is_real else Setting(devices, True, given.under)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks card", description=__doc__)
    parser.add_argument("--devices", nargs="+", help="such as 0,1; default: all GPUs")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/card"),
        help="the folder for what checks print; the page is beside it; default: %(default)s",
    )
    parser.add_argument("--only", nargs="+", choices=CHECKS, help="only these checks")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the checks")
    parser.add_argument("--under", default="", metavar="MODULE", help="null GPUs: nullcuda")
    parser.add_argument("--numbers", nargs="+", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
