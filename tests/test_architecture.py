"""Packages import only from lower packages, in the order of docs/architecture.md."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

from faults.processes import run

import scatterpar

PACKAGE = Path(scatterpar.__file__).parent

# The lowest first.
PACKAGES = [
    "devices",
    "batch",
    "threads",
    "replicas",
    "step",
    "verify",
    "distributed",
    "options",
]
ABOVE = len(PACKAGES)  # the engine, the pair and the tool
FOR_ALL = {
    "scatterpar.plan",
    "scatterpar.errors",
    "scatterpar.report",
    "scatterpar.torch_private",
    "scatterpar.version",
    "scatterpar.wrapper",
}


def level_of(module):
    parts = module.split(".")
    package = parts[1] if len(parts) > 1 else ""
    return PACKAGES.index(package) if package in PACKAGES else ABOVE


def imports(path):
    """The modules of the package that a file imports, by their full names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "scatterpar"
        ):
            for alias in node.names:
                child = PACKAGE.joinpath(
                    *node.module.split(".")[1:], alias.name + ".py"
                )
                yield f"{node.module}.{alias.name}" if child.exists() else node.module
        elif isinstance(node, ast.Import):
            yield from (
                a.name for a in node.names if a.name.split(".")[0] == "scatterpar"
            )


def name_of(path):
    return ".".join(["scatterpar", *path.relative_to(PACKAGE).with_suffix("").parts])


def sources():
    return {
        name_of(path): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
    }


def graph():
    return {name_of(path): set(imports(path)) for path in PACKAGE.rglob("*.py")}


def test_no_package_imports_a_higher_one():
    for module, others in graph().items():
        assert not [
            each for each in others - FOR_ALL if level_of(each) > level_of(module)
        ], module


def test_splitcheck_knows_no_engine():
    for module, others in graph().items():
        if module.startswith("scatterpar.splitting"):
            above = {name for name in others - FOR_ALL if level_of(name) == ABOVE}
            assert all(name.startswith("scatterpar.splitting") for name in above)


def test_there_is_no_circle():
    TopologicalSorter(graph()).prepare()  # or the error names the circle


def test_the_engine_and_what_integrations_share_import_nothing_optional():
    code = """
import sys, torch
before = set(sys.modules)
import scatterpar
optional = ("scatterpar.train", "scatterpar.integrations", "matplotlib", "tqdm", "transformers")
print([name for name in set(sys.modules) - before if name.startswith(optional)])
import scatterpar.integrations.loop
print("transformers" in sys.modules)
"""
    outcome = run("-c", code)
    assert (outcome.code, outcome.out) == (0, "[]\nFalse\n"), outcome.err


def test_all_threads_start_in_one_file():
    starters = [
        name for name, source in sources().items() if re.search(r"\bThread\(", source)
    ]
    assert starters == ["scatterpar.threads.workers"]


def test_private_parts_of_torch_are_named_in_one_file():
    named = [
        name
        for name, text in sources().items()
        if re.search(r"torch\._(?!foreach)", text)
    ]
    assert named == ["scatterpar.torch_private"]


COPIES = {"to", "copy_", "_foreach_copy_", "cpu", "item", "tolist"}


def copies(path):
    """The methods named in a file that copy tensors; ``.to`` with a dtype alone does
    not.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    casts = [
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and is_cast(node)
    ]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in COPIES
            and node not in casts
        ):
            yield ast.unparse(node)


def is_cast(call):
    """Whether a call gets one argument, which is a dtype by its name."""
    names = [ast.unparse(argument) for argument in call.args]
    return not call.keywords and len(names) == 1 and names[0].endswith("dtype")


def test_copies_between_memories_are_made_in_one_package():
    """The engine names no method that copies, outside of ``devices``; ``float()`` is
    not found.

    ``costs`` reads numbers of NumPy arrays, too.
    """
    engine_part = [
        path for path in PACKAGE.rglob("*.py") if level_of(name_of(path)) < ABOVE
    ]
    engine_part += [*PACKAGE.glob("*.py"), *PACKAGE.glob("pair/*.py")]
    found = [
        f"{name_of(path)}: {copy}"
        for path in engine_part
        if not name_of(path).startswith(
            ("scatterpar.devices", "scatterpar.options.costs")
        )
        for copy in copies(path)
    ]
    assert not found


def test_every_operator_on_lists_is_asked_for_at_import():
    """So that a version of torch without one is refused in words."""
    found = sources()
    asked = set(re.findall(r"\b_foreach_\w+", found.pop("scatterpar.torch_private")))
    assert {
        name for text in found.values() for name in re.findall(r"_foreach_\w+", text)
    } == asked


# --- tests lie beside what they test ---

TESTS = Path(__file__).parent
TOGETHER = (
    "exact",
    "faults",
    "guide",
    "devices/cards",
    "nullcuda",
    "vulkan",
    "simulated",
)
EXCEPTIONS = {
    "test_architecture.py": "the order of imports, and this rule",
    "test_card.py": "`python -m benchmarks card` is no part of the package",
    "test_sabotage.py": "each promise is broken in turn",
    "integrations/test_trl.py": "TRL's trainers are subclasses of those of "
    "transformers",
    "threads/test_lifetime.py": "ends of engines, of workers and of the interpreter",
    "train/test_other_systems.py": "Windows and macOS, imitated",
    "verify/test_outcomes.py": "what becomes of a step that verifier.py refused",
}


def test_each_file_of_tests_has_the_source_that_it_tests():
    files = {path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    beside = {path for path in files if not path.as_posix().startswith(TOGETHER)}
    alone = {
        path.as_posix()
        for path in beside
        if not (PACKAGE / path.with_name(path.name.removeprefix("test_"))).exists()
    }
    assert alone <= EXCEPTIONS.keys(), (
        "scatterpar/X/y.py is tested by tests/X/test_y.py"
    )
    assert len(EXCEPTIONS) <= 10
