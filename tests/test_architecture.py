"""Packages import only from lower packages, in the order of docs/architecture.md."""

import ast
import functools
import importlib
import re
import textwrap
from collections import Counter, defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from faults.processes import run
from harness.boundaries import (
    PACKAGE,
    imports,
    imports_of_imports,
    is_module_of_package,
    libraries_named_in,
    nodes_of,
    private_torch_in,
    tree_of,
    unseen_imports,
    writing_predicates,
)
from torch import nn

import scatterpar
from scatterpar.devices import coalescing, fingerprints
from scatterpar.replicas import large_tensors

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")


def section(title):
    """The text of a section of the page, up to the next heading."""
    after = re.split(rf"\n##+ {re.escape(title)}\n", PAGE)[1]
    return re.split(r"\n##+ ", after)[0]


def lines_of_the_page():
    """The packages and files of each line of the drawing, the lowest line first."""
    drawing = section("What may call what").split("```")[1].removeprefix("text\n")
    # Behind two spaces a line says what its packages are for.
    lines = [line.partition("  ")[0] for line in drawing.strip().splitlines()]
    return [line.split(", ") for line in reversed(lines)]


LEVELS = {
    name: level for level, names in enumerate(lines_of_the_page()) for name in names
}
PACKAGES = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
ABOVE = LEVELS["engine"]  # the engine, and its users
TOP = max(LEVELS.values())  # users of the engine, who import what all users import


def level_of(module):
    _, *parts = module.split(".")
    is_top = not parts or parts[0] in ("__init__", "__main__")
    return TOP if is_top else LEVELS[parts[0]]


def imported_by_name(path):
    """The modules of the package that a file names as ``import_module`` needs them."""
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and is_module_of_package(node.value):
            yield node.value


def name_of(path):
    return ".".join(["scatterpar", *path.relative_to(PACKAGE).with_suffix("").parts])


def sources():
    return {
        name_of(path): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
    }


def graph():
    return {name_of(path): set(imports(path)) for path in PACKAGE.rglob("*.py")}


def test_page_names_all_packages_and_files():
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py"}
    names |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert names - {"__init__", "__main__"} == set(LEVELS)


def test_no_package_imports_a_higher_one():
    for path in PACKAGE.rglob("*.py"):
        level = level_of(name_of(path))
        imported = {*imports(path), *imported_by_name(path)}
        assert not [name for name in imported if level_of(name) > level], path


def test_imports_name_modules_in_full():
    """Or the order above would not see them."""
    unseen = {
        text for path in PACKAGE.rglob("*.py") for text in unseen_imports(tree_of(path))
    }
    # A command of the shell, which may be any user of the engine.
    composed = "f'scatterpar.{_MODULES[command]}'"
    assert unseen == {composed, f"importlib.import_module({composed})"}


def test_splitcheck_needs_no_engine():
    """It is for anybody's loop, and could be released by itself."""
    engines = {"replicas", "step", "verify", "options", "distributed", "engine"}
    assert all(LEVELS["splitting"] < LEVELS[name] for name in engines)
    imported = imports_of_imports(PACKAGE / "splitting" / "__init__.py")
    names = {path.relative_to(PACKAGE).parts[0] for path in imported}
    assert names & PACKAGES == {
        *("splitting", "causes", "threads", "objects"),
        *("batch", "numerics", "devices", "torch_private"),
    }


# Beside each other, so that ``splitcheck`` may be released without the engine.
LOW_FLOORS = {"numerics": set(), "objects": {"batch"}}


@pytest.mark.parametrize("folder", LOW_FLOORS)
def test_low_floors_import_little(folder):
    imported = set()
    for path in PACKAGE.joinpath(folder).rglob("*.py"):
        imported |= {name.split(".")[1] for name in imports(path)}
    allowed = {"devices", "errors", "libraries", "torch_private"}
    assert imported - {folder} <= LOW_FLOORS[folder] | allowed


def test_splitcheck_brings_little_with_it():
    """It sends no messages, starts no workers and joins no outputs."""
    files = imports_of_imports(PACKAGE / "splitting" / "__init__.py")
    others = {"threads/workers.py", "batch/joining.py"}
    others |= {"devices/transfers.py", "devices/coalescing.py"}
    assert not others & {path.relative_to(PACKAGE).as_posix() for path in files}


def test_page_names_all_schedules():
    found = {
        node.name: path
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
        and "Schedule" in (node.name, *map(ast.unparse, node.bases))
    }
    files = {path.relative_to(PACKAGE).as_posix() for path in found.values()}
    paragraph = PAGE.split("The class `Schedule`")[1].split("\n\n")[0]
    assert files == set(re.findall(r"`([\w/]+\.py)`", paragraph))


def test_code_words_defined_where_page_says():
    rows = re.findall(
        r"^\| ([\w ]+) \| .* \| `(\w+)` in `([\w/]+\.py)` \|$",
        section("Words of the code"),
        re.MULTILINE,
    )
    assert len(rows) > 15
    assert len({name for _, name, _ in rows}) == len(rows)  # one each
    for word, name, file in rows:
        body = tree_of(PACKAGE / file).body
        assert name in [getattr(node, "name", "") for node in body], word


def names_of_classes(path):
    """The classes that a file defines, anywhere, and its aliases of classes."""
    for node in nodes_of(path):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree_of(path).body:
        targets = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            name = ast.unparse(target)
            is_class = re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name)
            # A variable stands for any class, so files share its name.
            if is_class and "TypeVar" not in ast.unparse(node):
                yield name


def test_class_name_means_one_thing():
    """Also behind an underscore: ``Call`` and ``_Call`` would be two calls."""
    names = []
    for path in PACKAGE.rglob("*.py"):
        names += [name.lstrip("_") for name in names_of_classes(path)]
    twice = {name for name, times in Counter(names).items() if times > 1}
    assert len(names) > 200
    # Two libraries have a trainer of their own.
    assert not twice


def names_at_top_of(path):
    """The functions and constants that a file defines, without underscores in front."""
    for node in tree_of(path).body:
        names = [node.name] if isinstance(node, ast.FunctionDef) else []
        targets = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value:
            targets = [node.target]
        value = ast.unparse(getattr(node, "value", None) or ast.Constant(0))
        # A type variable stands for any type, so files share its name.
        if not value.startswith(("TypeVar(", "ParamSpec(")):
            names += [target.id for target in targets if isinstance(target, ast.Name)]
        yield from (name.lstrip("_") for name in names if not name.startswith("__"))


# Names that several files have for one thing.
SHARED_NAMES = {
    # The command of a file that is run.
    "main",
    # A cause is asked for, or told, by a function of its name.
    "depends_on_earlier_parts",
    "do_rows_meet",
    "is_wrong_with_one_part",
    "mean_of_means_in_a_term",
    "once_per_part",
    "other_weights",
    "state_between_parts",
}


def test_name_of_function_means_one_thing():
    """Of functions and constants of modules, as of classes; in one file, too."""
    files = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for name in names_at_top_of(path):
            files[name].append(path.relative_to(PACKAGE).as_posix())
    twice = {name: found for name, found in files.items() if len(found) > 1}
    for name in SHARED_NAMES:
        twice.pop(name)
    assert not twice


def test_no_circular_imports():
    TopologicalSorter(graph()).prepare()  # or the error names the circle


@pytest.mark.slow
def test_engine_imports_nothing_optional():
    code = """
import sys, torch
before = set(sys.modules)
import scatterpar
optional = ("scatterpar.train", "scatterpar.integrations", "matplotlib", "tqdm", "transformers")
print([name for name in set(sys.modules) - before if name.startswith(optional)])
"""
    outcome = run("-c", code)
    assert (outcome.code, outcome.out) == (0, "[]\n"), outcome.err


def test_all_threads_start_in_one_file():
    starters = [
        name for name, source in sources().items() if re.search(r"\bThread\(", source)
    ]
    assert starters == ["scatterpar.threads.workers"]


def test_private_torch_named_in_one_folder():
    named = [
        name_of(path)
        for path in PACKAGE.rglob("*.py")
        if any(private_torch_in(tree_of(path)))
    ]
    # Comments and docstrings, too.
    named += [
        name
        for name, text in sources().items()
        if re.search(r"torch\._(?!foreach)", text)
    ]
    assert {name.split(".")[1] for name in named} == {"torch_private"}


def test_page_lists_libraries_that_heart_names():
    named = set()
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        is_of_heart = level_of(name_of(path)) <= ABOVE
        # ``splitting`` runs any library's loop, and ``torch_private`` knows torch.
        if is_of_heart and not file.startswith(("splitting/", "torch_private/")):
            names = libraries_named_in(tree_of(path))
            named |= {(name.partition(".")[0], file) for name in names}
    rows = re.findall(
        r"^\| `(?:transformers\.)?([A-Za-z]\w*)` \| (`\w+/.*?) \|",
        section("Libraries known by name"),
        re.MULTILINE,
    )
    assert named == {
        (name, file) for name, files in rows for file in re.findall(r"`(.*?)`", files)
    }


# What a file of the heart could say, and the search that has to find it.
MUTATIONS = {
    "predicate writes by method": (
        writing_predicates,
        """
        class Broadcast:
            def fits(self):
                return self._are_in_place() or self.adopt(self.contents)

            def adopt(self, contents):
                self.contents = contents
                return True
        """,
    ),
    "predicate writes by method of method": (
        writing_predicates,
        """
        class Broadcast:
            def is_current(self):
                return all(map(self._compare, self.tensors))

            def _compare(self, tensor):
                return self._remember(tensor)

            def _remember(self, tensor):
                del self.seen[tensor]
        """,
    ),
    "predicate writes by function": (
        writing_predicates,
        """
        def is_current(broadcast):
            return remember(broadcast)

        def remember(broadcast):
            broadcast.was_asked = True
        """,
    ),
    "predicate appends to attribute": (
        writing_predicates,
        "def is_current(self): return self.asked.append(1) is None",
    ),
    "predicate appends to alias": (
        writing_predicates,
        """
        def has_room(self):
            asked = self.asked
            asked.append(1)
            return True
        """,
    ),
    "predicate writes tensor": (
        writing_predicates,
        "def is_written(tensor): return tensor.zero_().sum() == 0",
    ),
    "predicate writes entry of global": (
        writing_predicates,
        """
        def is_known(value):
            KNOWN[id(value)] = value
            return True
        """,
    ),
    "module joined from parts": (
        unseen_imports,
        'engine = sys.modules["scatterpar." + "engine"]',
    ),
    "module joined in a variable": (
        unseen_imports,
        'name = ".".join(["scatterpar", "engine"])\nengine = sys.modules[name]',
    ),
    "module formatted": (
        unseen_imports,
        'engine = sys.modules.get(f"scatterpar.{name}")',
    ),
    "relative import": (unseen_imports, "from ..engine import ScatterOnceParallel"),
    "private part of torch read by name": (private_torch_in, 'getattr(torch, "_C")'),
    "private part of torch joined": (private_torch_in, 'getattr(torch, "_" + name)'),
    "private part of torch in a variable": (
        private_torch_in,
        'name = "_dynamo"\ngetattr(torch, name)',
    ),
    "private part of torch in its dictionary": (private_torch_in, 'vars(torch)["_C"]'),
    "private part of torch imported": (private_torch_in, "from torch import _dynamo"),
    "private function of torch imported": (
        private_torch_in,
        "from torch.utils._pytree import tree_map",
    ),
    "class of library known by name": (
        libraries_named_in,
        'is_loop = type(root).__name__ == "Trainer"',
    ),
    "class that nobody knows": (
        libraries_named_in,
        'is_loop = type(root).__name__ == "Learner2"',
    ),
    "module of library known by name": (
        libraries_named_in,
        'is_output = "transformers.utils.generic" in modules',
    ),
    "library imported": (libraries_named_in, "import torchvision"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_found(name):
    find, code = MUTATIONS[name]
    assert [*find(ast.parse(textwrap.dedent(code)))]


@functools.cache
def private_names_of_torch():
    """Of its objects, with one underscore: attributes, and classes beside layers."""
    layer = nn.Linear(1, 1, device="meta")
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    objects = [layer, layer.weight, layer.state_dict(), optimizer]
    objects += [torch.ops.aten.add.Tensor, nn.modules.batchnorm]
    names = {name for item in objects for name in {*dir(item), *vars(item)}}
    return {name for name in names if re.match("_(?!_)", name)}


def private_attributes_in(path):
    """The private names of torch that a file reads, or has as a string."""
    private = private_names_of_torch()
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute):
            if node.attr in private and ast.unparse(node.value) != "self":
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from {node.value} & private


def test_page_lists_private_attributes_read():
    files = [
        path for path in PACKAGE.rglob("*.py") if "torch_private" not in path.parts
    ]
    read = {name for path in files for name in private_attributes_in(path)}
    table = section("Private attributes of torch")
    rows = re.findall(r"^\| (`_.*?) \|", table, re.MULTILINE)
    assert read == {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_how_it_works_has_sizes_of_messages():
    page = PAGE.replace("\n", " ")
    mebibyte = 2**20
    assert f"messages of up to {coalescing.CHUNK_BYTES // mebibyte} MiB" in page
    assert (
        f"tensors of {coalescing.ALONE_BYTES // mebibyte} MiB or more are sent alone"
        in page
    )
    assert f"64 bits per {4 * fingerprints.WORDS_AT_A_TIME // mebibyte} MiB" in page
    assert f"tensors of {large_tensors.LARGE_BYTES // 2**10} KiB or more" in page


GUIDES = [
    DOCS / "architecture.md",
    DOCS.parent / "CONTRIBUTING.md",
]


def is_there(name, everything):
    """Whether ``Class`` or ``Class.attribute`` is torch's, or defined in a text."""
    kind, _, attribute = name.partition(".")
    owner = getattr(torch, kind, None) or getattr(nn, kind, None)
    if owner is not None:
        return not attribute or hasattr(owner, attribute)
    definitions = [rf"^(class {kind}\b|{kind} = )", rf"^    def {attribute}"]
    wanted = definitions if attribute else definitions[:1]
    return all(re.search(each, everything, re.MULTILINE) for each in wanted)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_files_and_classes_of_pages_exist(page):
    code = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    for path in [text for text in code if re.fullmatch(r"[\w/]+/\w+\.py", text)]:
        folders = PACKAGE, TESTS, TESTS.parent
        is_example = "/X/" in path
        assert is_example or any((folder / path).exists() for folder in folders), path
    files = [*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py")]
    everything = "\n".join(path.read_text(encoding="utf-8") for path in files)
    names = [text for text in code if re.fullmatch(r"[A-Z]\w*[a-z](\.\w+)?", text)]
    assert not [name for name in names if not is_there(name, everything)]


def test_functions_of_tables_are_defined():
    """Who puts back, who asks what has changed, and who says what is of one kind."""
    tables = section("What is put back, and what has changed")
    answers = re.findall(r"^\| [^|]+ \| ([^|]*`[^|]*) \|", tables, re.MULTILINE)
    names = {name for text in answers for name in re.findall(r"`([\w.]+)`", text)}
    assert len(names) > 15
    code = "\n".join(sources().values())
    for name in names - {"Tensor.is_set_to"}:  # torch's
        last = name.rpartition(".")[2]
        assert re.search(rf"\b(def|class) {last}\b", code), name


# What says that a tensor or a container has changed since an earlier time.
CHANGES = {"version", "versions", "Fingerprints", "Snapshot", "WrittenTensors"}


def test_page_names_who_asks_what_has_changed():
    """A new asker has a reason, or takes an answer that is there."""
    table = section("What is put back, and what has changed")
    rows = re.findall(r"^\| [^|]+ \| (`[^|]*) \| [^|]+ \|$", table, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        asked = {
            alias.name
            for node in nodes_of(path)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        if asked & CHANGES:
            defined = {getattr(node, "name", "") for node in tree_of(path).body}
            assert defined & named, f"{file} asks by {asked & CHANGES}"


@pytest.mark.parametrize(
    "folder",
    [path.parent for path in PACKAGE.glob("*/__init__.py")],
    ids=lambda f: f.name,
)
def test_package_says_what_it_imports(folder):
    """The highest package that it imports is named, and none that it does not."""
    text = ast.get_docstring(tree_of(folder / "__init__.py"))
    assert re.search("thread|process", text)
    paragraph = re.search(r"^Imports (.+?)(\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    named = {
        name for name in re.findall(r"``(\w+)``", paragraph[1]) if name in PACKAGES
    }
    imported = set()
    for path in folder.rglob("*.py"):
        imported |= {name.split(".")[1] for name in imports(path) if "." in name}
    imported = (imported & PACKAGES) - {folder.name, *lines_of_the_page()[0]}
    assert named <= imported
    if LEVELS[folder.name] > ABOVE:  # users of the engine
        assert re.search(r"\bengine\b", paragraph[1])
        return
    highest = max((LEVELS[name] for name in imported), default=-1)
    highest_named = max((LEVELS[name] for name in named), default=-1)
    assert highest_named == highest
    if "below" not in paragraph[1]:
        assert imported == named


def test_predicates_write_nothing():
    """Who asks a question does not expect it to change the answer."""
    writing = {
        f"{name_of(path)}.{name}": writes
        for path in PACKAGE.rglob("*.py")
        for name, writes in writing_predicates(tree_of(path))
    }
    # They remember an answer that stays the same.
    assert writing == {
        "scatterpar.devices.streams.has_streams": ["_devices_with_streams.add(device)"],
        "scatterpar.replicas.module_contents.is_shared_data": [
            "_known_data[id(container)]",
            "_known_data.clear()",
        ],
    }


def private_names_of(path):
    """The private methods and attributes that the classes of a file define."""
    for kind in nodes_of(path):
        if not isinstance(kind, ast.ClassDef):
            continue
        for node in ast.walk(kind):
            name = ""
            if isinstance(node, ast.FunctionDef):
                name = node.name
            elif isinstance(node, ast.AnnAssign):
                name = ast.unparse(node.target)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.attr if ast.unparse(node.value) == "self" else ""
            if re.match("_(?!_)", name):
                yield name


def read_by(node):
    """The owner and the name of an attribute, also of one that is read by its name."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
        owner, *names = [*node.args, None]
        if isinstance(names[0], ast.Constant):
            return owner, names[0].value
    return None, ""


def test_private_attributes_stay_in_their_file():
    """Another class's ``_name`` is read in no other file."""
    files_of = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for name in private_names_of(path):
            files_of[name].add(path)
    of_torch = private_names_of_torch()
    read = []
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            owner, name = read_by(node)
            if owner is None or name in of_torch:
                continue
            is_own = ast.unparse(owner) in ("self", "cls", "super()")
            if not is_own and path not in files_of.get(name, {path}):
                read.append(f"{name_of(path)}: {ast.unparse(node)}")
    # What the engine's own attributes do when they are set.
    assert read == ["scatterpar.options.assigned_options: engine._assign"]


COPIES = {"to", "copy_", "_foreach_copy_", "cpu", "item", "tolist"}


def copies(path):
    """The methods named in a file that copy tensors; ``.to`` with a dtype alone does
    not.
    """
    casts = []
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and is_cast(node):
            casts.append(node.func)
    for node in nodes_of(path):
        is_copy = isinstance(node, ast.Attribute) and node.attr in COPIES
        if is_copy and node not in casts:
            yield ast.unparse(node)


def is_cast(call):
    """Whether a call gets one argument, which is a dtype by its name."""
    if call.keywords or len(call.args) != 1:
        return False
    return ast.unparse(call.args[0]).endswith("dtype")


def test_copies_made_in_one_package():
    """The engine names no method that copies, outside of ``devices``; ``float()`` is
    not found.

    ``splitting`` runs any loop, and ``train`` is a user of the engine.
    """
    elsewhere = ("scatterpar.devices", "scatterpar.splitting", "scatterpar.train")
    engine_part = [
        path for path in PACKAGE.rglob("*.py") if level_of(name_of(path)) <= ABOVE
    ]
    engine_part += PACKAGE.glob("*.py")
    found = [
        f"{name_of(path)}: {copy}"
        for path in engine_part
        if not name_of(path).startswith(elsewhere)
        for copy in copies(path)
    ]
    assert not found


def test_list_operators_checked_at_import():
    """So that a version of torch without one is refused in words."""
    found = sources()
    asked = set(
        re.findall(
            r"\b_foreach_\w+", found.pop("scatterpar.torch_private.entry_points")
        )
    )
    assert {
        name for text in found.values() for name in re.findall(r"_foreach_\w+", text)
    } == asked


# What plain torch is compared by, and the tables of what is compared.
ORACLES = (
    "agree",
    "batches",
    "contrastive",
    "module_cases",
    "oracle",
    "plain",
    "weighted",
    "whole_batches",
)


@pytest.mark.parametrize("name", ORACLES)
def test_oracles_import_public_names_only(name):
    """An oracle that used the package's own functions would agree with their faults."""
    path = Path(__file__).parent / "harness" / f"{name}.py"
    assert {*imports(path)} <= {"scatterpar"}
    names = re.findall(r"^from scatterpar import (.*)$", path.read_text("utf-8"), re.M)
    imported = {name.strip() for line in names for name in line.split(",")}
    assert imported <= set(scatterpar.__all__)


# --- tests lie beside what they test ---

TESTS = Path(__file__).parent
# Folders that mirror nothing: what several sources do together.
TOGETHER = (
    "devices/cards",
    "exact",
    "faults",
    "guide",
    "libraries",
    "nullcuda",
    "simulated",
    "vulkan",
)
# About the repository: files beside the folders, each with its subject.
OF_THE_REPOSITORY = {
    "test_architecture.py": "the order of imports, and this rule",
    "test_benchmarks.py": "`python -m benchmarks` is no part of the package",
    "test_card.py": "`python -m benchmarks card` is no part of the package",
    "test_peers.py": "other libraries' own tests, with replicas",
    "test_sabotage.py": "each promise is broken in turn",
    "test_size.py": "the meter is no part of the package",
    "test_simulation.py": "several GPUs, of `benchmarks`, are no part of the package",
    "test_types.py": "what type checkers say of the public names",
    "test_who.py": "which tests reach a line",
}


def _of_package(folder):
    """The test file of a package whose small files are tested together."""
    is_of_a_file = (PACKAGE / folder / f"{folder.name}.py").exists()
    return None if is_of_a_file else folder / f"test_{folder.name}.py"


def test_each_test_file_has_its_source():
    alone = set()
    for path in TESTS.rglob("test_*.py"):
        file = path.relative_to(TESTS)
        source = PACKAGE / file.with_name(file.name.removeprefix("test_"))
        if file == _of_package(file.parent) and (PACKAGE / file.parent).is_dir():
            continue
        if not file.as_posix().startswith(TOGETHER) and not source.exists():
            alone.add(file.as_posix())
    assert alone == OF_THE_REPOSITORY.keys(), (
        "scatterpar/X/y.py is tested by tests/X/test_y.py"
    )


NOTHING_TO_TEST = {"__main__", "version"}


def test_each_source_has_its_test_file():
    without = set()
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE)
        tests = TESTS / file.with_name(f"test_{file.name}")
        of_package = _of_package(file.parent)
        has_tests = tests.exists() or (of_package and (TESTS / of_package).exists())
        if file.stem != "__init__" and not has_tests:
            without.add(file.with_suffix("").as_posix())
    assert without == NOTHING_TO_TEST, (
        "write tests/X/test_y.py beside scatterpar/X/y.py"
    )


LONGEST_NAME = 45  # characters after test_: object, condition, outcome


def test_names_of_tests_are_short():
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^def test_(\w+)", text, re.MULTILINE):
            assert len(name) <= LONGEST_NAME, (
                f"{path.name}: test_{name} is longer than test_ and {LONGEST_NAME} "
                f"characters; name object, condition and outcome, and write the rest "
                f"into its docstring"
            )


def test_names_that_benchmarks_import_exist():
    """Most benchmarks run by hand: a renamed function would go unnoticed."""
    missing = set()
    for path in TESTS.parent.glob("benchmarks/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None) or ""
            if not isinstance(node, ast.ImportFrom) or not module.startswith(NAME):
                continue
            for alias in node.names:
                missing.update(absent(module, alias.name))
    assert not missing


NAME = "scatterpar"


def absent(module, name):
    """The full name, if the module has neither such a name nor such a file."""
    file = PACKAGE.joinpath(*module.split(".")[1:], f"{name}.py")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).startswith(NAME):
            raise
        return  # an integration of a library that is not installed here
    if not hasattr(imported, name) and not file.exists():
        yield f"{module}.{name}"


def names_of_mechanisms():
    """The files and folders of all rows, each as often as it is named."""
    names = []
    for line in section("Mechanisms").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and "`" in cells[1]:
            names += re.findall(r"`([\w/.]+)`", cells[1])
    return names


def test_page_names_each_file_in_one_mechanism():
    names = names_of_mechanisms()
    assert len(names) == len(set(names))
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    missing = {name for name in names if not name.endswith("/")} - files
    assert not missing
    for file in files - set(names):
        folder, slash, _ = file.rpartition("/")
        # A folder is all of its files that no other row names.
        assert f"{folder}{slash}" in names or file.endswith("__init__.py"), file
