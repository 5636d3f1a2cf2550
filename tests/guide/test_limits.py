"""docs/limits.md is searched by the words of an error: each refusal has its row there."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from harness.pages import read

import scatterpar

PACKAGE = Path(scatterpar.__file__).parent
# Classes of errors that a user sees.
ERRORS = {
    "AttributeError",
    "FloatingPointError",
    "NotImplementedError",
    "RankError",
    "Refusal",
    "RuntimeError",
    "TimeoutError",
    "TypeError",
    "UsageError",
    "ValueError",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# A value that is no number, no module, not one of two words: it says all there is to say.
OF_A_VALUE = re.compile(
    r"\bmust (be|have|return|begin|give)\b|, got …|: got …|^got |^Rows takes|\bis empty\b"
    r"|\bexpected an?\b|pass one\b|leave (it|…=|one of them) out|is the class …"
)
FEWEST_LETTERS = 25  # a text with fewer of its own is put together of other ones


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def constants() -> dict[str, str]:
    """The texts that modules of the package give a name, once each."""
    named: dict[str, str] = {}
    for path in PACKAGE.rglob("*.py"):
        for statement in tree_of(path).body:
            if not isinstance(statement, ast.Assign):
                continue
            (target, *_), value = statement.targets, statement.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                named[target.id] = str(value.value)
    return named


@functools.cache
def named() -> dict[str, str]:
    return constants()


def text_of(node: ast.AST) -> str:
    """The fixed words of an expression, with … in the place of all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return named().get(node.id, "…")
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value) if isinstance(node.value, ast.Name) else "…"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return "…"


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def refusals() -> dict[str, list[str]]:
    """The fixed words of each error that the sources make, by file and line.

    An error has several texts if a name or a function in its place has.
    """
    found: dict[str, list[str]] = {}
    for path in files():
        functions = [node for node in nodes_of(path) if isinstance(node, FUNCTIONS)]
        inside = {
            id(node): function for function in functions for node in ast.walk(function)
        }
        for node in nodes_of(path):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_call and node.func.id in ERRORS and node.args:
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                scope = inside.get(id(node), tree_of(path))
                found[place] = [*words_of(node.args[0], scope)]
    return found


@functools.cache
def returned_by() -> dict[str, list[tuple[ast.expr, ast.AST]]]:
    """What functions of the sources return, by their names."""
    returned: dict[str, list[tuple[ast.expr, ast.AST]]] = {}
    for path in files():
        for function in nodes_of(path):
            if not isinstance(function, FUNCTIONS):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and node.value is not None:
                    pair = node.value, function
                    returned.setdefault(function.name, []).append(pair)
    return returned


def words_of(node: ast.expr, scope: ast.AST, depth: int = 3) -> Iterator[str]:
    """The texts of an expression: of a local name what the function assigns to it, of
    a call what the function returns.
    """
    pairs: list[tuple[ast.expr, ast.AST]] = []
    if isinstance(node, ast.IfExp):
        pairs = [(node.body, scope), (node.orelse, scope)]
    elif isinstance(node, ast.Name):
        for statement in ast.walk(scope):
            if isinstance(statement, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == node.id
                for target in statement.targets
            ):
                pairs.append((statement.value, scope))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        pairs = returned_by().get(node.func.id, [])
    if not (pairs and depth):
        yield text_of(node)
    for expression, of in pairs if depth else ():
        yield from words_of(expression, of, depth - 1)


@functools.cache
def texts() -> list[str]:
    """All fixed texts of the sources."""
    found: list[str] = []
    for path in files():
        for node in nodes_of(path):
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
    start = 0
    for part in phrase.split("…"):
        position = text.find(part.strip(), start)
        if position < 0:
            return False
        start = position + len(part.strip())
    return True


def test_rows_that_refuse_have_words_of_the_error():
    source = {*texts()}
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
    missing = [
        f"{place} {text}"
        for place, texts_of_error in refusals().items()
        for text in texts_of_error
        if len(re.sub("[^a-z]", "", text)) >= FEWEST_LETTERS
        and not OF_A_VALUE.search(text)
        and not any(is_in(phrase, text) for phrase in phrases)
    ]
    assert not missing, "\n".join(missing)
