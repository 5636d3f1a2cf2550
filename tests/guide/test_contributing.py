"""CONTRIBUTING's table of symptoms, its example and its commands lead where it says."""

from __future__ import annotations

import re
import textwrap

import pytest
import who
from faults.processes import run
from harness.pages import read
from sabotage import SABOTAGES

PAGE = read("CONTRIBUTING.md")
SYMPTOMS = re.findall(
    r"^\| .* \| `(\S+)` in `(\S+)` \| `(\w+)` \|$", PAGE, re.MULTILINE
)


def test_symptoms_name_sabotage_and_test():
    known = {(each.place, each.file, each.seen_by) for each in SABOTAGES}
    assert len(SYMPTOMS) >= 15
    assert set(SYMPTOMS) <= known


def test_line_asked_for_is_in_its_function():
    [(file, line)] = re.findall(r"tests\.who (\S+):(\d+)$", PAGE, re.MULTILINE)
    function, _ = who.statement_at(read(file), int(line))
    assert f"`{function}` in `{file.removeprefix('scatterpar/')}`.\n" in PAGE


def test_case_of_example_is_in_its_table():
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert textwrap.dedent(f"   {code.strip()}") in read("tests/step/test_commit.py")


def test_words_of_sabotages_select_some():
    for words in re.findall(r"tests\.sabotage ((?!WORD)\w+)", PAGE):
        assert any(words in each.line for each in SABOTAGES), words


def test_lines_that_ci_reads_are_on_their_pages():
    """One had gone from its page, and CI would have ended before its first stage."""
    lines = re.findall(r"=\$\(grep '(.+)' (\S+)\)$", read(".ci/run"), re.MULTILINE)
    assert len(lines) >= 4
    for pattern, page in lines:
        found = re.findall(pattern, read(page), re.MULTILINE)
        assert len(found) == 1, f"{pattern} in {page}"


@pytest.mark.slow
def test_commands_of_files_select_tests():
    found = re.findall(r"-m (pytest tests/[^`]*)`", PAGE)
    assert len(found) >= 3
    for command in found:
        arguments = command.removesuffix(" --pdb").split()
        outcome = run("-m", *arguments, "--collect-only", "-q")
        assert outcome.code == 0, outcome.out
