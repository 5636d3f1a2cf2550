"""What a file of the package does that its place does not allow, read from its text.

Each function gets the syntax tree of a file. ``tests/test_architecture.py`` gives it the
package's own files, which must be clean, and small mutations, which it must find.
"""

import ast
import configparser
import functools
import pkgutil
import re
from pathlib import Path

import torch

import scatterpar

PACKAGE = Path(scatterpar.__file__).parent
ROOT = Path(__file__).parents[2]


# --- imports ---


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path):
    return tuple(ast.walk(tree_of(path)))


def imports(path):
    """The modules of the package that a file imports, by their full names."""
    for node in nodes_of(path):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "scatterpar"
        ):
            for alias in node.names:
                child = PACKAGE.joinpath(*node.module.split(".")[1:], alias.name)
                is_module = child.is_dir() or child.with_suffix(".py").exists()
                yield f"{node.module}.{alias.name}" if is_module else node.module
        elif isinstance(node, ast.Import):
            yield from (
                a.name for a in node.names if a.name.split(".")[0] == "scatterpar"
            )


def imports_of_imports(path):
    """The files that an import of a file runs, but for ``scatterpar/__init__.py``."""
    found = set()
    waiting = [path]
    while waiting:
        path = waiting.pop()
        if path in found or path == PACKAGE / "__init__.py":
            continue
        found.add(path)
        waiting.append(path.parent / "__init__.py")
        for name in imports(path):
            child = PACKAGE.joinpath(*name.split(".")[1:])
            waiting.append(
                child / "__init__.py" if child.is_dir() else child.with_suffix(".py")
            )
    return found


def is_module_of_package(value):
    """Whether a value is the name of a module of the package, as a string."""
    if not isinstance(value, str) or not re.fullmatch(r"scatterpar(\.\w+)+", value):
        return False
    path = PACKAGE.joinpath(*value.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").exists()


def strings_in(node):
    """The strings in an expression, with the fixed parts of formatted ones."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


# The functions that import a module by its name.
IMPORTERS = {"import_module", "__import__"}
# A module's name, or the beginning of one, which other strings may complete.
BEGINNING = r"scatterpar(\.\w*)*"


def unseen_imports(tree):
    """The imports that a search for full names does not see.

    They are relative, or a name of a module is put together from parts.
    """
    for node in ast.walk(tree):
        is_unseen = False
        if isinstance(node, ast.ImportFrom):
            is_unseen = node.level > 0
        elif isinstance(node, ast.Call) and last_name(node.func) in IMPORTERS:
            is_relative = len(node.args) + len(node.keywords) > 1
            is_unseen = is_relative or is_composed_name(node.args[0])
        elif isinstance(node, ast.BinOp | ast.JoinedStr | ast.Call):
            is_unseen = is_composed_name(node)
        if is_unseen:
            yield ast.unparse(node)


def is_composed_name(node):
    """Whether an expression puts the name of a module of the package together."""
    if isinstance(node, ast.Call) and last_name(node.func) not in ("join", "format"):
        return False
    if isinstance(node, ast.Constant):
        is_ours = str(node.value).startswith("scatterpar")
        return is_ours and not is_module_of_package(node.value)
    return any(re.fullmatch(BEGINNING, text) for text in strings_in(node))


def last_name(node):
    """The name of a function, without what it is an attribute of."""
    return ast.unparse(node).rpartition(".")[2]


# --- predicates ---

# What a predicate may write: nothing that outlives it.
PREDICATE = re.compile(
    r"_?(is|are|was|has|may|can|must|should|does|needs|goes|knows)_\w+|has|fits"
)
# The methods by which containers are written, and those of tensors end with "_".
WRITING = re.compile(
    r"(append|extend|insert|add|update|pop|popitem|popleft|appendleft|clear|remove"
    r"|discard|setdefault|sort|reverse|rotate|__setitem__|__delitem__"
    r"|[a-z]\w*_(?<!__))"
)


def writing_predicates(tree):
    """The predicates that write what outlives them, each with its writes.

    A predicate also does what methods of its own class do, and functions of its file.
    """
    functions = functions_in(tree.body)
    for node in tree.body:
        methods = functions_in(node.body) if isinstance(node, ast.ClassDef) else {}
        for function in [node, *methods.values()]:
            if not isinstance(function, ast.FunctionDef):
                continue
            if not PREDICATE.fullmatch(function.name):
                continue
            called = {id(function): function}
            follow_calls(function, functions, methods, called)
            writes = [text for helper in called.values() for text in writes_of(helper)]
            if writes:
                yield function.name, writes


def functions_in(body):
    """The functions among some statements, by their names."""
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def follow_calls(function, functions, methods, called):
    """Add the methods of ``self``, and functions of the file, that a function uses."""
    for node in ast.walk(function):
        helper = None
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            helper = methods.get(node.attr)  # also a property, or one that is passed on
        elif isinstance(node, ast.Name):
            helper = functions.get(node.id)
        if helper is not None and id(helper) not in called:
            called[id(helper)] = helper
            follow_calls(helper, functions, methods, called)


def writes_of(function):
    """The attributes, and entries of attributes, that a function writes or deletes."""
    own = names_of_new_values(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield ast.unparse(node)
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if name in ("setattr", "delattr", "__setattr__", "__delattr__"):
                yield ast.unparse(node)
            elif isinstance(node.func, ast.Attribute) and WRITING.fullmatch(name):
                owner = owner_of(node.func.value)
                if isinstance(owner, ast.Name) and owner.id not in own:
                    yield ast.unparse(node)
        # Whatever assigns: a statement, the target of a loop, of ``with``, in a tuple.
        if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
            owner = node
            while isinstance(owner, ast.Subscript):
                owner = owner.value
            is_dict = isinstance(owner, ast.Call) and ast.unparse(owner.func) == "vars"
            is_entry = isinstance(owner, ast.Name) and owner is not node
            if is_entry:
                is_entry = owner.id not in own
            if isinstance(owner, ast.Attribute) or is_dict or is_entry:
                yield ast.unparse(node)


def owner_of(node):
    """The value whose attribute, or entry of an attribute, an expression is."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node


def names_of_new_values(function):
    """The variables of a function that are not a part of something that was there."""
    new = set()
    parts = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            new.add(node.id)
        targets = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            targets = [node.target]
        if targets and isinstance(node.value, ast.Attribute | ast.Subscript):
            parts |= {ast.unparse(target) for target in targets}
    return new - parts


# --- private parts of torch ---


@functools.cache
def private_parts_of_torch():
    """The private names in torch itself: functions, classes and modules."""
    names = {module.name for module in pkgutil.iter_modules(torch.__path__)}
    private = {name for name in {*names, *dir(torch)} if re.match("_(?!_).", name)}
    return {name for name in private if not name.startswith("_foreach")}


def private_torch_in(tree):
    """The private parts of torch that a file imports, reads, or names in a string."""
    private = private_parts_of_torch()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        is_read = any(is_private_of_torch(name) for name in names)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_read = node.value in private or is_private_of_torch(node.value)
        elif isinstance(node, ast.Call) and last_name(node.func).endswith("getattr"):
            is_of_torch = ast.unparse(node.args[0]).partition(".")[0] == "torch"
            is_composed = isinstance(node.args[1], ast.BinOp | ast.JoinedStr)
            is_read = is_of_torch and is_composed
        if is_read:
            yield ast.unparse(node)


def is_private_of_torch(name):
    """Whether a full name is one of a private part of torch; operators have others."""
    if name.startswith("torch.ops."):
        return False
    return bool(re.fullmatch(r"torch(\.\w+)*?\._(?!foreach|_)\w+(\.\w+)*", name))


# --- libraries ---


@functools.cache
def names_of_libraries():
    """The packages that extras install, and classes that integrations import."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = " ".join(config["options.extras_require"].values())
    names = {
        name.replace("-", "_") for name in re.findall(r"[\w-]+(?=[>\[])", required)
    }
    names |= {"PIL", "deepspeed", "torchao", "torchvision", "pandas"}
    for folder in ("integrations", "splitting"):
        for path in PACKAGE.joinpath(folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                module = getattr(node, "module", None) or ""
                if (
                    isinstance(node, ast.ImportFrom)
                    and module.partition(".")[0] in names
                ):
                    names |= {alias.name for alias in node.names}
    return names - set(dir(torch.utils.data))


def libraries_named_in(tree):
    """The libraries, and their classes, that a file imports, or knows by a name.

    A name is a string that is compared, not a part of a sentence. A class that is asked
    for by the name of its class is taken for a library's.
    """
    libraries = names_of_libraries()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Constant) and re.fullmatch(
            r"[A-Za-z_][\w.]*", str(node.value)
        ):
            names = [str(node.value)]
        for name in names:
            if libraries & set(name.split(".")):
                yield name
        if isinstance(node, ast.Compare) and reads_name_of_class(node):
            yield from (text for text in strings_in(node) if text[:1].isupper())


def reads_name_of_class(comparison):
    """Whether a comparison has the name of a class or a function on one of its sides."""
    sides = [comparison.left, *comparison.comparators]
    names = ("__name__", "__qualname__")
    return any(isinstance(side, ast.Attribute) and side.attr in names for side in sides)
