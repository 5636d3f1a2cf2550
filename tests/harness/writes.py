"""Kinds of writes of a step function, which three loops' tests compare with the stock
loop's with gradient accumulation.

``prepare`` gives an owner, such as a Trainer, what the calls write. ``write`` is called
by its step function, once per micro-batch. ``read`` returns what is compared.
"""

from __future__ import annotations

import collections
import contextvars
import csv
import dataclasses
import heapq
import io
import itertools
import queue
import random
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

HISTORY: list[float] = []  # a global variable that calls append to
# A network that calls move, as a teacher with averaged weights, and its buffers.
AVERAGE = nn.BatchNorm1d(2).requires_grad_(False)


@dataclasses.dataclass
class Best:
    value: float = 99.0
    call: int = -1


class Slots:
    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 1.0


class Totals:
    """A class in the place of global variables."""

    total = 0.0


def write_totals(owner, loss, _):
    Totals.total += loss


def reset_average():
    AVERAGE.reset_parameters()


@torch.no_grad()
def write_average(owner, loss, _):
    AVERAGE.weight.mul_(0.5).add_(loss)
    AVERAGE.num_batches_tracked.add_(1)


def averages(owner):
    return AVERAGE.weight.tolist(), AVERAGE.num_batches_tracked.item()


class Registry(dict):
    """A dict with an attribute."""

    written = 0


class Numbers:
    """A descriptor, which has the values of all objects."""

    def __init__(self) -> None:
        self.values: dict[int, int] = {}

    def __get__(self, owner: Any, kind: type) -> int:
        return self.values.get(id(owner), 0)

    def __set__(self, owner: Any, value: int) -> None:
        self.values[id(owner)] = value


class Numbered:
    number = Numbers()


def numbered():
    value = Numbered()
    value.number = 0  # the values have that of a dead object with the same id
    return value


class LockedMeter:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: list[float] = []

    def add(self, value: float) -> None:
        with self.lock:
            self.values.append(value)


class ThreadedMeter(LockedMeter):
    """A thread of its own may write it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.Thread()


class Node(NamedTuple):
    value: float
    before: Any


class Write(NamedTuple):
    """A kind of writes.

    Attributes:
        prepare: returns what the owner has as ``owner.kept``, before the first call.
        write: gets the owner, the loss as a number, the first number of the rows.
        read: returns what is compared, from the owner.
    """

    prepare: Callable[[], Any]
    write: Callable[[Any, float, float], Any]
    read: Callable[[Any], Any] = lambda owner: owner.kept


def counted(owner):
    """The number of the call, from 0."""
    owner.calls = getattr(owner, "calls", -1) + 1
    return owner.calls


def write_ring(owner, loss, _):
    owner.kept[counted(owner) % 5] = loss


def write_best(owner, loss, _):
    call = counted(owner)
    if loss < owner.kept.value:
        owner.kept = dataclasses.replace(owner.kept, value=loss, call=call)


def write_window(owner, loss, _):
    owner.kept.append(loss)
    owner.kept[:] = owner.kept[-3:]


def write_recent(owner, _, first):
    owner.kept[first > 0] = counted(owner)
    owner.kept.move_to_end(first > 0)


def write_registry(owner, loss, _):
    owner.kept[owner.kept.written] = loss
    owner.kept.written += 1


def write_rows(owner, _, first):
    owner.kept = torch.cat([owner.kept, torch.tensor([first])])


def write_smallest(owner, loss, _):
    heapq.heappush(owner.kept, -loss)
    if len(owner.kept) > 3:
        heapq.heappop(owner.kept)


def closure():
    """A function that writes variables which it closes over, and one that reads them."""
    total = 1.0
    values = []

    def write(loss):
        nonlocal total
        total = total / 2 + loss
        values.append(total)

    return write, lambda: values


def table():
    """A writer of rows, and the text that it writes."""
    text = io.StringIO()
    return csv.writer(text), text


def write_class(owner, loss, _):
    type(owner).total = getattr(type(owner), "total", 0.0) + loss


def write_line(owner, loss, _):
    with open(owner.kept, "a") as file:
        file.write(f"{loss:.9f}\n")


class Key:
    """A key of a dict, which calls write."""

    def __init__(self) -> None:
        self.total = 1.0


def write_key(owner, loss, _):
    for key in owner.kept:
        key.total = key.total / 2 + loss


def write_longer(owner, loss, _):
    owner.kept.resize_(len(owner.kept) + 1)[-1] = loss


def set_(owner, value):
    owner.kept = value


# What a look can put back, so that it calls the function.
RESTORABLE = {
    "full deque": Write(
        lambda: collections.deque(maxlen=5), lambda o, loss, x: o.kept.append(loss)
    ),
    "counter": Write(collections.Counter, lambda o, loss, x: o.kept.update([x > 0])),
    "ring of numpy": Write(lambda: np.zeros(5), write_ring),
    "running average": Write(
        lambda: 1.0, lambda o, loss, x: set_(o, 0.9 * o.kept + 0.1 * loss)
    ),
    "global list": Write(
        HISTORY.clear, lambda o, loss, x: HISTORY.append(loss), lambda o: [*HISTORY]
    ),
    "count": Write(
        lambda: (itertools.count(5), []),
        lambda o, loss, x: o.kept[1].append(next(o.kept[0])),
        lambda o: o.kept[1],
    ),
    "own random numbers": Write(
        lambda: (random.Random(3), []),
        lambda o, loss, x: o.kept[1].append(o.kept[0].random()),
        lambda o: o.kept[1],
    ),
    "memory bank": Write(lambda: torch.zeros(5), write_ring),
    "dict of lists": Write(
        dict, lambda o, loss, x: o.kept.setdefault(x > 0, []).append(loss)
    ),
    "dataclass": Write(Best, write_best),
    # Nobody reported these.
    "growing tensor": Write(lambda: torch.zeros(0), write_rows),
    "bytes": Write(bytearray, lambda o, loss, x: o.kept.extend(b"%.9f" % loss)),
    "text file in memory": Write(
        io.StringIO,
        lambda o, loss, x: o.kept.write(f"{loss:.9f}\n"),
        lambda o: o.kept.getvalue(),
    ),
    "attribute of a dict": Write(
        Registry, write_registry, lambda o: [*o.kept.values(), o.kept.written]
    ),
    "heap": Write(list, write_smallest),
    "text": Write(str, lambda o, loss, x: set_(o, f"{o.kept}{loss:.3f}, ")),
    "slot": Write(
        Slots,
        lambda o, loss, x: setattr(o.kept, "total", o.kept.total * loss),
        lambda o: o.kept.total,
    ),
    "window": Write(list, write_window),
    "ordered dict": Write(
        collections.OrderedDict, write_recent, lambda o: [*o.kept.items()]
    ),
    "class attribute": Write(lambda: None, write_class, lambda o: type(o).total),
    "generator of torch": Write(
        lambda: (torch.Generator().manual_seed(1), []),
        lambda o, loss, x: o.kept[1].append(float(torch.rand((), generator=o.kept[0]))),
        lambda o: o.kept[1],
    ),
    "linked list": Write(lambda: None, lambda o, loss, x: set_(o, Node(loss, o.kept))),
    "class by its name": Write(
        lambda: setattr(Totals, "total", 0.0), write_totals, lambda o: Totals.total
    ),
    "cycle": Write(
        lambda: (itertools.cycle(range(20)), []),
        lambda o, loss, x: o.kept[1].append((next(o.kept[0]), loss)),
        lambda o: o.kept[1],
    ),
    "method of a list": Write(
        lambda: [].append, lambda o, loss, x: o.kept(loss), lambda o: o.kept.__self__
    ),
    "method of a text file": Write(
        lambda: io.StringIO().write,
        lambda o, loss, x: o.kept(f"{loss:.9f}\n"),
        lambda o: o.kept.__self__.getvalue(),
    ),
    "cache": Write(dict, lambda o, loss, x: o.kept.setdefault(x > 0, x)),
    "last": Write(lambda: 0.0, lambda o, loss, x: set_(o, loss)),
    "context variable": Write(
        lambda: contextvars.ContextVar("number", default=0),
        lambda o, loss, x: o.kept.set(o.kept.get() + 1),
        lambda o: o.kept.get(),
    ),
    "descriptor": Write(
        numbered,
        lambda o, loss, x: setattr(o.kept, "number", o.kept.number + 1),
        lambda o: o.kept.number,
    ),
    "network of a global variable": Write(reset_average, write_average, averages),
    "object with a lock": Write(
        lambda: {"meters": [LockedMeter()]},
        lambda o, loss, x: o.kept["meters"][0].add(loss),
        lambda o: o.kept["meters"][0].values,
    ),
}
RESTORABLE |= {
    "set": Write(
        set, lambda o, loss, x: o.kept.add(round(x)), lambda o: sorted(o.kept)
    ),
    "default dict": Write(
        lambda: collections.defaultdict(float),
        lambda o, loss, x: o.kept.update({round(x): o.kept[round(x)] + loss}),
    ),
    "closure": Write(
        closure, lambda o, loss, x: o.kept[0](loss), lambda o: o.kept[1]()
    ),
    "rows of csv": Write(
        table,
        lambda o, loss, x: o.kept[0].writerow([round(loss, 9), x]),
        lambda o: o.kept[1].getvalue(),
    ),
    "attribute of a module": Write(
        lambda: types.ModuleType("of_a_user"),
        lambda o, loss, x: setattr(o.kept, "total", getattr(o.kept, "total", 1) - loss),
        lambda o: o.kept.total,
    ),
    "Python's random numbers": Write(
        lambda: random.seed(1) or [], lambda o, loss, x: o.kept.append(random.random())
    ),
    "NumPy's random numbers": Write(
        lambda: np.random.seed(1) or [],
        lambda o, loss, x: o.kept.append(np.random.rand()),
    ),
    "nested dicts": Write(
        lambda: {"of": {}}, lambda o, loss, x: o.kept["of"].update({len(o.kept): loss})
    ),
    "file by its path": Write(
        lambda: Path(tempfile.mkdtemp()) / "losses.txt",
        write_line,
        lambda o: o.kept.read_text(),
    ),
    "object as a key": Write(
        lambda: {Key(): 0}, write_key, lambda o: [key.total for key in o.kept]
    ),
    "longer tensor": Write(lambda: torch.zeros(1).double(), write_longer),
    "array in place": Write(
        lambda: np.ones(3), lambda o, loss, x: np.multiply(o.kept, loss, out=o.kept)
    ),
}
# What no look can put back: it leaves the function out.
IRREVOCABLE = {
    "open file": Write(
        lambda: tempfile.TemporaryFile("w+"),  # noqa: SIM115
        lambda o, loss, x: o.kept.write(f"{loss:.9f}\n"),
        lambda o: (o.kept.seek(0), o.kept.read())[1],
    ),
    "iterator": Write(
        lambda: (iter(range(100)), []),
        lambda o, loss, x: o.kept[1].append(next(o.kept[0])),
        lambda o: o.kept[1],
    ),
    "generator": Write(
        lambda: ((n * n for n in range(100)), []),
        lambda o, loss, x: o.kept[1].append(next(o.kept[0])),
        lambda o: o.kept[1],
    ),
    "queue": Write(
        queue.SimpleQueue,
        lambda o, loss, x: o.kept.put(loss),
        lambda o: [o.kept.get() for _ in range(o.kept.qsize())],
    ),
    "object with a thread": Write(
        ThreadedMeter, lambda o, loss, x: o.kept.add(loss), lambda o: o.kept.values
    ),
}
WRITES = RESTORABLE | IRREVOCABLE


def network():
    """Layers inside of a frozen network, which has buffers."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for parameter in inner.parameters():
        nn.init.ones_(parameter)
    return nn.Sequential(inner).double().requires_grad_(False)


@torch.no_grad()
def write_network(layers, loss):
    linear, norm = layers[0]
    linear.weight.mul_(0.9).add_(loss)
    linear.bias.mul_(0.5).add_(loss)
    norm.running_mean.mul_(0.9).add_(loss)
    norm.steps = getattr(norm, "steps", 0) + 1


def values_of_network(layers):
    linear, norm = layers[0]
    values = linear.weight.tolist(), linear.bias.tolist(), norm.running_mean.tolist()
    return [*values, norm.steps]


def write_networks(owner, loss, x):
    slow, (fast,) = owner.kept.values()
    write_network(fast if x > 0 else slow, loss)
    write_network(fast, loss / 2)
    write_network(slow, loss / 3)


# Averaged weights in a network that is no submodule of the owner.
NETWORKS = {
    "network in a list": Write(
        lambda: [network()],
        lambda o, loss, x: write_network(o.kept[0], loss),
        lambda o: values_of_network(o.kept[0]),
    ),
    "networks in a dict": Write(
        lambda: {"slow": network(), "fast": [network()]},
        write_networks,
        lambda o: [*map(values_of_network, [o.kept["slow"], *o.kept["fast"]])],
    ),
    "network of an object": Write(
        lambda: types.SimpleNamespace(teachers=(network(),)),
        lambda o, loss, x: write_network(o.kept.teachers[0], loss),
        lambda o: values_of_network(o.kept.teachers[0]),
    ),
}


class Written:
    """Writes of some kinds, each into an object of its own."""

    def __init__(self, kinds: dict[str, Write]) -> None:
        self._kinds = kinds
        self._owners = {}
        for name, kind in kinds.items():
            # of a class of its own, because one kind writes it
            self._owners[name] = type("Owner", (), {"__module__": __name__})()
            self._owners[name].kept = kind.prepare()

    def write(self, loss: float, first: float) -> None:
        """What a step function does in each call."""
        for name, kind in self._kinds.items():
            kind.write(self._owners[name], loss, first)

    def values(self) -> dict[str, list[Any]]:
        """What calls have left, by kind."""
        values = {}
        for name, kind in self._kinds.items():
            values[name] = list(atoms(kind.read(self._owners[name])))
        return values


def atoms(value: Any) -> Iterator[Any]:
    """The numbers and texts in a value, in order."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        value = value.tolist()
    if isinstance(value, dict):
        value = list(value.items())
    if dataclasses.is_dataclass(value):
        value = dataclasses.astuple(value)
    if isinstance(value, (list, tuple, collections.deque)):
        for entry in value:
            yield from atoms(entry)
    else:
        yield round(value, 9) if isinstance(value, float) else value


def assert_same_writes(
    values: dict[str, list[Any]], expected: dict[str, list[Any]]
) -> None:
    """Assert that calls have left the same, kind by kind."""
    differing = {}
    for name, kept in expected.items():
        if values[name] != kept:
            differing[name] = f"{values[name]} beside {kept}"
    assert not differing, "\n".join(f"{k}: {v}" for k, v in differing.items())
