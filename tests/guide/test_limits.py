"""docs/limits.md is searched by the words of an error: each refusal has its row there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from harness.pages import read

import scatterpar

PACKAGE = Path(scatterpar.__file__).parent
# Command lines, and checks of a loop that need no engine: their pages are others.
TOOLS = {"train", "checkup", "splitting"}
# Classes of errors that a user sees.
ERRORS = {
    "NotImplementedError",
    "RankError",
    "Refusal",
    "RuntimeError",
    "TimeoutError",
    "TypeError",
    "ValueError",
}
# A value that is no number, no module, not one of two words: it says all there is to say.
OF_A_VALUE = re.compile(
    r"\bmust (be|have|return|begin|give)\b|, got …|: got …|^got |^Rows takes|\bis empty\b"
    r"|\bexpected an?\b|pass one\b|leave (it|…=|one of them) out|is the class …"
)
FEWEST_LETTERS = 25  # a text with fewer of its own is put together of other ones


def constants() -> dict[str, str]:
    """The texts that modules of the package give a name, once each."""
    named: dict[str, str] = {}
    for path in PACKAGE.rglob("*.py"):
        for statement in ast.parse(path.read_text()).body:
            if not isinstance(statement, ast.Assign):
                continue
            (target, *_), value = statement.targets, statement.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                named[target.id] = str(value.value)
    return named


NAMED = constants()


def text_of(node: ast.AST) -> str:
    """The fixed words of an expression, with … in the place of all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return NAMED.get(node.id, "…")
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value) if isinstance(node.value, ast.Name) else "…"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return "…"


def files() -> list[Path]:
    """The sources of the engine, the pair, the loops and the optimizer."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [path for path in paths if path.relative_to(PACKAGE).parts[0] not in TOOLS]


def refusals() -> dict[str, str]:
    """The fixed words of each error that the sources make, by file and line."""
    found: dict[str, str] = {}
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_call and node.func.id in ERRORS and node.args:
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                found[place] = text_of(node.args[0])
    return found


def texts() -> list[str]:
    """All fixed texts of the sources."""
    found: list[str] = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.JoinedStr, ast.Constant)):
                found.append(text_of(node))
    return found


def rows() -> list[list[str]]:
    """The cells of each row of the page's tables."""
    lines = read("docs/limits.md").splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def is_in(phrase: str, text: str) -> bool:
    """Whether the words of a phrase are in the text, in their order."""
    parts = [re.escape(part.strip()) for part in phrase.split("…")]
    return re.search(".*".join(parts), text, re.DOTALL) is not None


def test_rows_that_refuse_have_words_of_the_error():
    source = texts()
    refused = [cells for cells in rows() if "refused" in cells[1]]
    assert len(refused) > 20
    for what, outcome, *_ in refused:
        (phrase, *_) = quoted(outcome.partition("refused")[2]) or [""]
        assert len(phrase) > 12, f"no words of the error: {what}"
        assert any(is_in(phrase, text) for text in source), f"{what}: {phrase}"


def test_refusals_have_a_row():
    phrases = [
        phrase
        for cells in rows()
        for cell in cells
        for phrase in quoted(cell)
        if len(phrase) > 12
    ]
    missing = {
        place: text
        for place, text in refusals().items()
        if len(re.sub("[^a-z]", "", text)) >= FEWEST_LETTERS
        and not OF_A_VALUE.search(text)
        and not any(is_in(phrase, text) for phrase in phrases)
    }
    assert not missing, "\n".join(f"{place} {text}" for place, text in missing.items())
