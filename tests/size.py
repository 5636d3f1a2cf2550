"""How much must be held in one's head? Tokens of the package, to be seen, not to be met.

    python -m tests.size            one line per package
    python -m tests.size REVISION   what has changed since: one line per file
    python -m tests.size --write    the sizes in the table of docs/architecture.md

Tokens are names, operators, numbers and strings, without annotations, imports,
docstrings and comments: a thought has as many on one line as on five.
"""

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "scatterpar"
PAGE = ROOT / "docs" / "architecture.md"
_COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
_STRING_STARTS = ("FSTRING_START", "TSTRING_START")
_STRING_ENDS = ("FSTRING_END", "TSTRING_END")
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class _Bare(ast.NodeTransformer):
    """Takes away what says nothing about what the code does."""

    def visit(self, node):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return super().visit(node)

    def visit_Import(self, node):
        return ast.Pass()

    visit_ImportFrom = visit_Import

    def visit_arg(self, node):
        node.annotation = None
        return node

    def visit_FunctionDef(self, node):
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node):
        if node.value is None:
            return ast.Expr(node.target)
        assignment = ast.Assign([node.target], node.value, lineno=node.lineno)
        return self.generic_visit(assignment)


def tokens_in(text):
    """The number of tokens of a file."""
    tree = _Bare().visit(ast.parse(text))
    bare = ast.unparse(ast.fix_missing_locations(tree))
    # An import, and a body without statements, left a ``pass``.
    return _counted_tokens(bare) - bare.count("pass\n")


def _counted_tokens(text):
    """A formatted string is one token, as before Python 3.12, which reads its parts."""
    count = 0
    open_strings = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind in _STRING_STARTS:
            open_strings += 1
        elif kind in _STRING_ENDS:
            open_strings -= 1
            count += open_strings == 0
        elif open_strings == 0:
            count += token.type in _COUNTED
    return count


def sizes_now():
    """The tokens of each file of the working tree, by its path."""
    sizes = Counter()
    for path in (ROOT / PACKAGE).rglob("*.py"):
        sizes[path.relative_to(ROOT).as_posix()] = tokens_in(path.read_text("utf-8"))
    return sizes


def sizes_at(revision):
    """The tokens of each file of a revision, by its path."""
    sizes = Counter()
    listing = _git("ls-tree", "-r", "--name-only", revision, PACKAGE)
    for path in listing.splitlines():
        if path.endswith(".py"):
            sizes[path] = tokens_in(_git("show", f"{revision}:{path}"))
    return sizes


def _git(*arguments):
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def print_packages(sizes):
    """One line per package, the largest first."""
    packages = Counter()
    for path, size in sizes.items():
        folders = path.split("/")
        packages[folders[1] if len(folders) > 2 else "(files)"] += size
    for package, size in packages.most_common():
        print(f"{size:8,}  {package}")
    print(f"{sizes.total():8,}  all")


def print_difference(before, now):
    """One line per file whose size is another one, the largest difference first."""
    differences = {path: now[path] - before[path] for path in before | now}
    for path in sorted(differences, key=lambda path: -abs(differences[path])):
        if differences[path]:
            print(f"{differences[path]:+8,}  {before[path]:,} to {now[path]:,}  {path}")
    print(f"{now.total() - before.total():+8,}  {before.total():,} to {now.total():,}")


# A row of *Mechanisms*: the idea, its files, its size, what it is for.
_ROW = re.compile(r"^(\| [^|]+ \| )(`[^|]+`)( \| )([\d,]+)( \|.*)$", re.MULTILINE)


def mechanisms():
    """The names of files and folders in each row of *Mechanisms*, and its size there."""
    return [
        (re.findall(r"`([\w/.]+)`", files), int(size.replace(",", "")))
        for _, files, _, size, _ in _ROW.findall(PAGE.read_text("utf-8"))
    ]


def size_of_mechanism(names, sizes, all_names):
    """The tokens of a row. A folder is all of its files that no row names."""
    total = 0
    for path, size in sizes.items():
        name = path.removeprefix(f"{PACKAGE}/")
        folder = name[: name.rfind("/") + 1]
        total += size * (name in names or (folder in names and name not in all_names))
    return total


def page_with_sizes(sizes):
    """The text of the page, with the sizes of its table as they are now."""
    all_names = {name for names, _ in mechanisms() for name in names}

    def with_size(row):
        names = re.findall(r"`([\w/.]+)`", row[2])
        hundreds = round(size_of_mechanism(names, sizes, all_names), -2)
        return f"{row[1]}{row[2]}{row[3]}{max(100, hundreds):,}{row[5]}"

    return _ROW.sub(with_size, PAGE.read_text("utf-8"))


def main():
    """Parse the command line, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision", nargs="?")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    revision = arguments.revision
    if arguments.write:
        PAGE.write_text(page_with_sizes(sizes_now()), "utf-8")
    elif revision is None:
        print_packages(sizes_now())
    else:
        print_difference(sizes_at(revision), sizes_now())


if __name__ == "__main__":
    main()
