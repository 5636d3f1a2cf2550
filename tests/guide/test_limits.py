"""The words of errors on two pages of the guide are those of the sources."""

from __future__ import annotations

import re

import errors
import pytest
from harness.pages import blocks, read

CHECK = read("docs/check.md")


def test_page_of_errors_has_each_message():
    assert not errors.lacking()


def test_page_of_errors_has_no_other_words():
    assert len(errors.phrases()) > 200
    assert not errors.unknown()


def test_error_of_the_readme_is_on_the_page():
    (error, *_) = blocks(read("README.md"), "text")
    text = " ".join(error.split())
    found = [phrase for phrase in errors.phrases() if errors.is_in(phrase, text)]
    assert any("your loss of" in phrase for phrase in found)
    assert any("It seems to be a mean" in phrase for phrase in found)


PHRASES = re.findall(r"\braises `(?!\w+Error`)([^`]+)`", CHECK)


@pytest.mark.parametrize("phrase", PHRASES)
def test_words_that_a_row_names_are_in_an_error(phrase):
    assert len(phrase) > 12
    assert any(errors.is_in(phrase, text) for text in errors.all_texts())


def test_rows_name_the_words_of_errors():
    assert len(PHRASES) > 10
