"""Write docs/errors.md: what errors and warnings of the package say, by their words.

``python -m tests.errors`` prints the page, ``python -m tests.errors --write`` writes it.

The words are read from the sources: the texts of all errors that they raise, and of all
warnings. What is filled in when the error is raised is an ellipsis. Values of the wrong
type are left out, whose error says all.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections.abc import Container, Iterator
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "scatterpar"
PAGE = ROOT / "docs" / "errors.md"
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
# Functions of the check before a step, which get a problem and a remedy.
OF_THE_CHECK = {"_refused": "error", "_told": "warning", "in_lines": "warning"}
FEWEST_LETTERS = 25  # a text with fewer of its own is put together of other ones


class Topic(NamedTuple):
    """A section of the page: the errors of some files, and the page to read about them."""

    title: str
    page: str
    files: tuple[str, ...]


CHECK = Topic("The check before a step", "losses.md#if-you-forget", ("verify/",))
# The first that fits counts; a file is named by the beginning of its path.
TOPICS = (
    Topic(
        "The loss",
        "losses.md",
        ("step/lo", "step/criterion", "step/inner", "step/returned", "step/commit"),
    ),
    Topic("The loss", "losses.md", ("step/reduce", "step/substeps", "verify/")),
    Topic("One loss for the whole batch", "contrastive.md", ("options/whole_batch",)),
    Topic("The batch", "batches.md", ("batch/", "step/misfits", "step/row_writes")),
    Topic("Outputs", "batches.md", ("options/map_rows",)),
    Topic("The module", "limits.md#state-in-modules", ("replicas/", "objects/", "wr")),
    Topic("Several processes", "several-machines.md", ("distributed/",)),
    Topic("The pair", "pair.md", ("pair/",)),
    Topic("splitcheck", "splitcheck.md", ("splitting/",)),
    Topic("Optimizers and learning rates", "recipes.md", ("sharded", "recipe")),
    Topic("Loops of libraries", "loops.md", ("integrations/",)),
    Topic("Training program", "training-program.md", ("train",)),
    Topic("Options, devices and threads", "gpus.md", ("",)),
)


class Message(NamedTuple):
    """What an error or a warning says.

    Attributes:
        place: its file and line, below the package.
        text: its fixed words, with an ellipsis in the place of all else.
    """

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


def messages(names: set[str]) -> Iterator[Message]:
    """What the sources pass as the first argument to functions of these names."""
    for _, call, scope, place in calls_of(names):
        for text in words_of(call.args[0], scope):
            yield Message(place, " ".join(text.split()))


def messages_of_the_check() -> Iterator[tuple[str, str]]:
    """The rows of errors and warnings of the check before a step, by their kind."""
    causes = "_refused_combination"  # has one problem, and is called with each cause
    for name, call, scope, _ in calls_of(OF_THE_CHECK):
        if len(call.args) < 2:  # another function of this name
            continue
        remedy = " ".join(text_of(call.args[1]).split())
        if isinstance(scope, FUNCTIONS) and scope.name == causes:
            remedy = "the message ends with one of the hints in the rows below"
        for problem in words_of(call.args[0], scope):
            if is_shown(problem):
                yield OF_THE_CHECK[name], row(problem.removesuffix("."), remedy)
    for _, call, scope, _ in calls_of({causes}):
        for text in words_of(call.args[1], scope):
            problem, _, remedy = text.removesuffix(".").partition(": pass ")
            if is_shown(text):
                yield "error", row(problem, f"pass {remedy}" if remedy else "")


def is_shown(text: str) -> bool:
    """Whether a text has words of its own, and more than a value of a wrong type."""
    text = re.sub(r"docs/\w+\.md, [\w ]+\.", "", text)  # says where to read on
    letters = len(re.sub("[^a-z]", "", text))
    return letters >= FEWEST_LETTERS and not OF_A_VALUE.search(text)


def row(problem: str, remedy: str) -> str:
    """The row of a message."""
    remedy = "" if remedy == "…" else remedy.removesuffix(" …")
    quoted = problem.replace("|", "\\|").strip()
    fence = "``" if "`" in quoted else "`"
    quoted = f"{fence} {quoted} {fence}" if "`" in quoted else f"`{quoted}`"
    escaped = re.sub(r"([*_<>|`[\]])", r"\\\1", remedy)
    return f"| {quoted} | {escaped} |"


def page() -> str:
    """The page: a table per topic."""
    kinds = {"error": messages(ERRORS), "warning": messages({"warn"})}
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    of_the_check = rows.setdefault((CHECK.title, CHECK.page), {})
    for kind, line in sorted(dict.fromkeys(messages_of_the_check()), key=itemgetter(0)):
        of_the_check.setdefault(kind, []).append(line)
    for kind, found in kinds.items():
        for place, text in found:
            problem, _, remedy = text.partition("; ")
            if not is_shown(text) or not is_shown(problem):
                continue
            topic = next(topic for topic in TOPICS if place.startswith(topic.files))
            tables = rows.setdefault((topic.title, topic.page), {})
            table = tables.setdefault(kind, [])
            line = row(problem, remedy)
            if line not in table:
                table.append(line)
    lines = [_HEAD]
    for topic in dict.fromkeys((topic.title, topic.page) for topic in (CHECK, *TOPICS)):
        title, target = topic
        tables = rows.get(topic, {})
        if tables:
            lines.append(
                f"\n## {title}\n\nMore: [{target.partition('#')[0]}]({target})"
            )
        for kind, table in tables.items():
            lines += [f"\n| {kind} | what to do |", "|---|---|", *table]
    return "\n".join(lines) + "\n"


_HEAD = """# Errors by their words

This page has scatterpar's errors and warnings, and what to do. Search it for some words of your message; `…` stands for
names and numbers. What goes wrong without an error, and how to debug a step, is on [Limits](limits.md).

Each error is a `ValueError`, `TypeError` or `RuntimeError`. A step that raises one has changed nothing, unless the error
says so. *Written by `python -m tests.errors --write` from the sources.*"""


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/errors.md")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
