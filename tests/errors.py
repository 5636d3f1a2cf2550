"""Whether docs/errors.md has all messages of the package, and no others.

``python -m tests.errors`` prints the messages that the page lacks, and the words of rows
that no message has. The page is written by hand: a row has the words by which a user
finds a message, and a link to the section that explains it. Messages that no section
explains are in ``tests/unexplained_errors.md``.

Messages are read from the sources: the texts of errors, warnings and notes. Values are
shown as ``…``. Messages on a value of a wrong type are left out: they say all.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Container, Iterator
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "scatterpar"
PAGE = ROOT / "docs" / "errors.md"
# Messages that no section of the guide explains.
UNEXPLAINED = ROOT / "tests" / "unexplained_errors.md"
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
# Functions that make or show a message, with the number of the argument that is its text.
TEXTS = dict.fromkeys(ERRORS, 0)
TEXTS |= {"warn": 0, "_warn": -1, "add_note": -1}
# Of the check before a step: the argument that is the problem or the cause.
TEXTS |= {"in_lines": 0, "_refused": 0, "_told": 1, "_refused_combination": 1}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# A value of a wrong type.
OF_A_VALUE = re.compile(r"\bmust (be|have|return|begin|give)\b|\bgot …|^Rows takes")
READ_ON = re.compile(r"docs/\w+\.md, [\w ]+\.")
FEWEST_LETTERS = 16  # a text with fewer of its own is put together of other ones
# A phrase in code font on the page. One that has backticks is between two of them.
PHRASE = re.compile(r"`` (.+?) ``|`([^`]+)`")


class Message(NamedTuple):
    """A text of an error, a warning or a note, with … for values."""

    place: str
    text: str


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


@functools.cache
def constants() -> dict[str, str]:
    """The texts that modules of the package give a name, once each."""
    named: dict[str, str] = {}
    for path in files():
        for statement in tree_of(path).body:
            if not isinstance(statement, ast.Assign):
                continue
            (target, *_), value = statement.targets, statement.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                named[target.id] = str(value.value)
    return named


def text_of(node: ast.AST) -> str:
    """The fixed words of an expression, with … in the place of all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return constants().get(node.id, "…")
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value) if isinstance(node.value, ast.Name) else "…"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "…"


@functools.cache
def all_texts() -> tuple[str, ...]:
    """All fixed texts of the sources."""
    found: list[str] = []
    for path in files():
        for node in nodes_of(path):
            if isinstance(node, (ast.JoinedStr, ast.Constant)):
                found.append(text_of(node))
    return tuple(found)


@functools.cache
def returned_by() -> dict[str, list[tuple[ast.expr, ast.AST]]]:
    """What functions of the sources return, by their names."""
    returned: dict[str, list[tuple[ast.expr, ast.AST]]] = {}
    for path in files():
        for function in nodes_of(path):
            if not isinstance(function, FUNCTIONS):
                continue
            returns = [
                node for node in ast.walk(function) if isinstance(node, ast.Return)
            ]
            for node in sorted(returns, key=attrgetter("lineno")):
                if node.value is not None:
                    pair = node.value, function
                    returned.setdefault(function.name, []).append(pair)
    return returned


def expressions_of(
    node: ast.expr, scope: ast.AST, depth: int = 3
) -> Iterator[tuple[ast.expr, ast.AST]]:
    """The expressions that an expression stands for: a local name for what the function
    assigns to it, a call for what the function returns. Yields each with its function.
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
        yield node, scope
    for expression, of in pairs if depth else ():
        yield from expressions_of(expression, of, depth - 1)


def texts_of(node: ast.expr, scope: ast.AST, depth: int = 3) -> Iterator[str]:
    """The texts that an expression may be.

    A value with a single text is filled in. If it has several, each of them is yielded,
    unless the expression has words of its own.
    """
    for expression, of in expressions_of(node, scope):
        parts: list[ast.expr] = [expression]
        if isinstance(expression, ast.JoinedStr):
            parts = expression.values
        text = ""
        cases: list[str] = []
        for part in parts:
            texts = [text_of(part)]
            if texts == ["…"] and isinstance(part, ast.FormattedValue) and depth:
                texts = [*texts_of(part.value, of, depth - 1)]
            is_remedy = "; " in text
            text += texts[0] if len(texts) == 1 else "…"
            if len(texts) > 1 and not is_remedy:
                cases += texts
        yield " ".join(text.split())
        if not (has_words(text) or OF_A_VALUE.search(text)):
            yield from cases


def has_words(text: str) -> bool:
    """Whether the problem that a text names has more than a few words of its own."""
    problem, _, _ = READ_ON.sub("", text).partition("; ")
    return len(re.sub("[^a-z]", "", problem)) >= FEWEST_LETTERS


def calls_of(names: Container[str]) -> Iterator[tuple[str, ast.Call, ast.AST, str]]:
    """The calls of functions of these names in the sources.

    Yields the name, the call, the function around it, and its place.
    """
    for path in files():
        functions = [node for node in nodes_of(path) if isinstance(node, FUNCTIONS)]
        inside = {
            id(node): function for function in functions for node in ast.walk(function)
        }
        for node in nodes_of(path):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else None
            name = called.id if isinstance(called, ast.Name) else name
            if name in names:
                place = f"{path.relative_to(PACKAGE).as_posix()}:{node.lineno}"
                yield name, node, inside.get(id(node), tree_of(path)), place


def messages() -> Iterator[Message]:
    """The texts of all errors, warnings and notes of the sources."""
    for name, call, scope, place in calls_of(TEXTS):
        number = TEXTS[name]
        if name == "warn" and isinstance(call.func, ast.Attribute):
            number = min(1, len(call.args) - 1)  # a subject may come first
        if number < len(call.args):
            for text in texts_of(call.args[number], scope):
                yield Message(place, text)


def phrases() -> list[str]:
    """The words of messages on the page, and of those that nothing explains."""
    found: list[str] = []
    for page in (PAGE, UNEXPLAINED):
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith("| `"):
                found += ["".join(pair) for pair in PHRASE.findall(line)]
    return found


def is_in(phrase: str, text: str) -> bool:
    """Whether the words of a phrase are in the text, in their order."""
    start = 0
    for part in phrase.split("…"):
        position = text.find(part.strip(), start)
        if position < 0:
            return False
        start = position + len(part.strip())
    return True


def lacking() -> list[Message]:
    """The messages of which the page has no words."""
    on_page = phrases()
    return [
        message
        for message in messages()
        if has_words(message.text) and not OF_A_VALUE.search(message.text)
        if not any(is_in(phrase, message.text) for phrase in on_page)
    ]


def unknown() -> list[str]:
    """The words on the page that no text of the sources has."""
    texts = {" ".join(text.split()) for text in all_texts()}
    texts.update(message.text for message in messages())
    return [
        phrase for phrase in phrases() if not any(is_in(phrase, text) for text in texts)
    ]


def main() -> int:
    """Print what is wrong with the page. Returns 1 if anything is, else 0."""
    lines = [f"{PAGE} has no words of: {text} ({place})" for place, text in lacking()]
    lines += [f"no message has these words of {PAGE}: {phrase}" for phrase in unknown()]
    for line in lines:
        print(line)
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
