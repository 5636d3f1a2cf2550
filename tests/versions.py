"""Two versions of the package, side by side on the same programs: what differs?

    python -m tests.versions OLD NEW                    before a release
    python -m tests.versions v0.4.0 HEAD --only verify  programs with such a name
    python -m tests.versions OLD NEW --on cpu cards     some of the places
    python -m tests.versions OLD NEW --null .venv-nullcuda/bin/python

``OLD`` and ``NEW`` are refs of git. Both are checked out into temporary folders, and
both run what ``NEW``, or ``--programs REF``, has of programs: its tests as they are,
among them the table of cases and all right, wrong and adversarial steps; the table of
cases and the tests of accelerators on the simulated accelerator, and on null GPUs where
there are some; its examples and notebooks; and the page of ``benchmarks card``.

Of each call of the package (``harness/outcomes.py``) these are compared:

    test        passes or fails: the step is plain torch's, or not
    outcome     what a call returned or raised
    words       of its error
    told        its warnings
    report      rows, bytes and copies of ``last_step``
    generators  the states of all random generators after it
    bits        of its result, of gradients, parameters and buffers

A difference is printed if it is there again in a second run of both versions: draws
of several threads and times differ from run to run. Differences that several programs
share are one line. The exit code is 1 if there is one: each is either in the changelog,
or mended with a test.

A release must see it, and so must any round of rewriting: tests hold what somebody
thought of, and a version that ran holds everything else.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What runs on the CPU unless --tests names others.
TESTS = (
    "tests/exact/test_cases.py",
    "tests/exact/test_exact.py",
    "tests/exact/test_same_bits.py",
    "tests/batch",
    "tests/devices/cards/test_draws.py",
    "tests/options",
    "tests/pair",
    "tests/replicas",
    "tests/objects",
    "tests/step",
    "tests/verify",
    "tests/test_engine.py",
    "tests/test_sharded.py",
)
# On accelerators.
CARDS = (
    "tests/harness/cases_on_devices.py",
    "tests/devices/cards/test_accelerator.py",
    "tests/devices/cards/test_draws.py",
)
NAMES = ("old", "new")
MOST_CRASHES = 40
ENDED = (0, 1, 5)  # exit codes of pytest: passed, failed, nothing to run
PLACES = ("cpu", "cards", "null", "scripts")
CARD = ("--devices", "cpu:0,cpu:1", "--only", "gradient", "looks", "dropout")
NULL_CARD = ("--under", "nullcuda.values", "--only", "gradient", "looks", "dropout")
LIMIT_SECONDS = 7200
# The environment variable with the built simulated accelerator.
LIBRARY = "SIMULATED_ACCELERATOR"
# In this order: the first one that differs is told, because others follow from it.
PARTS = ("call", "outcome", "words", "told", "report", "generators", "bits")
_SHOWN = 6  # programs of a line
_WIDTH = 240  # of an outcome


def main(arguments):
    """Print the differences. Returns the exit code."""
    parser = argparse.ArgumentParser("python -m tests.versions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("--on", nargs="+", default=PLACES, choices=PLACES)
    parser.add_argument("--programs", metavar="REF", help="default: NEW")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="on the CPU")
    parser.add_argument("--only", default="", help="tests, as pytest's -k names them")
    parser.add_argument("--null", default=str(ROOT / ".venv-nullcuda/bin/python"))
    parser.add_argument("--json", type=Path, help="all differences, for a program")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        refs = options.old, options.new, options.programs or options.new
        versions = Versions(*refs, Path(folder))
        differences = []
        for place in options.on:
            differences += RUNS[place](versions, options)
    print_differences(differences)
    if options.json:
        options.json.write_text(json.dumps([vars(found) for found in differences]))
    return int(bool(differences))


# --- both versions ---


class Versions:
    """Two versions of the package, and the programs that both run.

    Attributes:
        folder: where everything is.
        programs: the files of a version without its package.
    """

    def __init__(self, old, new, programs, folder):
        self.folder = folder
        self.programs = folder / "programs"
        for name, ref in zip(NAMES, (old, new), strict=True):
            _check_out(ref, folder / name, ["scatterpar"])
        _check_out(programs, self.programs, [])
        # A program would find it beside itself, in the place of either version.
        (self.programs / "scatterpar").rename(folder / "unused")

    def run(self, command, variables=None):
        """Run a command with each version at the same time. Returns what they print."""
        processes = [self._start(name, command, variables) for name in NAMES]
        codes = [_code_of(process) for process in processes]
        texts = [(self.folder / name / "printed.txt").read_text() for name in NAMES]
        return list(zip(codes, texts, strict=True))

    def run_tests(self, command, variables=None):
        """Run pytest with each version, again after each crash of its process."""
        for name in NAMES:
            self._outcomes_of(name).unlink(missing_ok=True)
        names = NAMES
        for _ in range(MOST_CRASHES):
            processes = {name: self._start(name, command, variables) for name in names}
            codes = {name: _code_of(process) for name, process in processes.items()}
            names = [name for name, code in codes.items() if code not in ENDED]
            if not names:
                return
        print(
            f"{' and '.join(names)}: more than {MOST_CRASHES} crashes; the rest is left"
        )

    def _start(self, name, command, variables):
        package = self.folder / name
        path = [package, self.programs, self.programs / "tests"]
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",  # and so the same bits
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "OUTCOMES": str(self._outcomes_of(name)),
            **{key: str(value) for key, value in (variables or {}).items()},
        }
        # Files in the place of pipes, which nobody reads while both run.
        with (
            open(package / "printed.txt", "w", encoding="utf-8") as printed,
            open(package / "errors.txt", "w", encoding="utf-8") as errors,
        ):
            return subprocess.Popen(
                [part.replace("{version}", name) for part in command],
                cwd=self.programs,
                env=env,
                stdout=printed,
                stderr=errors,
            )

    def _outcomes_of(self, name):
        return self.folder / name / "outcomes.json"

    def outcomes(self):
        """Of the tests that have run: by version, and by program."""
        by_version = []
        for name in NAMES:
            file = self._outcomes_of(name)
            lines = file.read_text().splitlines() if file.exists() else []
            programs = {}
            for line in map(json.loads, lines):
                earlier = programs.get(line["program"], {"test": "crashed"})
                # An error of the teardown follows the line of the test.
                if earlier["test"] == "crashed" or line["test"] == "failed":
                    programs[line["program"]] = line
            by_version.append(programs)
        return by_version

    def errors(self):
        """The last lines that each version printed."""
        texts = []
        for name in NAMES:
            files = [
                self.folder / name / file for file in ("printed.txt", "errors.txt")
            ]
            texts.append("".join(file.read_text() for file in files)[-2000:])
        return texts


def _code_of(process):
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LIMIT_SECONDS)
    process.kill()
    return process.wait()


def _check_out(ref, folder, paths):
    folder.mkdir()
    archive = subprocess.run(
        ["git", "archive", ref, *paths], cwd=ROOT, check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)


# --- what differs ---


@dataclass(frozen=True)
class Difference:
    """What a program does otherwise in the newer version.

    Attributes:
        place: where it ran.
        program: the test, or the script.
        part: what differs, of ``PARTS`` or "test".
        call: the call of the package.
        old, new: the outcomes.
    """

    place: str
    program: str
    part: str
    call: str
    old: str
    new: str


def differences_of(place, old, new):
    """The first difference of each program."""
    found = []
    for program in sorted({*old, *new}):
        if program not in old or program not in new:
            values = [
                "is there" if program in each else "is missing" for each in (old, new)
            ]
            found.append(Difference(place, program, "program", "", *values))
            continue
        difference = _first_difference(old[program], new[program])
        if difference is not None:
            found.append(Difference(place, program, *difference))
    return found


def _first_difference(old, new):
    if "not collected" in (old["test"], new["test"]) and old["test"] != new["test"]:
        return "test", "collection", *map(_verdict, (old, new))
    pairs = zip(old["calls"], new["calls"], strict=False)
    for number, (before, after) in enumerate(pairs):
        for part in PARTS:
            values = [_part_of(entry, part) for entry in (before, after)]
            if values[0] != values[1]:
                call = f"{before['call']}, call {number}"
                return part, call, *(_shown(value) for value in values)
    if old["test"] != new["test"] or old["why"] != new["why"]:
        return "test", "", *map(_verdict, (old, new))
    if len(old["calls"]) != len(new["calls"]):
        counts = [f"{len(each['calls'])} calls" for each in (old, new)]
        return "call", "", *counts
    return None


def _part_of(entry, part):
    """A part of a call's outcome; of an error there are no bits of a result."""
    if part == "outcome":
        return entry.get("outcome")
    if part == "bits":
        return [entry.get(name) for name in ("bits", "module", "gradients")]
    return entry.get(part)


def _verdict(line):
    return f"{line['test']} {line['why']}".strip()


def _shown(value):
    if isinstance(value, (tuple, list)):
        value = " | ".join(str(part) for part in value if part is not None)
    return str(value)


# --- where programs run ---


def _pytest(versions, place, python, paths, extra, variables=None, plugins=()):
    """Run tests twice. Returns the differences that both runs have."""
    command = [python, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    for plugin in (*plugins, "harness.outcomes"):
        command += ["-p", plugin]
    command += ["-o", "addopts=--import-mode=importlib -p no:anyio -p no:typeguard"]
    command += ["--continue-on-collection-errors", *extra]
    existing = [
        path for path in paths if (versions.programs / path.split("::")[0]).exists()
    ]
    versions.run_tests([*command, *existing], variables)
    old, new = versions.outcomes()
    for name, programs in zip(NAMES, (old, new), strict=True):
        counts = Counter(line["test"] for line in programs.values())
        print(f"{place}, {name}: {dict(counts)}", flush=True)
    if not old or not new:
        for text in versions.errors():
            print(text)
        raise SystemExit(f"{place}: nothing was run")
    first = differences_of(place, old, new)
    again = sorted({found.program.split("[")[0] for found in first})
    if not again:
        return []
    # Whole functions, because ids may have any signs.
    files = sorted({program.split("::")[0] for program in again})
    chosen = files if len(again) > 200 else again
    versions.run_tests([*command, *chosen], variables)
    second = set(differences_of(place, *versions.outcomes()))
    return [found for found in first if found in second]


def on_cpu(versions, options):
    """The tests as they are."""
    extra = ["-k", options.only] if options.only else []
    return _pytest(versions, "cpu", sys.executable, options.tests, extra)


def on_simulated(versions, options):
    """The table of cases, and the tests of accelerators, on the simulated one."""
    library = _simulated_accelerator(versions)
    if library is None:
        print("cards: there is no compiler, and so no simulated accelerator")
        return []
    extra = ["-k", options.only] if options.only else []
    variables = {LIBRARY: library}
    plugins = ["simulated"]
    return _pytest(versions, "cards", sys.executable, CARDS, extra, variables, plugins)


def _simulated_accelerator(versions):
    """The file of the built library: one that is there already, or a new one."""
    if LIBRARY in os.environ:
        return os.environ[LIBRARY]
    build = "import simulated, pathlib, sys; simulated.build(pathlib.Path(sys.argv[1]))"
    env = os.environ | {"PYTHONPATH": str(versions.programs / "tests")}
    command = [sys.executable, "-c", build, str(versions.folder)]
    code = subprocess.run(command, env=env, check=False).returncode
    return None if code else versions.folder / "accelerator.so"


def on_null_gpus(versions, options):
    """The same on null GPUs, and the page of ``benchmarks card``."""
    if not Path(options.null).exists():
        print(f"null: {options.null} is not there: tests/nullcuda/run makes it")
        return []
    extra = ["-k", options.only] if options.only else []
    # The plugin looks for races in each test; values are enough here.
    variables = {"NULLCUDA_DEVICES": 2}
    plugins = ["harness.null_values"]
    found = _pytest(versions, "null", options.null, CARDS, extra, variables, plugins)
    if not options.only:
        found += _script(
            versions,
            "null",
            [options.null, "-W", "ignore", "-m", "benchmarks", "card", *NULL_CARD],
            variables,
        )
    return found


def scripts(versions, options):
    """Examples, notebooks, and the page of the CPU, by what they print."""
    found = []
    commands = [[sys.executable, "-m", "benchmarks", "card", *CARD]]
    for file in sorted((versions.programs / "examples").glob("*.py")):
        commands.append([sys.executable, str(file), *EXAMPLES.get(file.name, ())])
    for file in sorted((versions.programs / "notebooks").glob("*.ipynb")):
        cells = json.loads(file.read_text())["cells"]
        code = [
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"
        ]
        program = file.with_suffix(".py")
        program.write_text("\n\n".join(map(_without_magic, code)))
        commands.append([sys.executable, str(program)])
    for command in commands:
        if options.only in " ".join(command):
            found += _script(versions, "scripts", command)
    return found


# Quick ones.
_TWO = ("--devices", "cpu", "cpu")
EXAMPLES = {
    "mnist.py": (*_TWO, "--epochs", "1", "--rows", "2048"),
    "char_gpt.py": (*_TWO, "--steps", "5"),
    "word_language_model.py": (*_TWO, "--epochs", "1", "--rows", "200"),
    "dpo_lora.py": ("--tiny",),
    "embeddings.py": ("--tiny",),
}


def _without_magic(code):
    lines = [line for line in code.splitlines() if not line.startswith(("%", "!"))]
    return "\n".join(lines)


def _script(versions, place, command, variables=None):
    """Run a program twice. Returns what it prints otherwise in both runs."""
    name = " ".join(Path(part).name for part in command[1:])
    if "card" in command:
        command = [*command, "--seconds", "20000", "--page", "{version}-card.md"]
    found = []
    for _ in range(2):
        (old_code, old), (new_code, new) = versions.run(command, variables)
        found.append(_printed_differences(place, name, old, new))
        if old_code != new_code:
            found[-1].add(
                Difference(place, name, "exit code", "", str(old_code), str(new_code))
            )
    print(f"{place}: {name}", flush=True)
    return sorted(found[0] & found[1], key=lambda difference: difference.old)


def _printed_differences(place, name, old, new):
    """Lines that only one of the versions prints, without times."""
    lines = [
        {_timeless(line): None for line in text.splitlines()} for text in (old, new)
    ]
    only_old = [line for line in lines[0] if line not in lines[1]]
    only_new = [line for line in lines[1] if line not in lines[0]]
    found = set()
    for number in range(max(len(only_old), len(only_new))):
        pair = [
            each[number] if number < len(each) else "" for each in (only_old, only_new)
        ]
        found.add(Difference(place, name, "printed", "", *pair))
    return found


def _timeless(line):
    line = re.sub(r"(old|new)-card", "card", line)
    line = re.sub(r"/\S*/", "…/", line)
    # Differences of a look, times and rates.
    line = re.sub(r"\b\d+(\.\d+)?e[-+]\d+", "…", line)
    line = re.sub(r"\b\d+(\.\d+)? ?(ms|s|seconds|minutes|images/s|rows/s)\b", "…", line)
    return re.sub(r"\((0\.\d+|…)\)", "(…)", line)


RUNS = {"cpu": on_cpu, "cards": on_simulated, "null": on_null_gpus, "scripts": scripts}


# --- what is printed ---


def print_differences(differences):
    """A line per kind of difference, with some of the programs that have it."""
    programs = defaultdict(list)
    for found in differences:
        call = re.sub(r", call \d+", "", found.call)
        values = (found.old, found.new)
        if found.part in ("bits", "generators"):
            values = ("", "")  # digests
        programs[found.place, found.part, call, *values].append(found.program)
    for kind, names in sorted(programs.items(), key=lambda item: -len(item[1])):
        place, part, call, old, new = kind
        print(f"\n{place}: {part} differs, {call}: {len(names)} programs")
        for name in names[:_SHOWN]:
            print(f"    {name}")
        if old or new:
            print(f"  old: {_in_short(old, new)}\n  new: {_in_short(new, old)}")
    print(f"\n{len(differences)} differences of {len(programs)} kinds")


def _in_short(text, other):
    """The text from where it begins to differ from the other one."""
    pairs = zip(text, other, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
    start = max(0, same - _WIDTH // 3)
    before = "…" if start else ""
    return before + text[start : start + _WIDTH].replace("\n", " / ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
