"""Write docs/errors.md: what errors and warnings of the package say, by their words.

``python -m tests.errors`` prints the page, ``python -m tests.errors --write`` writes it.

The words are read from the sources: the texts of all errors that they raise, and of all
warnings. A value that is filled in when the error is raised is shown by its noun in the
sources, as ‹noun›. A remedy that depends on the case, or has several conditions, is a
list. Values of the wrong type are left out, whose error says all.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections.abc import Container, Iterator
from operator import attrgetter, itemgetter
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
# Functions of the check before a step, with the number of the argument that is the
# problem; the remedy is the next one.
OF_THE_CHECK = {"_refused": ("error", 0), "_told": ("warning", 1)}
OF_THE_CHECK["in_lines"] = "warning", 0
CAUSE_ENDS = re.compile("(?:: |, )(?=pass |add it |«)")  # there the remedy begins
FEWEST_LETTERS = 25  # a text with fewer of its own is put together of other ones
PLACEHOLDER = re.compile("‹[^›]*›")
# Nouns of values that say nothing about them.
EMPTY_NOUNS = {"text", "value", "first", "word", "words"}
NOUNS = {
    "form": "your arguments",
    "k": "k",
    "why": "reason",
    "shown": "reason",
    "stride": "strides",
}
NOUNS |= {"mean_or_sum": "a mean or a sum", "another": "a sum, for example"}
NOUNS |= dict.fromkeys(
    ("first_of_these", "right_one", "assumed_one"), "a mean, for example"
)
NOUNS |= {"kind_of_tensor": "quantised, for example", "lists": "lists"}
# A value that is the last sentence of a message.
SENTENCES = {"remedies": "Your message ends with what to pass or change"}
SENTENCES["lines_of_ranks"] = "Your message ends with the line that each rank is at"
LETTERS_OF_A_SENTENCE = 40
MAX_CASES = 5  # texts of a remedy that are shown
# The cases of a part of a remedy: "pass «a¦b»" is "pass a" or "pass b".
CASES = re.compile("«(.*?)»", re.DOTALL)
NEXT_CONDITION = re.compile(r"\. (?=(?:If|Or|Otherwise|With the pair)\b)")
NOTHING_CHANGED = re.compile(r"(^|\. )Nothing was changed$")
NOTHING_TO_DO = "nothing to do"


class Topic(NamedTuple):
    """A section of the page.

    Attributes:
        title: its title.
        page: the page to read about it.
        files: the beginnings of paths of files whose messages it has.
        words: a pattern that the problem has, too.
        context: what the user did that leads to these messages.
    """

    title: str
    page: str
    files: tuple[str, ...]
    words: str
    context: str


SECOND_LINE = "the second line of “your loss of … is not the …”"
# The first that fits counts.
TOPICS = (
    Topic(
        "The check before a step",
        "losses.md#if-you-forget",
        ("verify/",),
        "^(?!.*(whole_batch=True|DataParallel|differs between micro-batches))",
        """Before steps 1, 2, 4, 8, … the engine computes the loss and the gradient of a few rows twice: in one piece, with your own module in plain torch; and in parts, on a
replica (a copy of your module). An example: 9 rows in one piece, and in parts of 4 + 3 + 2 rows. If the two gradients differ, it raises one of these errors. `engine(x)`, the pair, and loops of
libraries are checked in the same way.""",
    ),
    Topic(
        "whole_batch=True",
        "contrastive.md",
        ("options/whole_batch", "verify/"),
        "whole_batch=True|differs between micro-batches|forward twice|^the loss uses"
        "|^the criterion uses",
        """With `whole_batch=True` the engine joins the outputs of all micro-batches, and calls the criterion once, with all of them. If a
replica has several sub-steps, `forward` runs twice for each micro-batch: first without gradients, to compute the outputs for the criterion; then again, with gradients. Both runs must give the same outputs.""",
    ),
    Topic(
        "DataParallelModel and DataParallelCriterion",
        "pair.md",
        ("pair/", "verify/"),
        "DataParallel|^outputs? |^there are no outputs|cannot be averaged",
        """`DataParallelModel` returns a tuple with one output per device. `DataParallelCriterion` computes the loss of each output on its device, and averages the losses.
`gather(outputs, device)` joins the outputs on one device.""",
    ),
    Topic(
        "nn.SyncBatchNorm",
        "large-batches.md#over-the-rows-of-all-replicas",
        ("",),
        r"SyncBatchNorm|does not come to|In this layer each|value per channel",
        """An `nn.SyncBatchNorm` in training mode normalises over the micro-batches of all replicas. So each replica waits in this layer for all others.""",
    ),
    Topic(
        "CUDA graphs and torch.compile",
        "cuda-graphs.md",
        ("replicas/compiled", "options/graphs"),
        "",
        """Replicas compute in threads of one process. CUDA graphs that `torch.compile` records were never tried there.""",
    ),
    Topic(
        "The loss",
        "losses.md",
        ("step/",),
        r"^(?!module is|the module holds|the criterion is|inputs|.*in place\.)",
        """Messages of `engine.forward_backward` and `engine.loss` on the criterion, on `count=`, and on gradients.""",
    ),
    Topic(
        "Inputs and targets",
        "batches.md",
        ("batch/", "step/misfits", "step/row_writes"),
        "^the batch|^tensors of the batch|iterates|from_batches|^the criterion is|^inputs"
        "|in place",
        """All tensors of a batch need the same number of rows: the same size along `dim`. `Replicated(value)` marks a value without rows.
`Rows(list)` marks a list with one entry per row.""",
    ),
    Topic(
        "Outputs",
        "batches.md",
        ("batch/",),
        "",
        """Outputs of micro-batches are joined by `whole_batch=True`, `return_outputs=True`, `engine(x)`, `engine.map` and `gather`: tensors with one entry per row are concatenated along `dim`.""",
    ),
    Topic(
        'engine.map, and accum="auto"',
        "batches.md",
        ("options/map_rows", "options/auto"),
        "",
        """`engine.map(function, …)` calls the function on all replicas. `accum="auto"` tries more and more sub-steps until the memory suffices.""",
    ),
    Topic(
        "engine(x) and backward()",
        "loops.md#what-differs-from-one-device",
        ("calls/", "engine.py"),
        "",
        """Inside of `engine.no_sync()`, `backward()` leaves the gradients of the replicas on their devices. They wait there until the next `backward()` outside of `no_sync()` adds
them to `.grad`.""",
    ),
    Topic(
        "The module",
        "limits.md#state-in-modules",
        ("replicas/", "objects/", "wr", "step/"),
        "",
        """Each replica has copies of the module's parameters and buffers, or shares them if it is on the same device.""",
    ),
    Topic(
        "Several processes",
        "several-machines.md",
        ("distributed/",),
        "",
        """Messages of an engine with `process_group=`: each process is a rank with devices and rows of its own.""",
    ),
    Topic(
        "splitcheck",
        "splitcheck.md",
        ("splitting/",),
        "",
        """`splitcheck(step, model, batch, parts=…, ranks=…)` calls your function `step` with the whole batch, and with the batch in parts. It compares the gradients.
In these calls random operators return constants in the place of random numbers. For a library's trainer, `make(model, steps)` is your function that makes the trainer.""",
    ),
    Topic(
        "ShardedOptimizer",
        "recipes.md#the-optimizers-state-on-all-gpus",
        ("sharded",),
        "",
        """`ShardedOptimizer(engine, optimizer_class, …)` stores the state of each parameter on one of the devices.""",
    ),
    Topic(
        "gradual_warmup",
        "large-batches.md",
        ("recipe",),
        "",
        """`gradual_warmup(optimizer, warmup_steps, start_lr, after=scheduler)` raises the learning rate, and then steps the scheduler that is passed as `after=`.""",
    ),
    Topic(
        "Loops of libraries",
        "loops.md",
        ("integrations/",),
        "",
        """Messages of `ScatterOnceTrainer`, `ScatterOnceStrategy` (Lightning) and `ScatterOnce` (fastai). They divide the calls of your model over the devices.""",
    ),
    Topic(
        "Training program",
        "training-program.md",
        ("train",),
        "",
        """Messages of `python -m scatterpar train`.""",
    ),
    Topic(
        "Threads",
        "debugging.md#your-process",
        ("threads/", "torch_private/"),
        "",
        """Each replica computes in a thread of its own.""",
    ),
    Topic(
        "Devices and options",
        "gpus.md",
        ("",),
        "",
        """Messages on `device_ids`, on copies between devices, and on options of the engine.""",
    ),
)


class Message(NamedTuple):
    """What an error or a warning says.

    Attributes:
        place: its file and line, below the package.
        text: its fixed words, with an ellipsis in the place of all else.
        shown: its words with nouns, and with the texts of a remedy.
    """

    place: str
    text: str
    shown: str


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


def words_of(node: ast.expr, scope: ast.AST) -> Iterator[str]:
    """The texts of an expression."""
    for expression, _ in expressions_of(node, scope):
        yield text_of(expression)


def noun_of(node: ast.AST) -> str:
    """The noun of a value in words, from its name in the sources; empty if none."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            if name in ("__name__", "__qualname__") and isinstance(node, ast.Attribute):
                return noun_of(node.value)
            words = name.strip("_").replace("_", " ")
            if name in NOUNS:
                return NOUNS[name]
            is_empty = words in EMPTY_NOUNS or words.startswith("of ")
            return "" if is_empty or len(words) < 3 else words
        case ast.Subscript(value=inner) | ast.BinOp(left=inner):
            return noun_of(inner)
        case ast.GeneratorExp(generators=[ast.comprehension(iter=inner)]):
            return noun_of(inner)
        case ast.Call(func=ast.Name("type")):
            return "class"
        case ast.Call(func=ast.Name("_size_of")):
            return "off by so many %"
        case ast.Call(func=ast.Name("len"), args=[inner]):
            return f"number of {noun_of(inner)}" if noun_of(inner) else "number"
        case ast.Call(func=ast.Attribute(attr="join"), args=[inner]):
            return noun_of(inner)
        case ast.Call(func=ast.Name("map"), args=[_, inner]):
            return noun_of(inner)
        case ast.Call(func=ast.Name(name), args=[inner, *_]):
            words = name.strip("_").replace("_", " ")
            is_noun = " of " in words or words == "expression"
            return words if is_noun else noun_of(inner)
        case ast.Call(func=ast.Attribute(attr="detach", value=inner)):
            return noun_of(inner)
        case ast.Call(func=ast.Attribute() as inner, args=[]):
            return noun_of(inner)
    return ""


def placeholder(node: ast.AST) -> str:
    """The noun of a value, marked, or the sentence that it stands for."""
    if isinstance(node, ast.Name) and node.id in SENTENCES:
        return SENTENCES[node.id]
    noun = noun_of(node)
    return f"‹{noun}›" if noun else "…"


def cases_of(node: ast.expr, scope: ast.AST, depth: int) -> list[str]:
    """The texts that a value in a text has; empty if one of them is not fixed."""
    cases: list[str] = []
    for expression, of in expressions_of(node, scope) if depth else ():
        is_text = isinstance(expression, (ast.Constant, ast.JoinedStr))
        if not is_text and text_of(expression) == "…":
            return []
        text = shown_of(expression, of, has_remedy=True, depth=depth - 1)
        if CASES.search(text):  # cases of a case
            return []
        cases.append(text)
    # A sentence may be the beginning of another one, which says all.
    texts = list(dict.fromkeys(cases))
    longest = max(texts, key=len, default="")
    for text in texts[:]:
        is_sentence = len(text) >= LETTERS_OF_A_SENTENCE and text != longest
        if is_sentence and longest.startswith(text):
            texts.remove(text)
    return texts


def shown_of(
    node: ast.AST, scope: ast.AST, *, has_remedy: bool = False, depth: int = 3
) -> str:
    """The words of a text, with nouns for values, and the texts of its remedy.

    With ``has_remedy``, it is a remedy from its beginning; else from "; " on.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return shown_of(node.left, scope) + shown_of(node.right, scope)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        text = shown_of(node.func.value, scope, has_remedy=has_remedy)
        return text.capitalize() if node.func.attr == "capitalize" else text
    if isinstance(node, ast.Name) and node.id not in constants():
        cases = cases_of(node, scope, depth)
        return cases[0] if len(cases) == 1 else placeholder(node)
    if not isinstance(node, ast.JoinedStr):
        text = text_of(node)
        return placeholder(node) if text == "…" else text
    shown = ""
    for part in node.values:
        if not isinstance(part, ast.FormattedValue):
            shown += text_of(part)
            continue
        text = text_of(part)
        if text != "…":
            shown += text.removesuffix(".0")
            continue
        cases = cases_of(part.value, scope, depth)
        in_remedy = has_remedy or "; " in shown
        if in_remedy and len(cases) > 1 and "" in cases:  # only sometimes there
            cases.remove("")
        if len(cases) == 1 and (in_remedy or "; " not in cases[0]):
            shown += cases[0]
        elif in_remedy and 1 < len(cases) <= MAX_CASES:
            shown += f"«{'¦'.join(cases)}»"
        elif shown[-1:].isalpha():
            shown += "…"
        else:
            shown += placeholder(part.value)
    return shown


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
        for expression, of in expressions_of(call.args[0], scope):
            text = " ".join(text_of(expression).split())
            yield Message(place, text, " ".join(shown_of(expression, of).split()))


def messages_of_the_check() -> Iterator[tuple[str, str, str, str]]:
    """The errors and warnings of the check before a step.

    Yields the kind, the place, the problem and the remedy.
    """
    causes = "_refused_combination"  # has one problem, and is called with each cause
    for name, call, scope, place in calls_of({*OF_THE_CHECK, causes}):
        if name == causes:
            for expression, of in expressions_of(call.args[1], scope):
                if is_shown(text_of(expression)):
                    text = shown_of(expression, of, has_remedy=True).removesuffix(".")
                    problem, remedy = CAUSE_ENDS.split(text, maxsplit=1)
                    yield SECOND_LINE, place, problem, remedy
            continue
        kind, number = OF_THE_CHECK[name]
        if not place.startswith("verify/") or len(call.args) < number + 2:
            continue
        if isinstance(scope, FUNCTIONS) and scope.name in OF_THE_CHECK:
            continue  # passes on its own arguments
        remedy = shown_of(call.args[number + 1], scope, has_remedy=True)
        if isinstance(scope, FUNCTIONS) and scope.name == causes:
            remedy = "Its second line says what to do: see the next table"
        for expression, of in expressions_of(call.args[number], scope):
            if is_shown(text_of(expression)):
                problem = shown_of(expression, of).removesuffix(".")
                yield kind, place, problem, remedy


def is_shown(text: str) -> bool:
    """Whether a text has words of its own, and more than a value of a wrong type."""
    text = re.sub(r"docs/\w+\.md, [\w ]+\.", "", text)  # says where to read on
    letters = len(re.sub("[^a-z]", "", text))
    return letters >= FEWEST_LETTERS and not OF_A_VALUE.search(text)


def row(problem: str, remedy: str) -> str:
    """The row of a message."""
    quoted = problem.replace("|", "\\|").strip()
    fence = "``" if "`" in quoted else "`"
    quoted = f"{fence} {quoted} {fence}" if "`" in quoted else f"`{quoted}`"
    return f"| {quoted} | {advice(remedy or NOTHING_TO_DO)} |"


def advice(remedy: str) -> str:
    """The cell of a remedy: a list if it has several conditions or cases."""
    cases = sorted(all_cases(remedy), key=len)  # the plain one first
    sentences: list[str] = []
    for case in cases:
        sentences += NEXT_CONDITION.split(NOTHING_CHANGED.sub("", case))
    lines = []
    for sentence in dict.fromkeys(sentences):
        (first, *_) = sentence.split()
        text = sentence.removesuffix(".")
        is_word = first.removesuffix(",").isalpha()
        text = text[0].upper() + text[1:] if is_word else text
        lines.append(re.sub(r"([*_<>|`[\]])", r"\\\1", text))
    if len(lines) == 1:
        return lines[0]
    if len(cases) > 1:
        lines.insert(0, "Your message has what applies to your program:")
    else:
        lines[0] = f"• {lines[0]}"
    return "<br>• ".join(lines)


def all_cases(remedy: str) -> list[str]:
    """The texts that a remedy may be."""
    match = CASES.search(remedy)
    if match is None:
        return [remedy]
    texts: list[str] = []
    for case in match[1].split("¦"):
        texts += all_cases(remedy[: match.start()] + case + remedy[match.end() :])
    return texts


def page() -> str:
    """The page: a section per topic, with a table per kind."""
    rows: dict[Topic, dict[str, list[str]]] = {topic: {} for topic in TOPICS}

    def add(kind: str, place: str, problem: str, remedy: str) -> None:
        table = rows[topic_of(place, problem)].setdefault(kind, [])
        line = row(problem, remedy)
        if line not in table:
            table.append(line)

    for found in sorted(messages_of_the_check(), key=itemgetter(0)):
        add(*found)
    for kind, names in {"error": ERRORS, "warning": {"warn"}}.items():
        for place, text, shown in messages(names):
            if is_shown(text) and is_shown(text.partition("; ")[0]):
                problem, _, remedy = shown.partition("; ")
                add(kind, place, problem, remedy)
    lines = [_HEAD]
    for topic, tables in rows.items():
        if tables:
            more = f"More: [{topic.page.partition('#')[0]}]({topic.page})"
            lines.append(f"\n## {topic.title}\n\n{topic.context} {more}")
        for kind, table in sorted(tables.items()):
            lines += [f"\n| {kind} | what to do |", "|---|---|", *table]
    return "\n".join(lines) + "\n"


def topic_of(place: str, problem: str) -> Topic:
    """The section of a message."""
    return next(
        topic
        for topic in TOPICS
        if place.startswith(topic.files) and re.search(topic.words, problem)
    )


_HEAD = """# Errors by their words

Search this page for some words of your message. `‹…›` and `…` stand for names, numbers and shapes of your program.
[Replica, micro-batch and sub-step](start.md#words) are explained on *Start*. What goes wrong without an error is on [Silently wrong](silently-wrong.md). [When a step fails](debugging.md) says how to debug a step.

**A step that raises an error has changed nothing**, unless the error says that values are lost. Each error is a `ValueError`, `TypeError` or `RuntimeError`.
There are three exceptions: `FloatingPointError` (`check_finite=True`), `AttributeError` (an option that cannot be set later) and `TimeoutError`.
*Written by `python -m tests.errors --write` from the sources.*"""


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
