"""Two versions of the package, side by side on the same programs: what differs?

    python -m tests.versions OLD NEW                    before a release
    python -m tests.versions v0.4.0 HEAD --only verify  programs with such a name
    python -m tests.versions OLD NEW --on cpu cards     some of the places
    python -m tests.versions OLD NEW --programs OLD     what the old version's tests saw
    python -m tests.versions OLD NEW --null .venv-nullcuda/bin/python
    python -m tests.versions OLD NEW --json FILE        and then, at once:
    python -m tests.versions OLD NEW --read FILE        the list of that run again

``OLD`` and ``NEW`` are refs of git. Both are checked out into temporary folders, and
both run what ``NEW``, or ``--programs REF``, has of programs: its tests as they are,
among them the table of cases and all right, wrong and adversarial steps; the table of
cases and the tests of accelerators on the simulated accelerator, and on null GPUs where
there are some; and its examples and notebooks. The page of ``benchmarks card`` and the
other benchmarks, with tiny sizes, are each version's own.

Of each call of the package (``harness/outcomes.py``) these are compared:

    test        passes or fails: the step is plain torch's, or not
    outcome     what a call returned or raised
    words       of its error
    told        its warnings
    report      rows, bytes and copies of ``last_step``
    generators  the states of all random generators after it
    bits        of its result, of gradients, parameters and buffers

Of each program the first difference of each of them counts, if it is there again in a
second run of both versions: draws of several threads and times differ from run to run.

A difference is printed as a kind, with the number of programs that have it, and one of
them. Programs whose words differ in the same places have one kind, whatever names and
numbers stand in them. Kinds that ``versions.toml`` has, beside this file, are known:
each has its reason there, and the line of the changelog that tells it. New kinds are
printed, what was lost first, and the exit code is 1 if there is one. ``--all`` prints
the known ones, too.

A release must see it, and so must any round of rewriting: tests hold what somebody
thought of, and a version that ran holds everything else. A new difference is mended
with a test, or gets its entry.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
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
# Files of harness/ that programs of any version get.
PLUGINS = ("outcomes.py", "missing_names.py")
MOST_CRASHES = 40
ENDED = (0, 1, 5)  # exit codes of pytest: passed, failed, nothing to run
PLACES = ("cpu", "cards", "null", "page", "scripts")
CARD = ("--devices", "cpu:0,cpu:1", "--only", "gradient", "looks", "dropout")
NULL_CARD = ("--under", "nullcuda.values", "--only", "gradient", "looks", "dropout")
LIMIT_SECONDS = 7200
# The environment variable with the built simulated accelerator.
LIBRARY = "SIMULATED_ACCELERATOR"
PARTS = ("call", "outcome", "words", "told", "report", "generators", "bits")
# After the first two, a program does something else in each version.
ENDS = ("call", "outcome")
DIGESTS = ("generators", "bits")
KNOWN = Path(__file__).with_name("versions.toml")
_WIDTH = 300  # of an outcome
_SHORT = 120  # of the reason why a test failed with the old version


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
    parser.add_argument("--json", type=Path, help="a new file for all differences")
    parser.add_argument("--read", type=Path, help="a file of --json: nothing is run")
    parser.add_argument("--all", action="store_true", help="known kinds, too")
    options = parser.parse_args(arguments)
    if options.read:
        lines = json.loads(options.read.read_text())
        return print_kinds([Difference(**line) for line in lines], options.all)
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        refs = options.old, options.new, options.programs or options.new
        versions = Versions(*refs, Path(folder))
        differences = []
        for place in options.on:
            start = time.monotonic()
            differences += RUNS[place](versions, options)
            print(f"{place}: {time.monotonic() - start:.0f} s", flush=True)
            if options.json:  # a run that is ended keeps the places before
                lines = [asdict(found) for found in differences]
                options.json.write_text(json.dumps(lines))
    return print_kinds(differences, options.all)


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
            _check_out(ref, folder / name, ["scatterpar", "benchmarks"])
        _check_out(programs, self.programs, [])
        # A program would find it beside itself, in the place of either version.
        (self.programs / "scatterpar").rename(folder / "unused")
        for name in PLUGINS:
            plugin = Path("tests/harness") / name
            (self.programs / plugin).write_text((ROOT / plugin).read_text())

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
    """The differences of all programs."""
    found = []
    # Files that a version cannot import: they use names that it has not.
    failed = [_not_collected(lines) for lines in (old, new)]
    for file in sorted({*failed[0]} ^ {*failed[1]}):
        verdicts = [lines.get(file, "passed") for lines in failed]
        found.append(Difference(place, file, "test", "collection", *verdicts))
    for program in sorted({*old, *new}):
        if any(program.split("::")[0] in files for files in failed):
            continue
        if program in old and program in new:
            for difference in _differences_of(old[program], new[program]):
                found.append(Difference(place, program, *difference))
            continue
        values = [
            "is there" if program in each else "is missing" for each in (old, new)
        ]
        found.append(Difference(place, program, "program", "", *values))
    return found


def _not_collected(lines):
    """The files that could not be imported, each with the error."""
    return {
        program: _verdict(line)
        for program, line in lines.items()
        if line["test"] == "not collected"
    }


def _differences_of(old, new):
    """Of each part the first difference: part, call, and both outcomes.

    Of a test that passes with one version alone only that, with its first difference.
    """
    differences = {}
    for number, calls in enumerate(zip(old["calls"], new["calls"], strict=False)):
        for part in PARTS:
            values = [_part_of(call, part) for call in calls]
            if values[0] != values[1] and part not in differences:
                call = f"{calls[0]['call']}, call {number}"
                shown = [_shown(value) for value in values]
                differences[part] = part, call, *shown
                if part in ENDS:
                    break
        if differences.keys() & {*ENDS}:
            break
    ended = bool(differences.keys() & {*ENDS})
    verdicts = [_verdict(line) for line in (old, new)]
    if old["test"] != new["test"]:
        return [("test", _named_call(differences), *verdicts)]
    if len(old["calls"]) != len(new["calls"]) and not ended:
        counts = [f"{len(each['calls'])} calls" for each in (old, new)]
        differences["call"] = "call", "number of calls", *counts
    # Of a test that fails with both, numbers are those of memory that nobody wrote.
    if without_values(verdicts[0]) != without_values(verdicts[1]) and not ended:
        differences["test"] = "test", "", *verdicts
    return [*differences.values()]


def _named_call(differences):
    """The call of the first difference, in general."""
    for part in PARTS:
        if part in differences and part not in DIGESTS:
            return f"{part} of {differences[part][1].split(',')[0]}"
    return ""


def lasting(first, second):
    """The differences of the first run that the second one has, too.

    Digests must be the same in both: others differ from run to run. In words, numbers
    may be others.
    """
    both = {_identity(found) for found in second}
    return [found for found in first if _identity(found) in both]


def _identity(found):
    values = found.old, found.new
    if found.part not in DIGESTS:
        values = map(without_values, values)
    return found.place, found.program, found.part, found.call, *values


def without_values(text):
    """A text with a sign in the place of names and numbers."""
    text = re.sub(r"'[^'\n]*'|`[^`\n]*`", "'…'", text)
    return re.sub(r"-?\b(\d+(\.\d+)?(e[-+]?\d+)?|nan|inf)\b", "#", text)


def _part_of(entry, part):
    """A part of a call's outcome; of an error there are no bits of a result."""
    if part == "outcome":
        return entry.get("outcome")
    if part == "bits":
        return [entry.get(name) for name in ("bits", "module", "gradients")]
    if part == "told":
        return [*dict.fromkeys(entry["told"])]
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
    again = {found.program for found in first}
    if not again:
        return []
    # A file, because of the signs in names of tests, and of their number.
    chosen = versions.folder / "chosen.json"
    chosen.write_text(json.dumps(sorted(again)))
    files = sorted({program.split("::")[0] for program in again})
    versions.run_tests([*command, *files], {**(variables or {}), "CHOSEN": chosen})
    return lasting(first, differences_of(place, *versions.outcomes()))


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
    """The same on null GPUs."""
    if not _has_null_gpus(options):
        return []
    extra = ["-k", options.only] if options.only else []
    # The plugin looks for races in each test; values are enough here.
    variables = {"NULLCUDA_DEVICES": 2}
    plugins = ["harness.null_values"]
    return _pytest(versions, "null", options.null, CARDS, extra, variables, plugins)


def on_page(versions, options):
    """The page of ``benchmarks card`` on four null GPUs, which all its rows need."""
    if not _has_null_gpus(options):
        return []
    command = [options.null, "-W", "ignore", "-m", "benchmarks", "card", *NULL_CARD]
    return _script(versions, "page", command, {"NULLCUDA_DEVICES": 4})


def _has_null_gpus(options):
    if Path(options.null).exists():
        return True
    print(f"{options.null} is not there: tests/nullcuda/run makes it")
    return False


def scripts(versions, options):
    """Examples, notebooks, benchmarks and the page of the CPU, by what they print."""
    found = []
    commands = [[sys.executable, "-m", "benchmarks", "card", *CARD]]
    for folder in BENCHMARKS:
        commands.append([sys.executable, "-m", "benchmarks", folder, "--quick"])
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


# Folders of benchmarks, with tiny sizes. Their numbers are not compared: most are times.
BENCHMARKS = ("evaluation", "memory", "traffic", "turns", "whole_batch")
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
    if "benchmarks" in command:
        # Those of each version: they use names of the package that users do not.
        variables = {**(variables or {}), "PYTHONSAFEPATH": 1}
    if "card" in command:
        command = [*command, "--seconds", "20000", "--page", "{version}-card.md"]
    found = []
    for _ in range(2):
        (old_code, old), (new_code, new) = versions.run(command, variables)
        if "--quick" in command:
            old, new = _words_of_tables(old), _words_of_tables(new)
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


def _words_of_tables(text):
    """The text of benchmarks without numbers, and without the width of their columns."""
    return re.sub(r"[-─━=]{3,}| +", " ", without_values(text))


def _timeless(line):
    line = re.sub(r"(old|new)-card", "card", line)
    line = re.sub(r"/\S*/", "…/", line)
    # Differences of a look, times and rates.
    line = re.sub(r"\b\d+(\.\d+)?e[-+]\d+", "…", line)
    line = re.sub(r"\b\d+(\.\d+)? ?(ms|s|seconds|minutes|images/s|rows/s)\b", "…", line)
    return re.sub(r"\((0\.\d+|…)\)", "(…)", line)


RUNS = {
    "cpu": on_cpu,
    "cards": on_simulated,
    "null": on_null_gpus,
    "page": on_page,
    "scripts": scripts,
}


# --- what is printed ---

LOST = "lost, or refused now"
ACCEPTED = "accepted now, or refused otherwise"
SAID = "said otherwise"
COMPUTED = "computed otherwise"
GAINED = "passes with the new version alone"
SECTIONS = (LOST, ACCEPTED, SAID, COMPUTED, GAINED)


@dataclass(frozen=True)
class Kind:
    """What programs with the same difference share.

    Attributes:
        section: one of ``SECTIONS``.
        place, part, call: those of the difference.
        old: what only the old outcome says, without names and numbers.
        new: what only the new one says.
    """

    section: str
    place: str
    part: str
    call: str
    old: str
    new: str


def kind_of(found):
    """The kind of a difference."""
    section = _section_of(found)
    call = re.sub(r", call \d+", "", found.call)
    if found.part in DIGESTS:
        return Kind(section, found.place, found.part, call, "", "")
    if found.part in ("test", "program"):
        # A function of tests is one kind, whatever its parameters.
        function = found.program.split("[")[0]
        verdicts = [_first_word(text) for text in (found.old, found.new)]
        # The version in which the test fails.
        number = 0 if section == GAINED else 1
        if _LACKS.search((found.old, found.new)[number]):
            function = function.split("::")[0]
            verdicts[number] = "lacks a name that the test uses"
        return Kind(section, found.place, found.part, function, *verdicts)
    said = _only_in_each(*map(without_values, (found.old, found.new)))
    # The same words, whichever call says them.
    call = call if found.part in ENDS else ""
    return Kind(section, found.place, found.part, call, *said)


# An error of a test that uses what the version has not: a name or an argument.
_LACKS = re.compile(
    r"has no attribute (?!'__notes__')|ImportError|ModuleNotFoundError"
    r"|unexpected keyword argument|required positional argument"
    r"|positional arguments? but|not collected"
    r"|'module' object is not callable|'Missing'|missing_names\.Missing"
)


def _section_of(found):
    if found.part == "program":
        return LOST if found.new == "is missing" else GAINED
    if found.part == "test":
        if _first_word(found.old) == "passed":
            return LOST
        return GAINED if _first_word(found.new) == "passed" else SAID
    if found.part == "outcome":
        return LOST if found.old == "returned" else ACCEPTED
    if found.part in ("report", "call", *DIGESTS):
        return COMPUTED
    return SAID


def _first_word(text):
    return text.split(" ", 1)[0]


def _only_in_each(old, new):
    """The words that only one of two texts has, with ``…`` for those of both."""
    words = old.split(), new.split()
    only = [], []
    # Without the heuristics, which leave out frequent words.
    matcher = SequenceMatcher(None, *words, autojunk=False)
    for operation, *ends in matcher.get_opcodes():
        for number, (start, stop) in enumerate((ends[:2], ends[2:])):
            part = ["…"] if operation == "equal" else words[number][start:stop]
            only[number].extend(part)
    return [" ".join(text) for text in only]


def known_kinds(file=KNOWN):
    """The entries of the file, of which each says which differences are meant, and why."""
    return tomllib.loads(file.read_text(encoding="utf-8"))["known"]


def is_known(entry, found):
    """Whether an entry is about this difference. What it does not say may be anything.

    A name may have ``*``; of outcomes the entry has a part.
    """
    kind = kind_of(found)
    names = {
        "place": found.place,
        "part": found.part,
        "section": kind.section,
        "program": found.program,
    }
    texts = {
        "call": f"{kind.call} {found.call}",
        "old": f"{kind.old} {found.old}",
        "new": f"{kind.new} {found.new}",
    }
    return all(
        fnmatchcase(name, entry.get(key, "*")) for key, name in names.items()
    ) and all(entry.get(key, "") in text for key, text in texts.items())


def print_kinds(differences, show_known=False):
    """Print each kind with its number of programs and one of them. Returns the code."""
    kinds = defaultdict(list)
    for found in differences:
        kinds[kind_of(found)].append(found)
    entries = known_kinds()
    news = 0
    num_known = 0
    for section in SECTIONS:
        chosen = [kind for kind in kinds if kind.section == section]
        chosen.sort(key=lambda kind: (-len(kinds[kind]), kind.part, kind.call))
        heading = f"\n== {section} =="
        for kind in chosen:
            found = kinds[kind]
            reasons = {_reason_of(each, entries) for each in found}
            if None not in reasons:
                num_known += 1
                if not show_known:
                    continue
            else:
                news += 1
            if heading:
                print(heading)
                heading = ""
            print_kind(kind, found, reasons - {None})
    print(
        f"\n{len(differences)} differences of {len(kinds)} kinds: {num_known} kinds are "
        f"in {KNOWN.name}, {news} are new"
    )
    return int(bool(news))


def _reason_of(found, entries):
    """Why a difference is right: a reason, or a line of the changelog."""
    for entry in entries:
        if is_known(entry, found):
            return entry.get("reason") or f"changelog: {entry['changelog']}"
    return None


def print_kind(kind, found, reasons):
    """Print a kind, one program that has it, and what that says in both versions."""
    example = found[0]
    if kind.section == GAINED:
        why = example.old.removeprefix("failed ").replace("\n", " / ")[:_SHORT]
        print(f"{kind.place}: {kind.call}: {len(found)}: {why}")
        return
    title = f"{kind.place}: {kind.part}"
    if kind.call:
        title += f", {kind.call}"
    print(f"\n{title}: {len(found)}")
    program = example.program
    if example.part == "test" and example.call:
        program += f" ({example.call})"
    print(f"    {program}")
    if example.part not in DIGESTS:
        print(f"  - {_in_short(example.old, example.new)}")
        print(f"  + {_in_short(example.new, example.old)}")
    for reason in sorted(reasons):
        print(f"  known: {reason}")


def _in_short(text, other):
    """The text from where it begins to differ from the other one."""
    pairs = zip(text, other, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
    start = max(0, same - _WIDTH // 3)
    before = "…" if start else ""
    return before + text[start : start + _WIDTH].replace("\n", " / ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
