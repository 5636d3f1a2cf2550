"""The guide and the errors use the field's words; a word of our own is in the glossary."""

from __future__ import annotations

import re

import errors
import pytest
from harness.pages import ROOT, read

# What had to be read twice, and what to write.
WORDS = {
    r"\btold\b": "warns, warns once",
    r"\b(is|are) refused\b": "raises ValueError",
    r"\b(a|the|each|with) look\b|\blooks? off\b|\blooks at (steps|calls)\b": (
        "the check before a step"
    ),
    r"\basked? again\b": "compares again",
    r"\bat once\b": "in one piece",
    r"\bcaptured sub-steps?\b": "CUDA graph",
    r"\b(of yours|of the user's)\b": "your; a noun",
    r"\bin words\b|\bwithout a word\b": "with a clear message; silently",
    r"\bexactly and fast\b": "the figure",
}
# The words of the code are defined on the page of the code.
PAGES = ["README.md"]
PAGES += sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md"))
PAGES.remove("docs/architecture.md")


@pytest.mark.parametrize("page", PAGES)
def test_page_has_the_words_of_the_field(page):
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", read(page), flags=re.DOTALL)
    found = [
        f"{match[0]!r}: {instead}"
        for pattern, instead in WORDS.items()
        for match in re.finditer(pattern, text)
    ]
    assert not found


def test_errors_have_the_words_of_the_field():
    names = errors.ERRORS | {"warn", "add_note"}
    found = [
        f"{place} {match[0]!r}: {instead}"
        for place, text in errors.messages(names)
        for pattern, instead in WORDS.items()
        for match in re.finditer(pattern, text)
    ]
    assert not found, "\n".join(found)
