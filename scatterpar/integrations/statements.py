"""Whether a step function adds to a number or sets it, by the statements of its source.

::

    self.total += loss                       adds
    self.total = self.total + loss           adds
    self.sums[name] = self.sums.get(name, 0) + loss
    self.last = loss                         sets
    self.average = 0.9 * self.average + 0.1 * loss
    self.last.copy_(loss)                    sets

Values do not show it: beginning with zero, both leave the same. So the source of the
user's classes is read, once, and only if a step has changed a number. A place that some
statement adds to is a sum. What no statement writes, for example because there is no
source, is one, too.

Before the first call a sum may have no value. Then the statements say what it begins
with::

    self.calls = getattr(self, "calls", 0) + 1
    self.sums[name] = self.sums.get(name, 0) + loss
    self.sums.setdefault("rows", 0)
    if not hasattr(self, "rows"): self.rows = 0
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scatterpar.integrations.kept import (
    Attribute,
    Path,
    is_of_a_library,
    values_kept,
)
from scatterpar.replicas.references import named_values

# Methods that return the value that they are called on, in another form.
_SAME_VALUE = {"clone", "cpu", "detach", "double", "float", "item", "to"}
_SUMS = {"add", "sub"}
_JOINS = {"append", "cat", "concat", "concatenate", "hstack", "vstack"}
_SUMS_IN_PLACE = {"add_", "index_add_", "scatter_add_", "sub_"}


@dataclass(frozen=True)
class Target:
    """What a statement writes: an attribute, or an entry of a container.

    Attributes:
        name: the attribute's name; of an entry, that of the container, if it has one.
        is_entry: whether it is an entry.
        key: the key of an entry as the statement has it; ``None`` if it is computed.
    """

    name: str | None
    is_entry: bool = False
    key: str | None = None


@dataclass(frozen=True)
class Write:
    """A statement that writes ``target``, by adding to it or otherwise.

    Attributes:
        target: what it writes.
        adds: whether it adds to the value that is there.
        start: the source of the value that a sum begins with, such as ``"0"``, if the
            statement has one.
        appends: whether it joins others to the value that is there, after it.
    """

    target: Target
    adds: bool
    start: str | None = None
    appends: bool = False


class Statements:
    """The statements that write what an owner keeps.

    Args:
        owners: the loop's owner and other objects, such as a loss function. Their
            classes, the functions that these name, and the classes of what they hold
            are read.
    """

    def __init__(self, *owners: Any) -> None:
        # code and no functions: these would lead replicas to modules
        self._codes = tuple(function.__code__ for function in user_functions(owners))
        self._writes: list[Write] | None = None

    def sets(self, path: Path) -> bool:
        """Whether calls set the value at ``path``, and none of them adds to it."""
        writes = self._writes_at(path)
        return bool(writes) and not any(write.adds for write in writes)

    def adds(self, path: Path) -> bool:
        """Whether some statement adds to the value at ``path``, or to its entries.

        ``False`` if a statement sets entries, such as those of a queue.
        """
        writes = self._writes_at(path)
        if isinstance(path[-1], Attribute):
            entries = self._writes_to_entries(path[-1].name)
            if not all(write.adds for write in entries):
                return False
            writes += entries
        return any(write.adds for write in writes)

    def appends(self, path: Path) -> bool:
        """Whether some statement joins others to the value at ``path``."""
        return any(write.appends for write in self._writes_at(path))

    def start_of(self, path: Path) -> float | None:
        """The number with which a sum at ``path`` begins that has no value yet.

        ``None`` if no statement adds there, or if the number is not to be seen.
        """
        writes = self._writes_at(path)
        if not any(write.adds for write in writes):
            return None
        starts = {write.start for write in writes} - {None, "None"}
        if not starts:
            return 0  # the first value is a term, too
        numbers = [_number_in(source) for source in starts]
        return numbers[0] if len(set(numbers)) == 1 else None

    def _all_writes(self) -> list[Write]:
        """All statements that write something; they are read once."""
        if self._writes is None:
            self._writes = []
            for code in self._codes:
                self._writes += _writes_in(code)
        return self._writes

    def _writes_at(self, path: Path) -> list[Write]:
        return _writes_at(path, self._all_writes())

    def _writes_to_entries(self, name: str) -> list[Write]:
        """The statements that write entries of what has this name."""
        chosen = []
        for write in self._all_writes():
            if write.target.is_entry and write.target.name == name:
                chosen.append(write)
        return chosen


def _number_in(source: str | None) -> float | None:
    """The number that ``source`` is, such as ``"0.0"``; ``None`` for other sources."""
    try:
        value = ast.literal_eval(str(source))
    except (SyntaxError, ValueError):  # a name, or a call
        return None
    return value if isinstance(value, (int, float)) else None


def _writes_at(path: Path, writes: Sequence[Write]) -> list[Write]:
    """The statements that may have written the value at ``path``."""
    last = path[-1]
    if isinstance(last, Attribute):
        attribute = Target(last.name)
        return [write for write in writes if write.target == attribute]
    key = repr(last.key)
    container = path[-2] if len(path) > 1 else None
    name = container.name if isinstance(container, Attribute) else None
    by_name = []  # container[key] and container[…]
    by_key = []  # x[key]: a local variable may name the container
    for write in writes:
        target = write.target
        if target.is_entry and target.name == name and target.key in (None, key):
            by_name.append(write)
        if target.is_entry and target.key == key:
            by_key.append(write)
    return by_name or by_key


def user_functions(owners: Sequence[Any]) -> list[types.FunctionType]:
    """The user's functions: of the classes of ``owners``, and what these lead to."""
    values = [*owners]
    for owner in owners:
        values += values_kept(vars(owner).values())
    functions: dict[int, types.FunctionType] = {}
    classes: set[type] = set()
    while values:
        value = values.pop()
        if isinstance(value, types.MethodType):
            value = value.__func__
        if isinstance(value, types.FunctionType):
            if id(value) not in functions and not is_of_a_library(value.__module__):
                functions[id(value)] = value
                values += named_values(value).values()
            continue
        kind = value if isinstance(value, type) else type(value)
        values += _methods_of(kind, classes)
    return list(functions.values())


def _methods_of(kind: type, classes: set[type]) -> Iterator[types.FunctionType]:
    """The functions that the classes of the user's among ``kind`` and its bases define.

    Those of each class once: ``classes`` are known.
    """
    for base in kind.__mro__:
        if base in classes or is_of_a_library(base.__module__):
            continue
        classes.add(base)
        for value in vars(base).values():
            function = inspect.unwrap(getattr(value, "__func__", value))
            if isinstance(function, types.FunctionType):
                yield function


@functools.lru_cache(maxsize=1024)
def _writes_in(code: types.CodeType) -> tuple[Write, ...]:
    """The statements of a function that write attributes or entries."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError, ValueError):  # no source; a lambda's line
        return ()
    writes: list[Write] = []
    for node in ast.walk(tree):
        writes += _writes_by(node)
    return tuple(writes)


def _writes_by(node: ast.AST) -> Iterator[Write]:
    if isinstance(node, ast.AugAssign):
        if (target := _target_of(node.target)) is not None:
            yield Write(target, isinstance(node.op, (ast.Add, ast.Sub)))
    elif isinstance(node, ast.Assign):
        for place in node.targets:
            yield from _assigned(place, node.value)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield from _assigned(node.target, node.value)
    elif isinstance(node, ast.Call):
        yield from _written_by_call(node)


def _assigned(place: ast.expr, value: ast.expr) -> Iterator[Write]:
    """The writes of ``place = value``, which may be tuples."""
    if isinstance(place, (ast.Tuple, ast.List)):
        values: Sequence[ast.expr] = [value] * len(place.elts)
        if isinstance(value, (ast.Tuple, ast.List)):
            values = value.elts
        for part, value_of_part in zip(place.elts, values, strict=False):
            yield from _assigned(part, value_of_part)
    elif (target := _target_of(place)) is not None:
        yield _write_of(target, place, value)


def _write_of(target: Target, place: ast.expr, value: ast.expr) -> Write:
    """The write of ``place = value``."""
    if _is_sum_with(place, value):
        return Write(target, True, _default_in(place, value))
    is_number = _number_in(ast.unparse(value)) is not None
    start = ast.unparse(value) if is_number else None
    return Write(target, False, start, _appends_to(place, value))


def _appends_to(place: ast.expr, value: ast.expr) -> bool:
    """Whether ``value`` joins the value at ``place`` with others, after it."""
    if isinstance(value, ast.IfExp):  # the first value, or a longer one
        return _appends_to(place, value.body) or _appends_to(place, value.orelse)
    if not isinstance(value, ast.Call) or not value.args:
        return False
    if getattr(value.func, "attr", None) not in _JOINS:
        return False
    first = value.args[0]  # np.append(place, value), torch.cat([place, value])
    if isinstance(first, (ast.List, ast.Tuple)) and first.elts:
        first = first.elts[0]
    return _is_term(place, first)


def _default_in(place: ast.expr, value: ast.expr) -> str | None:
    """The source of what ``value`` has in place of a missing value at ``place``.

    Such as the last argument of ``getattr(self, "calls", 0)`` or ``sums.get(name, 0)``.
    """
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and _is_term(place, node):
            is_getattr = ast.unparse(node.func) == "getattr"
            num_arguments = 3 if is_getattr else 2
            if len(node.args) == num_arguments:
                return ast.unparse(node.args[-1])
    return None


def _written_by_call(call: ast.Call) -> Iterator[Write]:
    """The writes of ``setattr(holder, "name", value)``, ``place.copy_(value)`` and
    ``holder.setdefault(key, value)``.
    """
    function = call.func
    if _is_call_of(call, "setattr") and len(call.args) == 3:
        holder, name, value = call.args
        if isinstance(name, ast.Constant):
            place = ast.Attribute(holder, str(name.value), ast.Load())
            yield _write_of(Target(place.attr), place, value)
    if not isinstance(function, ast.Attribute):
        return
    method = function.attr
    if method == "setdefault" and len(call.args) == 2:
        key, value = call.args
        entry = ast.Subscript(function.value, key, ast.Load())
        target = _target_of(entry)
        if target is not None:
            yield Write(target, False, ast.unparse(value))
    is_in_place = method.endswith("_") and not method.startswith("_")
    target = _target_of(function.value)
    if is_in_place and target is not None:
        yield Write(target, method in _SUMS_IN_PLACE)


def _is_call_of(call: ast.Call, *names: str) -> bool:
    """Whether ``call`` calls one of these functions by its name."""
    return isinstance(call.func, ast.Name) and call.func.id in names


def _target_of(place: ast.expr) -> Target | None:
    if isinstance(place, ast.Attribute):
        return Target(place.attr)
    if not isinstance(place, ast.Subscript):
        return None
    container = place.value
    if _is_dict_of_object(container) and isinstance(place.slice, ast.Constant):
        return Target(str(place.slice.value))
    name = None
    if isinstance(container, ast.Attribute):
        name = container.attr
    elif isinstance(container, ast.Name):
        name = container.id
    key = None
    if isinstance(place.slice, ast.Constant):
        key = repr(place.slice.value)
    return Target(name, True, key)


def _is_dict_of_object(container: ast.expr) -> bool:
    """Whether ``container`` is ``holder.__dict__`` or ``vars(holder)``."""
    if isinstance(container, ast.Attribute):
        return container.attr == "__dict__"
    return isinstance(container, ast.Call) and ast.unparse(container.func) == "vars"


def _is_sum_with(place: ast.expr, value: ast.expr) -> bool:
    """Whether ``value`` is a sum with the value at ``place`` as a term."""
    if isinstance(value, ast.BinOp):
        if isinstance(value.op, ast.Add):
            return _is_term(place, value.left) or _is_term(place, value.right)
        return isinstance(value.op, ast.Sub) and _is_term(place, value.left)
    if isinstance(value, ast.IfExp):  # the first value, or a sum
        return _is_sum_with(place, value.body) or _is_sum_with(place, value.orelse)
    if isinstance(value, ast.Call):
        return _is_call_of_sum(place, value)
    return False


def _is_call_of_sum(place: ast.expr, call: ast.Call) -> bool:
    """Whether ``call`` returns a sum with the value at ``place`` as a term."""
    if _is_call_of(call, "float", "int"):
        return any(_is_sum_with(place, argument) for argument in call.args)
    function = call.func
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr in _SUMS:  # torch.add(place, value), place.add(value)
        terms = [function.value, *call.args]
        return any(_is_term(place, term) for term in terms)
    # (place + value).item()
    return function.attr in _SAME_VALUE and _is_sum_with(place, function.value)


def _is_term(place: ast.expr, term: ast.expr) -> bool:
    """Whether ``term`` is the value at ``place``, or a sum with it."""
    if ast.unparse(term) == ast.unparse(place) or _is_sum_with(place, term):
        return True
    return isinstance(term, ast.Call) and _is_call_of_value(place, term)


def _is_call_of_value(place: ast.expr, call: ast.Call) -> bool:
    """Whether ``call`` returns the value at ``place``."""
    if _is_call_of(call, "float", "int"):
        return any(_is_term(place, argument) for argument in call.args)
    arguments = [ast.unparse(argument) for argument in call.args[:2]]
    if _is_call_of(call, "getattr"):  # getattr(self, "total", 0) for self.total
        if not isinstance(place, ast.Attribute):
            return False
        return arguments == [ast.unparse(place.value), repr(place.attr)]
    function = call.func
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr in _SAME_VALUE:  # place.detach()
        return _is_term(place, function.value)
    if function.attr == "get" and isinstance(place, ast.Subscript):
        # sums.get(name, 0) for sums[name]
        container = ast.unparse(function.value)
        is_same_container = container == ast.unparse(place.value)
        return is_same_container and arguments[:1] == [ast.unparse(place.slice)]
    return False
