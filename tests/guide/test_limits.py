"""The words of errors on the pages of limits, of the check and of errors are those of
the sources.
"""

from __future__ import annotations

import re

import errors
import pytest
from harness.pages import blocks, read

PAGES = [read("docs/limits.md"), read("docs/check.md")]


def is_in(phrase: str, text: str) -> bool:
    """Whether the words of a phrase are in the text, in their order."""
    start = 0
    for part in re.split("…|‹[^›]*›", phrase):
        position = text.find(part.strip(), start)
        if position < 0:
            return False
        start = position + len(part.strip())
    return True


def test_page_of_errors_is_that_of_the_sources():
    is_current = read("docs/errors.md") == errors.page()
    assert is_current, "run: python -m tests.errors --write"


def test_advice_is_whole():
    lines = [line for line in read("docs/errors.md").splitlines() if line[:3] == "| `"]
    assert len(lines) > 150
    # Cut off: no word, a word that needs another one, or a single value.
    is_cut = re.compile(
        r"^$|[,:;]$|\b(or|and|with|instead|as)$|(?<!backward )pass$|^…|^‹[^›/]*›$"
    )
    for line in lines:
        _, _, advice = line.removesuffix(" |").rpartition("` | ")
        assert not is_cut.search(advice.strip()), line


def test_error_of_the_readme_is_on_the_page():
    (error, *_) = blocks(read("README.md"), "text")
    text = " ".join(error.split())
    rows = re.findall(r"^\| `(.+?)` \|", read("docs/errors.md"), re.MULTILINE)
    found = [row for row in rows if is_in(row, text)]
    assert any("your loss of" in row for row in found)
    assert any("It seems to be a mean" in row for row in found)


PHRASES = re.findall(r"\braises `(?!\w+Error`)([^`]+)`", "\n".join(PAGES))


@pytest.mark.parametrize("phrase", PHRASES)
def test_words_that_a_row_names_are_in_an_error(phrase):
    assert len(phrase) > 12
    assert any(is_in(phrase, text) for text in errors.all_texts())


def test_rows_name_the_words_of_errors():
    assert len(PHRASES) > 20
