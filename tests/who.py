"""Which tests reach a line of the package?

    python -m tests.who --record          run the tests, and record the lines of each
    python -m tests.who FILE:LINE         the tests that reach the line

`--record` takes pytest's options, as in `--record -m "slow or not slow"`, and runs as
the README does if it gets none. An answer begins with the tests that reach the fewest
lines: what a failing test says is easiest to read there. The record is in
``build/who``. Lines are those of today: a record of yesterday's file is compared with
today's text.

The tests' own process is recorded with all its threads, and so are the programs and
ranks that a test starts, unless they are killed.
"""

import argparse
import ast
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "scatterpar"
COMMAND = "python -m tests.who --record"
MINUTES = 5  # on two quiet cores
SHOWN = 12
README_OPTIONS = ("-n", "2", "--dist", "worksteal")
FOLDER = "SCATTERPAR_WHO"  # the variable by which pytest's processes know the record
# Settings of coverage. Its core by sys.monitoring has no contexts.
SETTINGS = """\
[run]
data_file = {lines}
parallel = true
include = {package}/*
context = ${{PYTEST_CURRENT_TEST}}
core = ctrace
disable_warnings = trace-changed, no-data-collected, module-not-imported
"""
PHASE = r" \((setup|call|teardown)\)"
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
BLOCK = ast.stmt | ast.excepthandler  # what has a body, or is in one


class Record:
    """The files of a recorded run.

    Attributes:
        folder: where they are.
        lines: coverage's data, the lines that each test reached.
        sizes: per test, how many lines that are.
        sources: the package as it was then.
        settings: of coverage, for the processes that record.
    """

    def __init__(self, folder):
        self.folder = folder
        self.lines = folder / "lines"
        self.sizes = folder / "sizes.json"
        self.sources = folder / "scatterpar"
        self.settings = folder / "settings"


RECORD = Record(ROOT / "build" / "who")


# Recording: hooks of pytest, which loads this file with ``-p tests.who``.


def pytest_configure(config):
    """The process that only hands tests to others records nothing."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder())


class Recorder:
    """Records the lines that each test reaches, in all threads of its process."""

    def __init__(self):
        from coverage import Coverage

        settings = str(Record(Path(os.environ[FOLDER])).settings)
        os.environ["COVERAGE_PROCESS_START"] = settings  # for programs that tests start
        self._coverage = Coverage(config_file=settings, context="")
        self._coverage.start()
        self._trace = sys.gettrace()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._coverage.switch_context(item.nodeid)
        sys.settrace(self._trace)  # the test before may have had a function of its own
        return (yield)

    def pytest_unconfigure(self):
        self._coverage.stop()
        self._coverage.save()


def make(record, options):
    """Run pytest with ``options``, and record which lines each test reaches.

    Returns pytest's status. What ``record`` had before is removed.
    """
    if find_spec("coverage") is None:
        raise LookupError("coverage is not installed; pip install -e '.[test]'")
    shutil.rmtree(record.folder, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, record.sources, ignore=ignore)
    settings = SETTINGS.format(lines=record.lines, package=PACKAGE)
    record.settings.write_text(settings, encoding="utf-8")
    environment = os.environ | {FOLDER: str(record.folder)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.who", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    sizes = _sizes(_combined(record), record)
    record.sizes.write_text(json.dumps(sizes), encoding="utf-8")
    print(f"{len(sizes)} tests are recorded in {record.folder}")
    return done.returncode


def _combined(record):
    """The data of all processes, in one file."""
    from coverage import Coverage

    coverage = Coverage(data_file=str(record.lines), config_file=False)
    coverage.combine([str(record.folder)])
    coverage.save()
    return coverage.get_data()


def _sizes(data, record):
    """Per test, the number of lines of functions that it reaches."""
    sizes = Counter()
    for file in data.measured_files():
        source = record.sources / Path(file).relative_to(PACKAGE)
        if not source.exists():
            continue  # it was added, or renamed, while the tests ran
        lines = lines_of_functions(source.read_text(encoding="utf-8"))
        for line, contexts in data.contexts_by_lineno(file).items():
            if line in lines:
                sizes.update({_test_of(context) for context in contexts})
    del sizes[""]  # lines that ran before the first test
    return sizes


def _test_of(context):
    """The test's id. Of programs and forks a context has the phase of the test, too, and
    before it what it was when their server started.
    """
    return re.sub(rf"^.*{PHASE}\||{PHASE}$", "", context)


# Asking.


class Question(NamedTuple):
    """A line of today's package, as the record knows it."""

    file: Path
    function: str  # its qualified name
    lines: range  # those of the statement at the line, today
    recorded: range  # the same when the tests were recorded


def question_of(record, place):
    """The question for ``FILE:LINE``. Raises `LookupError` in words if the record has
    no answer.
    """
    name, _, number = place.rpartition(":")
    file = Path(name).resolve()
    if not (number.isdigit() and file.is_file() and PACKAGE in file.parents):
        raise LookupError(f"{place}: pass FILE:LINE, with a file of scatterpar/")
    if not record.sizes.exists():
        raise LookupError(
            f"no tests are recorded yet; `{COMMAND}` does it, in {MINUTES} minutes"
        )
    text = file.read_text(encoding="utf-8")
    function, lines = statement_at(text, int(number))
    if not function:
        raise LookupError(
            f"{place}: it runs when the file is imported, before all tests; pass a "
            "line of a function"
        )
    source = record.sources / file.relative_to(PACKAGE)
    if not source.exists():
        raise LookupError(f"{name}: the file is newer than the record; `{COMMAND}`")
    before = source.read_text(encoding="utf-8")
    return Question(file, function, lines, recorded_lines(before, text, lines))


def statement_at(text, line):
    """The function that ``line`` is in, empty outside of functions; and the lines of
    the statement there.

    Of a statement with a body these are the lines before the body. Instead of the head
    of a function, or its docstring, it is the first statement after them.
    """
    names = []
    has_function = False
    lines = range(line, line + 1)
    block = ast.parse(text).body
    while inside := [node for node in block if _first(node) <= line <= node.end_lineno]:
        node = inside[0]
        block = [each for each in ast.iter_child_nodes(node) if isinstance(each, BLOCK)]
        lines = range(_first(node), min([node.end_lineno + 1, *map(_first, block)]))
        if isinstance(node, ast.ClassDef | FUNCTION):
            names.append(node.name)
        if isinstance(node, FUNCTION):
            has_function = True
            first = node.body[ast.get_docstring(node) is not None :] or node.body
            line = max(line, _first(first[0]))
    return ".".join(names) if has_function else "", lines


def lines_of_functions(text):
    """The lines that do not run when the file is imported."""
    lines = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTION):
            lines.update(range(node.body[0].lineno, node.end_lineno + 1))
    return lines


def _first(node):
    """The first line of a statement; decorators are part of a function."""
    decorators = getattr(node, "decorator_list", [])
    return min(part.lineno for part in [node, *decorators])


def recorded_lines(before, now, lines):
    """The lines of the text ``before`` that are ``lines`` of the text ``now``.

    For lines that were changed since, those that they replaced; for new ones, the line
    above.
    """
    texts = before.splitlines(), now.splitlines()
    blocks = difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
    found = set()
    for kind, start, stop, start_now, stop_now in blocks:
        common = range(max(lines.start, start_now + 1), min(lines.stop, stop_now + 1))
        if kind == "equal":
            found.update(line - start_now + start for line in common)
        elif common and kind == "insert":
            found.add(start)
        elif common:
            found.update(range(start + 1, stop + 1))
    return range(min(found), max(found) + 1)


def tests_that_reach(record, question):
    """The tests that reach a line, those of the fewest lines first: pairs of the number
    of lines and the test's id.
    """
    from coverage import CoverageData

    data = CoverageData(str(record.lines))
    data.read()
    by_line = data.contexts_by_lineno(str(question.file))
    tests = {
        _test_of(test) for line in question.recorded for test in by_line.get(line, [])
    }
    sizes = json.loads(record.sizes.read_text(encoding="utf-8"))
    return sorted((sizes[test], test) for test in tests if test)


def answer(record, place):
    """The answer for ``FILE:LINE``, in words."""
    question = question_of(record, place)
    tests = tests_that_reach(record, question)
    where = f"{question.file.relative_to(ROOT)}:{question.lines.start}"
    if not tests:
        return f"{where}, in {question.function}: no recorded test reaches it"
    functions = {}  # tests that differ in parameters are one row
    for size, test in tests:
        functions.setdefault(test.partition("[")[0], []).append(size)
    rows = [
        f"{where}, in {question.function}: {len(tests)} tests, "
        f"{len(functions)} functions; those of the fewest lines first",
        "lines  cases  test",
    ]
    for test, sizes in [*functions.items()][:SHOWN]:
        rows.append(f"{sizes[0]:5}  {len(sizes):5}  {test}")
    if len(functions) > SHOWN:
        rows.append(f"and {len(functions) - SHOWN} more")
    return "\n".join(rows)


def main():
    """Record, or answer a question."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.who",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("place", nargs="?", metavar="FILE:LINE")
    parser.add_argument("--record", nargs=argparse.REMAINDER, metavar="OPTION")
    arguments = parser.parse_args()
    try:
        if arguments.record is not None:
            sys.exit(make(RECORD, arguments.record or README_OPTIONS))
        if arguments.place is None:
            parser.error("pass FILE:LINE, or --record")
        print(answer(RECORD, arguments.place))
    except LookupError as error:
        sys.exit(error.args[0])


if __name__ == "__main__":
    main()
