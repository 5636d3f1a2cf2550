"""The words of errors on a page of the guide are those of the sources."""

from __future__ import annotations

import errors
from harness.pages import blocks, read


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
