"""Whose an object or a function is: the user's, a library's, data, or a thread's.

User code may write the user's objects, so they are walked, saved and restored. Looks,
and steps of other libraries' loops, ask the same question::

    object                              whose       because
    criterion = MyLoss()                user's      the user has defined its class
    bag = SimpleNamespace(calls=0)      user's      it has what user code gave it
    meter = timm.utils.AverageMeter()   user's      it holds values alone
    accelerator = Accelerator()         library's   a package has defined its class
    pairs = PairDataset()               data        a base of its class is ``Dataset``
    helper = NegativeSampler()          user's      no base of its class is a library's
    meter = LockedMeter()               user's      a lock in it is left alone
    writer = SummaryWriter()            writer's    what it is given goes to a file
    meter = ThreadedMeter()             threads'    a thread in it writes at any time
"""

from __future__ import annotations

import enum
import functools
import threading
import types
from collections import deque
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from scatterpar.batch.nested import PLAIN_CLASSES
from scatterpar.libraries import is_library
from scatterpar.objects.references import read_attribute


class Whose(enum.Enum):
    """Whose an object is, which says whether user code may write it."""

    USER = "the user's"
    LIBRARY = "a library's"
    DATA = "data"
    WRITER = "a writer's: what it is given goes to a file"
    THREADS = "shared with a thread of its own"


@dataclass(frozen=True)
class ClassRule:
    """A library's classes for which a rule holds, and the user's that derive from them.

    Attributes:
        ending: how a library's class, or a library's base of a class, is named.
        whose: whose objects of these classes are.
        reason: why the rule holds.
    """

    ending: str
    whose: Whose
    reason: str


# The only list of classes. The first row that fits counts.
RULES = (
    ClassRule("Enum", Whose.DATA, "members are constants"),
    ClassRule("Dataset", Whose.DATA, "it leads to all rows"),
    ClassRule("DataLoader", Whose.DATA, "it leads to a data set, and to processes"),
    ClassRule("DataModule", Whose.DATA, "it leads to data sets"),
    ClassRule("Sampler", Whose.DATA, "it leads to a data set"),
    ClassRule("Trainer", Whose.DATA, "it is the loop, and leads to data"),
    ClassRule("Optimizer", Whose.DATA, "its state has the size of the parameters"),
    ClassRule("IOBase", Whose.DATA, "it is a file, which code reads or writes"),
    ClassRule("DictWriter", Whose.USER, "it holds csv's writer, of the next row"),
    ClassRule("writer", Whose.WRITER, "csv's, which leads to its file unseen"),
    ClassRule("SummaryWriter", Whose.WRITER, "TensorBoard's, whose thread writes"),
    ClassRule("FileWriter", Whose.WRITER, "inside of a SummaryWriter"),
    ClassRule("SynchronizedBase", Whose.USER, "it holds a number of several processes"),
    ClassRule("Namespace", Whose.USER, "its attributes are those that user code sets"),
)

_TORCHS_LOSSES = ("torch.nn.functional", "torch.nn.modules.loss")
_THREADS = (threading.Thread, Executor)
_VALUES = (*PLAIN_CLASSES, Tensor, dict, list, tuple, set, frozenset, deque)


def whose(value: Any) -> Whose:
    """Whose an object is; not for plain values, containers, tensors and modules."""
    # Before the rules: its thread may write at any time, whatever its class.
    if _holds_a_thread(value):
        return Whose.THREADS
    kind: Any = type(value)
    rule = _rule_for(kind)
    if rule is not None:
        return rule.whose
    if is_user_class(type(value)) or _has_values_alone(value):
        return Whose.USER
    return Whose.LIBRARY


@functools.lru_cache(maxsize=1024)
def _rule_for(kind: type) -> ClassRule | None:
    """The rule for the first of a library's classes, among a class and its bases, that
    has one.
    """
    for base in kind.__mro__:
        if is_user_class(base):  # a user's ``NegativeSampler`` may be anything
            continue
        for rule in RULES:
            if base.__name__.endswith(rule.ending):
                return rule
    return None


def is_writer(kind: type) -> bool:
    """Whether objects of a class write what they are given to a file, unseen."""
    rule = _rule_for(kind)
    return rule is not None and rule.whose is Whose.WRITER


def attributes_of(value: Any) -> dict[str, Any]:
    """The ``__dict__`` of an object; an empty one if it has none."""
    attributes = read_attribute(value, "__dict__")
    # A class may compute attributes of any name, and that of a class is no dict.
    return attributes if isinstance(attributes, dict) else {}


def _holds_a_thread(value: Any) -> bool:
    """Whether an object is a thread or a pool of threads, or has one as an attribute.

    Nobody else may restore what such a thread writes. A lock alone is no obstacle: a
    look makes one call at a time.
    """
    # One level deep: what an attribute leads to is asked for itself.
    parts = (value, *attributes_of(value).values())
    return any(isinstance(part, _THREADS) for part in parts)


def _has_values_alone(value: Any) -> bool:
    """Whether all attributes of an object are values, as a library's meter has them.

    Such objects are made to be written, and lead to nothing of their library.
    """
    attributes = attributes_of(value)
    # An error leads to its traceback, and by that to all frames.
    if not attributes or isinstance(value, BaseException):
        return False
    return all(isinstance(attribute, _VALUES) for attribute in attributes.values())


def is_user_class(kind: type) -> bool:
    """Whether the user has defined a class."""
    return not is_library(kind.__module__)


def is_user_function(function: Any) -> bool:
    """Whether the user has defined a function, or what it calls as its own function.

    So do a method, a partial, a library's decorator around the user's function, an
    object whose class has ``__call__``, and a module with a layer of the user's. Only
    these write the user's objects, and take turns.
    """
    if isinstance(function, functools.partial):
        return is_user_function(function.func)
    if isinstance(function, types.MethodType):
        return is_user_function(function.__func__)
    # Layers of the user's are in models of libraries, too.
    if isinstance(function, nn.Module):
        return any(map(_is_user_layer, function.modules()))
    if isinstance(function, type):
        return is_user_class(function)
    if isinstance(function, types.FunctionType):
        # Not ``__module__``: ``functools.wraps`` gives a wrapper that of the user.
        if not is_library(function.__globals__.get("__name__")):
            return True
    elif is_user_class(type(function)):  # a base's ``__call__`` may call its methods
        return True
    wrapped = attributes_of(function).get("__wrapped__")
    return wrapped is not None and is_user_function(wrapped)


def _is_user_layer(layer: nn.Module) -> bool:
    # A forward pass may be replaced in a library's layer.
    return is_user_class(type(layer)) or is_user_function(layer.forward)


def is_loss_of_torch(criterion: Any) -> bool:
    """Whether a criterion is one of torch's own losses, a module or a function."""
    is_module = isinstance(criterion, nn.Module)
    definition = type(criterion) if is_module else criterion
    return read_attribute(definition, "__module__") in _TORCHS_LOSSES
