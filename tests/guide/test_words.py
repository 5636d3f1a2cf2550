"""The guide and the errors use the field's words; a word of our own is in the glossary."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping

import errors
import pytest
from harness.pages import ROOT, read

import scatterpar

# What had to be read twice, and what to write.
WORDS = {
    r"\btold\b|\b(is|are) warned\b": "warns, warns once",
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
# Reports and docstrings have these, in which the noun stands one word before.
IN_PROSE = WORDS | {r"\b(that|those) of\b": "the noun again"}
# The words of the code are defined on the page of the code.
PAGES = ["README.md"]
PAGES += sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md"))
PAGES.remove("docs/architecture.md")


def prose(page: str) -> str:
    """A page without snippets, code and the targets of links."""
    return re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", read(page), flags=re.DOTALL)


def odd_words(text: str, words: Mapping[str, str] = IN_PROSE) -> list[str]:
    """The odd words of a text, each with the words that it should have."""
    return [
        f"{match[0]!r}: {instead}"
        for pattern, instead in words.items()
        for match in re.finditer(pattern, text)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_page_has_the_words_of_the_field(page):
    assert not odd_words(prose(page))


def test_latest_changes_have_the_words_of_the_field():
    _, latest, *_ = read("CHANGELOG.md").split("\n## ")
    assert not odd_words(latest)


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.stem
)
def test_notebook_has_the_words_of_the_field(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
    ]
    assert texts
    assert not odd_words("\n".join(texts))


def test_errors_have_the_words_of_the_field():
    found = [
        f"{place} {odd}" for place, text in errors.messages() for odd in odd_words(text)
    ]
    assert not found, "\n".join(found)


def public_docstrings() -> Iterator[tuple[str, str]]:
    """The docstrings of public names and of their public members."""
    for name in scatterpar.__all__:
        public = getattr(scatterpar, name)
        yield name, inspect.getdoc(public) or ""
        members = vars(public).items() if inspect.isclass(public) else ()
        for member, value in members:
            if not member.startswith("_"):
                yield f"{name}.{member}", inspect.getdoc(value) or ""


def test_public_docstrings_have_the_words_of_the_field():
    found = [
        f"{name} {odd}"
        for name, text in public_docstrings()
        for odd in odd_words(text, WORDS)
    ]
    assert not found, "\n".join(found)


# --- words of our own ---


def defined(page: str, title: str) -> set[str]:
    """The words that the table of a section defines in its first column."""
    (section,) = re.findall(
        rf"^## {title}\n(.*?)^## ", read(page), re.DOTALL | re.MULTILINE
    )
    _, _, *cells = re.findall(r"^\|(.*?)\|", section, re.MULTILINE)
    return {word.strip() for cell in cells for word in cell.split(",")}


GLOSSARY = defined("docs/start.md", "Words")
# The words of the code that have in the guide the meaning that everybody knows.
COMMON = {"call", "contents", "device", "kind", "leaf", "moved", "part", "plan", "rank"}
COMMON |= {"request", "root", "schedule", "task"}
OF_THE_CODE = defined("docs/architecture.md", "Words of the code") - GLOSSARY - COMMON
OF_THE_CODE |= {"tape", "twin", "journal", "nudge"}


@pytest.mark.parametrize("page", PAGES)
def test_words_of_the_code_stay_in_the_code(page):
    words = "|".join(sorted(OF_THE_CODE))
    assert not re.findall(
        rf"(?i)\b(?:an?|the|each|one|its) (?:{words})s?\b", prose(page)
    )


@pytest.mark.parametrize("word", sorted(GLOSSARY))
def test_word_of_the_glossary_is_used(word):
    pages = [page for page in PAGES if page != "docs/start.md"]
    assert any(re.search(rf"\b{word}", prose(page)) for page in pages)
