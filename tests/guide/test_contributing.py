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


def test_each_symptom_names_a_sabotage_and_the_test_that_sees_it():
    known = {(each.place, each.file, each.seen_by) for each in SABOTAGES}
    assert len(SYMPTOMS) >= 15
    assert set(SYMPTOMS) <= known


def test_the_line_that_is_asked_for_is_in_the_function_of_the_example():
    [(file, line)] = re.findall(r"tests\.who (\S+):(\d+)$", PAGE, re.MULTILINE)
    function, _ = who.statement_at(read(file), int(line))
    assert f"`{function}` in `{file.removeprefix('scatterpar/')}`.\n" in PAGE


def test_the_case_of_the_example_is_in_the_table_that_it_names():
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert textwrap.dedent(f"   {code.strip()}") in read("tests/step/test_commit.py")


def test_words_of_sabotages_select_some():
    for words in re.findall(r"tests\.sabotage ((?!WORD)\w+)", PAGE):
        assert any(words in each.line for each in SABOTAGES), words


@pytest.mark.slow
def test_commands_that_name_a_file_select_tests():
    found = re.findall(r"-m (pytest tests/[^`]*)`", PAGE)
    assert len(found) >= 3
    for command in found:
        arguments = command.removesuffix(" --pdb").split()
        outcome = run("-m", *arguments, "--collect-only", "-q")
        assert outcome.code == 0, outcome.out
