"""Looks and failed steps leave no trace."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import logging
import math
import multiprocessing
import os
import queue
import random
import re
import socket
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import types
import warnings
import zipfile
from collections import UserDict, UserList, deque
from contextvars import ContextVar
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from harness.looks import INPUTS, LABELS, VALUES
from harness.models import CLASSES, Classifier, Of, mlp
from harness.oracle import assert_step, build
from harness.pairwise import pairwise
from harness.writes import ThreadedMeter
from objects.test_whose import OBJECTS
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    ScatterOnceParallel,
    errors,
    splitcheck,
)
from scatterpar.objects.journal import Journal
from scatterpar.objects.walk import Walk
from scatterpar.objects.whose import RULES, Whose

# --- what the criterion moves ---


def test_all_labels_ignored_warns(devices):
    """torch's loss is NaN, and the engine's was 0.0 without a word."""
    with ScatterOnceParallel(mlp(), 3, devices(2)) as engine:
        with pytest.warns(UserWarning, match="all are ignored.*NaN"):
            loss = engine.forward_backward(
                INPUTS, LABELS * 0 - 100, nn.CrossEntropyLoss()
            )
        assert loss.item() == 0
        assert all(
            p.grad is None or not p.grad.any() for p in engine.module.parameters()
        )


def normed():
    model = Classifier()
    model.norm = nn.BatchNorm1d(CLASSES)
    return model


@pytest.mark.parametrize("whole_batch", [False, True])
@pytest.mark.parametrize("buffers", ["master", "batch"])
def test_criterion_moved_statistics_stay(whole_batch, buffers):
    """They were those of the replica, in which nothing had moved them: zeros."""
    model, twin = build(normed), build(normed)

    def loss_with(module):
        return lambda output, targets: F.mse_loss(module.norm(output), targets)

    loss_with(twin)(twin(INPUTS), VALUES).backward()
    with ScatterOnceParallel(model, 1, ["cpu"], buffers=buffers) as engine:
        model.norm.requires_grad_(whole_batch)  # else only replicas are trained
        engine.forward_backward(
            INPUTS, VALUES, loss_with(model), whole_batch=whole_batch
        )
    for name, expected in twin.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], expected), name


# --- without a trace ---


class Slots:
    __slots__ = ("calls",)


class Counts:
    """Counts its calls in all ways that there are."""

    seen, array, queue, slots, history = 0, np.zeros(3), Queue(), Slots(), []

    def __init__(self, reduction="mean"):
        self.reduced, self.calls, self.steps, self.slots.calls = (
            reduction,
            0,
            torch.zeros(()),
            0,
        )
        self.bag = SimpleNamespace(calls=0)

    def __call__(self, output, targets):
        type(self).seen += 1
        self.calls += 1
        self.steps += 1
        self.slots.calls += 1
        self.queue.put(1)
        self.bag.calls += 1
        self.array[0] += 1
        self.history.append(1)
        return F.cross_entropy(output, targets, reduction=self.reduced)

    def numbers(self):
        own = self.seen, self.calls, self.steps, self.slots.calls, self.array[0]
        return [*own, self.queue.qsize(), len(self.history), self.bag.calls]


class Base:
    seen: ClassVar[list] = []


class Derived(Base):
    """Its methods write attributes of its base, and make others."""

    def count(self):
        self.seen.append(1)
        Derived.made = getattr(Derived, "made", 0) + 1


class Calls:
    """A descriptor, which has the values of all objects."""

    def __init__(self):
        self.values = {}

    def __get__(self, owner, kind):
        return self.values.get(id(owner), 0)

    def __set__(self, owner, value):
        self.values[id(owner)] = value


class Described:
    calls = Calls()


class Locked(Described):
    def __init__(self):
        self.lock = threading.Lock()
        self.values = []


HELPERS = types.ModuleType("helpers_of_the_user")
exec("calls = 0\ndef count():\n    global calls\n    calls += 1", vars(HELPERS))
HELPERS.seen = False


def count_in_modules(_):
    HELPERS.count()
    HELPERS.seen = True


NUMBERS = itertools.count(1)
HOLDERS = {  # what user code writes, how, what it holds
    "base class": (
        Derived(),
        Derived.count,
        lambda _: (Derived.seen, "made" in vars(Derived)),
    ),
    "namespace": (
        SimpleNamespace(calls=0),
        lambda v: setattr(v, "calls", v.calls + 1),
        lambda v: v.calls,
    ),
    "UserDict": (UserDict(), lambda v: v.setdefault("a", 1), dict),
    "UserList": (UserList([1]), lambda v: v.append(2), list),
    "descriptor": (
        Described(),
        lambda v: setattr(v, "calls", v.calls + 1),
        lambda v: v.calls,
    ),
    "object with a lock": (
        Locked(),
        lambda v: v.values.append(1),
        lambda v: v.values,
    ),
    "module of the user": (
        HELPERS,
        count_in_modules,
        lambda v: (v.calls, v.seen),
    ),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_code_writes_is_restored(name):
    value, change, read = HOLDERS[name]
    before = repr(read(value))
    state = Journal(Walk([partial(change, value)]))
    change(value)
    assert repr(read(value)) != before
    state.restore()
    assert repr(read(value)) == before


def closing_over(value):
    def function():
        return value

    return function


def test_changed_numbers_have_names_of_the_code():
    model = mlp()
    model[0].history = {"loss": [1]}
    model[0].sums = {"of": 0}
    count, seen = 0, []

    def criterion():
        nonlocal count
        count += 1
        seen.append(count)
        model[0].history["loss"].append(2)
        model[0].history["norm"] = 3
        model[0].sums["of"] += 3
        model[0].calls = 1
        with torch.no_grad():
            model[0].bias.add_(1)

    before = model[0].bias.tolist()
    journal = Journal(Walk([criterion]), guarded=(), max_bytes=math.inf)
    assert journal.changed_numbers() == []
    criterion()
    # A new entry is one of a cache, and told in no step.
    assert {*journal.changed_numbers()} == {
        *("count", "model.0.sums['of']", "model.0.calls"),
    }
    journal.restore()
    assert journal.changed_numbers() == []
    assert (count, seen, model[0].bias.tolist()) == (0, [], before)


def test_classes_lose_attributes_that_calls_made():
    journal = Journal(Walk([Derived()]))
    Derived.made = 1
    journal.restore()
    assert not hasattr(Derived, "made")


def test_first_global_of_a_function_is_removed():
    function = types.FunctionType(
        compile("def f():\n global made\n made = 1", "f", "exec").co_consts[0],
        {"__name__": "of_a_user"},
    )
    journal = Journal(Walk([function]))
    function()
    assert function.__globals__["made"] == 1
    journal.restore()
    assert "made" not in function.__globals__


def generator():
    yield from range(3)


UNSAVED = {
    "a generator": generator,
    "an iterator over a generator": lambda: enumerate(generator()),
    "an iterator of a list": lambda: iter([1, 2, 3]),
    "a counter": itertools.count,
    "a file": lambda: open(os.devnull, "w"),  # noqa: SIM115
    "a file that is also read": lambda: open(os.devnull, "w+"),  # noqa: SIM115
    "a table": lambda: csv.writer(io.StringIO()),
    "an iterator of a loader": lambda: iter(DataLoader([1, 2, 3])),
    "a socket": socket.socket,
    "a plain queue": queue.SimpleQueue,
    "an object with a thread": ThreadedMeter,
}


UNSAVED |= {
    "a database": lambda: sqlite3.connect(":memory:"),
    "rows of a database": lambda: sqlite3.connect(":memory:").cursor(),
    "a queue of processes": multiprocessing.Queue,
    "a simple queue of processes": multiprocessing.SimpleQueue,
    "an end of a pipe": lambda: multiprocessing.Pipe()[0],
}


@pytest.mark.draws
@pytest.mark.parametrize("name", UNSAVED)
def test_what_has_no_row_is_named(name):
    value = UNSAVED[name]()
    journal = Journal(Walk([closing_over(SimpleNamespace(source=value))]))
    kind = type(value).__name__
    assert journal.unsaved == [f"value.source ({kind})"]
    getattr(value, "close", int)()


def cat():
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


# An object of a library that writes a file, the name of that file in it, and its class.
ARCHIVES = {
    "a named file": (partial(tempfile.NamedTemporaryFile, "w"), "file", io.IOBase),
    "an archive": (lambda: zipfile.ZipFile(io.BytesIO(), "w"), "fp", io.BytesIO),
    "a zipped file": (lambda: zipfile.ZipFile("a.zip", "w"), "fp", io.IOBase),
    "a tape": (partial(tarfile.open, "a.tar", "w"), "fileobj", io.IOBase),
    "a process": (cat, "stdin", io.IOBase),
}


@pytest.mark.draws
@pytest.mark.parametrize("name", ARCHIVES)
def test_file_of_a_librarys_object_is_named(name, tmp_path, monkeypatch):
    """A look wrote into it."""
    monkeypatch.chdir(tmp_path)
    make, file, kind = ARCHIVES[name]
    value = make()
    journal = Journal(Walk([closing_over(value)]))
    part = getattr(value, file)
    assert isinstance(part, kind)
    # What is in memory is put back, with its position.
    is_named = kind is not io.BytesIO
    named = [f"value.{file} ({type(part).__name__})"] * is_named
    assert journal.unsaved == named
    if name == "a process":
        value.communicate(b"end\n")
    getattr(value, "close", int)()


def test_handler_of_a_logger_is_left_alone(tmp_path):
    """Looks drop its records."""
    handler = logging.FileHandler(tmp_path / "log")
    assert Journal(Walk([closing_over(handler)])).unsaved == []
    handler.close()


class Backend:
    """The functions of an accelerator's module that read and write its generator."""

    def __init__(self):
        self.states = [torch.zeros(16, dtype=torch.uint8) for _ in range(2)]

    def get_rng_state(self, device):
        return self.states[device.index].clone()

    def set_rng_state(self, state, device):
        self.states[device.index].copy_(state)


@pytest.mark.draws
def test_generators_of_all_devices_put_back(monkeypatch):
    """Those of accelerators had no row, and so no look on a GPU saw dropout."""
    backend = Backend()
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    devices = [torch.device("cuda", index) for index in range(2)]
    draws = (
        lambda: backend.states[0].add_(1),
        lambda: backend.states[1].add_(1),
        lambda: torch.rand(1),
        random.random,
        np.random.rand,
    )
    for draw in draws:
        states = [*backend.states, torch.get_rng_state()]
        before = [state.clone() for state in states], random.getstate()
        journal = Journal(Walk([]), devices)
        draw()
        journal.restore()
        assert journal.drawn
        states = [*backend.states, torch.get_rng_state()]
        assert all(map(torch.equal, states, before[0]))
        assert random.getstate() == before[1]


@pytest.mark.parametrize("place", ["tests", "use"])
def test_given_value_without_row_is_named(place, monkeypatch):
    namespace = SimpleNamespace(get_state=None, set_state=None)
    monkeypatch.setattr("scatterpar.objects.journal.default_of", lambda _: namespace)
    name = r"the default generator of cpu \(SimpleNamespace\)"
    if place == "tests":
        with pytest.raises(errors.Defect, match=name):
            Journal(Walk([]))
        return
    monkeypatch.setattr(errors, "raises_defects", False)
    with pytest.warns(RuntimeWarning, match=name):
        assert [re.fullmatch(name, text) for text in Journal(Walk([])).unsaved]
    # A look says so instead: it neither refuses nor accepts by chance.
    model = mlp()
    with (
        ScatterOnceParallel(model, 2, ["cpu"]) as engine,
        pytest.warns(UserWarning, match=f"could not check .*{name}"),
    ):
        engine.forward_backward(INPUTS, VALUES, F.mse_loss)


class Table:
    """A log of losses with columns."""

    def __init__(self, path):
        self.file = open(path, "w", newline="")  # noqa: SIM115
        self.rows = csv.DictWriter(self.file, ["loss"])

    def write(self, text):
        self.rows.writerow({"loss": text})

    def close(self):
        self.file.close()


class SummaryWriter:
    """As TensorBoard's: a thread of its own writes the file."""

    def __init__(self, path):
        self.path = path
        self.entries = queue.Queue()
        self.thread = threading.Thread(target=self.drain, daemon=True)
        self.thread.start()

    def drain(self):
        with open(self.path, "w") as file:
            for text in iter(self.entries.get, None):
                file.write(text)

    def write(self, text):
        self.entries.put(text)

    def close(self):
        self.entries.put(None)
        self.thread.join()


SummaryWriter.__module__ = "torch.utils.tensorboard"


FILES = {
    "text": lambda path: open(path, "w"),  # noqa: SIM115
    "appended text": lambda path: open(path, "a"),  # noqa: SIM115
    "bytes": lambda path: io.TextIOWrapper(gzip.open(path, "wb")),  # noqa: SIM115
    "table": Table,
    "summaries": SummaryWriter,
}


def run_steps(engine, criterion, steps):
    for _ in range(steps):
        engine.forward_backward(INPUTS, VALUES, criterion)


# By kind: what a criterion writes to or takes from, and the words that name it.
NAMES = {
    "text": r"log \(TextIOWrapper\)",
    "appended text": r"log \(TextIOWrapper\)",
    "bytes": r"log \(TextIOWrapper\)",
    "table": r"log\.file \(TextIOWrapper\), log\.rows\.writer \(writer\)",
    "summaries": r"log \(SummaryWriter\)",
}


@pytest.mark.parametrize("where", ["criterion", "module", "both"])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("device_ids", [["cpu"] * 2, ["cpu:0", "cpu:1"]])
def test_code_with_a_writer_is_not_looked_at(name, where, device_ids, tmp_path):
    """Each micro-batch writes once, as in a plain loop; that is told once, by name."""
    path = tmp_path / "log"
    log = FILES[name](path)

    def forward(module, rows):
        if where != "criterion":
            module.log.write("a line\n")
        return module.body(rows)

    def criterion(output, targets):
        if where != "module":
            log.write("a line\n")
        return F.mse_loss(output, targets)

    model = build(lambda: Of(forward, body=mlp()))
    model.log = log if where != "criterion" else None
    told = rf"(?s)could not put back.*{NAMES[name]}.*not looked at.*outside of forward"
    with (
        ScatterOnceParallel(model, 2, device_ids) as engine,
        pytest.warns(UserWarning, match=told) as warned,
    ):
        run_steps(engine, criterion, 4)
    assert len(warned) == 1
    log.close()
    assert model.log is (log if where != "criterion" else None)
    content = path.read_bytes()
    if name == "bytes":
        content = gzip.decompress(content)
    calls = {"criterion": 1, "module": 1, "both": 2}[where]
    assert content.count(b"a line") == 4 * 4 * calls


@pytest.mark.parametrize("make", [itertools.count, lambda: iter(range(99)), generator])
def test_code_with_an_iterator_is_not_looked_at(make):
    """It moves by one per micro-batch, as in a plain loop; that is told once."""
    numbers = make()

    def criterion(output, targets):
        return F.mse_loss(output, targets) * (1 + 0 * next(numbers, 0))

    told = r"(?s)numbers \(.*not looked at"
    with (
        ScatterOnceParallel(mlp(), 1, ["cpu"] * 2) as engine,
        pytest.warns(UserWarning, match=told) as warned,
    ):
        run_steps(engine, criterion, 1 if make is generator else 2)
    assert len(warned) == 1
    assert next(numbers) == (2 if make is generator else 4)


class Counted(torch.autograd.Function):
    """Counts its calls, in both directions, in its class."""

    calls = 0

    @staticmethod
    def forward(ctx, rows):
        Counted.calls += 1
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        Counted.calls += 1
        return gradient


# how a value is made, moved by a call, and read
class AttributeDict(dict):
    """A missing attribute is a ``KeyError``, which ``hasattr`` does not expect."""

    __getattr__ = dict.__getitem__


class Stubborn:
    """Has no attribute but those of its class, and says so in its own way."""

    __slots__ = ()

    def __getattr__(self, name):
        raise RuntimeError(name)


class Gain(complex):
    """Members of its base in C are read-only, and each read makes a new number."""


def two_lengths(layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


# Values that a criterion may refer to, and that are not what they seem.
UNUSUAL = {
    "attributes of a dict": lambda: AttributeDict(scale=2),
    "no attributes": Stubborn,
    "members of a class in C": lambda: Gain(1, 2),
    "nested tensor": lambda: two_lengths(torch.strided),
    "jagged tensor": lambda: two_lengths(torch.jagged),
    "tensor of oneDNN": lambda: torch.ones(3, 3).to_mkldnn(),
    "quantised tensor": lambda: torch.quantize_per_tensor(
        torch.ones(3), 0.1, 0, torch.qint8
    ),
    "expanded tensor": lambda: torch.ones(1).expand(3),
}


class Loss(AttributeDict):
    """A loss function whose own attributes are entries."""

    def __init__(self, value):
        super().__init__(value=value)

    def __call__(self, output, targets):
        return F.mse_loss(output, targets)


def by(criterion):
    def step(model, batches):
        rows = sum(len(inputs) for inputs, _ in batches)
        for inputs, values in batches:
            loss = criterion(model(inputs), values)
            (loss * len(inputs) / rows).backward()

    return step


TURN = ContextVar("TURN")
SHARED = {
    "iterator": (itertools.count, next, next),
    "deque in an object": (
        lambda: SimpleNamespace(calls=deque([0], maxlen=3)),
        lambda kept: kept.calls.append(kept.calls[-1] + 1),
        lambda kept: list(kept.calls),
    ),
    "NumPy's generator": (
        lambda: np.random.default_rng(3),
        lambda kept: kept.random(),
        lambda kept: kept.random(),
    ),
    "NumPy's older generator": (
        lambda: np.random.RandomState(3),
        lambda kept: kept.rand(),
        lambda kept: kept.rand(),
    ),
    "sparse tensor": (
        lambda: AttributeDict(table=torch.zeros(3).to_sparse()),
        lambda kept: kept.table.add_(torch.ones(3).to_sparse()),
        lambda kept: kept.table.to_dense().tolist(),
    ),
    "context variable": (
        lambda: TURN.set(0),
        lambda kept: TURN.set(TURN.get() + 1),
        lambda kept: TURN.get(),
    ),
    "class of a Function": (
        lambda: setattr(Counted, "calls", 0),
        lambda kept: 0,
        lambda kept: Counted.calls,
    ),
}


@pytest.mark.draws
@pytest.mark.parametrize("name", SHARED)
def test_look_leaves_what_module_and_criterion_share(devices, name):
    """A step moves it as often as without a look."""
    make, move, read = SHARED[name]

    def forward(module, rows):
        move(module.kept)
        return Counted.apply(module.body(rows))

    def criterion(output, targets):
        move(kept)
        return F.mse_loss(output, targets)

    values = []
    for verify in (False, True):
        kept = make()
        model = build(lambda: Of(forward, body=mlp()))
        model.kept = kept
        with ScatterOnceParallel(model, 2, devices(1), verify=verify) as engine:
            engine.forward_backward(INPUTS, VALUES, criterion)
        assert model.kept is kept
        values.append(read(kept))
    assert values[0] == values[1]


@pytest.mark.filterwarnings("ignore:.*(prototype|deprecated|quantiz).*")
@pytest.mark.parametrize("name", UNUSUAL)
def test_look_meets_unusual_values(devices, name):
    """A step of a criterion that refers to them failed, unless ``verify=False``."""
    value = UNUSUAL[name]()
    criterion = Loss(value)
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        assert_step(engine, INPUTS, VALUES, criterion)
    assert splitcheck(by(criterion), mlp(), (INPUTS, VALUES)).passed
    assert criterion.value is value


def bias():
    return nn.Parameter(torch.zeros(3))


# Who holds the parameter that a criterion refers to, and writes; and the parameter.
WRITTEN = {
    "teacher": lambda: (net := mlp().requires_grad_(False), net[0].bias),
    "trained network": lambda: (net := mlp(), net[0].bias),
    "parameter": lambda: (parameter := bias().requires_grad_(False), parameter),
    "object": lambda: (holder := SimpleNamespace(p=bias()), holder.p),
}


@pairwise(name=WRITTEN, wraps=["engine", "pair"])
def test_look_leaves_other_networks(devices, name, wraps):
    """An average of weights that the loss function updates moved in each look, too."""
    values = []
    for verify in (False, True):
        holder, parameter = WRITTEN[name]()
        parameter.data.zero_()

        def criterion(output, targets, holder=holder, parameter=parameter):
            with torch.no_grad():
                parameter.add_(1)
            return F.mse_loss(output, targets)

        if wraps == "engine":
            with ScatterOnceParallel(mlp(), 2, devices(2), verify=verify) as engine:
                engine.forward_backward(INPUTS, VALUES, criterion)
        else:
            outputs = DataParallelModel(mlp(), devices(2))(INPUTS)
            DataParallelCriterion(criterion, verify=verify)(outputs, VALUES)
        values.append(parameter.tolist())
    assert values[0] == values[1]


def test_look_does_not_draw_from_a_generator():
    """The step needs three numbers, and has three; the warning names the generator."""
    numbers = generator()
    # No argument of the call helps, so none is named.
    told = r"(?s)put back.*numbers \(generator\)(?!.*count=).*outside of forward"
    model = mlp()
    model.numbers = numbers

    def criterion(output, targets):
        return F.mse_loss(output, targets) * (1 + 0 * next(numbers))

    with (
        ScatterOnceParallel(model, 3, ["cpu"]) as engine,
        pytest.warns(UserWarning, match=told),
    ):
        engine.forward_backward(INPUTS, VALUES, criterion)
    assert next(numbers, None) is None


@pytest.mark.parametrize("name", OBJECTS)
def test_look_and_step_agree_on_whose_it_is(name):
    """A look restores, and a step lends, what is the user's, and no other object."""
    value, owner = OBJECTS[name]
    number = next(NUMBERS)
    try:
        value.number_of_test = 0
    except (AttributeError, TypeError):
        pytest.skip("objects of this class have no attributes of the user's")
    holder = SimpleNamespace(value=value)
    net = nn.Identity()
    value.nets_of_test = [net]
    walk = Walk([closing_over(holder)])
    journal = Journal(walk)
    value.number_of_test = number
    journal.restore()
    is_lent = net in [place.value for place in walk.places]
    is_restored = value.number_of_test == 0
    del value.number_of_test, value.nets_of_test
    assert is_restored == is_lent == (owner is Whose.USER)


@pytest.mark.parametrize("ending", [rule.ending for rule in RULES])
def test_name_of_a_helper_decides_nothing(ending):
    """It counted 10 calls with a look, and 4 without."""

    def calls_of_a_step(verify):
        helper = type(f"Negative{ending}", (), {"__module__": __name__, "calls": 0})()

        def criterion(output, targets):
            helper.calls += 1
            return F.mse_loss(output, targets)

        with ScatterOnceParallel(mlp(), 4, ["cpu"], verify=verify) as engine:
            engine.forward_backward(INPUTS, VALUES, criterion)
        return helper.calls

    assert calls_of_a_step(verify=True) == calls_of_a_step(verify=False) == 4


def test_look_leaves_no_count():
    """They had extra entries in steps 1, 8, 16, …, also if the step was refused."""
    rows, model, calls = [], mlp(), 0
    model[0].register_forward_hook(lambda _, args, __: rows.append(len(args[0])))

    def counting(output, targets):
        nonlocal calls
        calls += 1
        return criterion(output, targets)

    with ScatterOnceParallel(model, 3, ["cpu"]) as engine:
        criterion = Counts("sum")
        with pytest.raises(ValueError, match="reduction="):
            engine.forward_backward(INPUTS, LABELS, counting)
        assert (calls, rows, criterion.numbers()) == (0, [], [0] * 8)
        criterion = Counts()
        engine.forward_backward(INPUTS, LABELS, counting)
        assert (calls, rows, criterion.numbers()) == (3, [8] * 3, [3] * 8)


@pytest.mark.filterwarnings("error")
def test_large_written_tensor_warns_once():
    large = torch.zeros(2**23 + 1, dtype=torch.float64)

    def criterion(output, targets):
        large[0] += 1
        return F.mse_loss(output, targets)

    with ScatterOnceParallel(mlp(), 2, ["cpu"]) as engine:
        with pytest.warns(UserWarning, match="writes a tensor of shape .*above 64 MiB"):
            engine.forward_backward(INPUTS, VALUES, criterion)
        engine.forward_backward(INPUTS, VALUES, criterion)


# --- false alarms ---


def own_mean(output, targets):
    return F.mse_loss(output, targets)


def test_look_adds_no_torch_warnings(devices):
    """Targets that are broadcast: once per sub-step is what plain torch says, too."""
    engine = ScatterOnceParallel(mlp(), 3, devices(2))
    with engine, warnings.catch_warnings(record=True, action="always") as caught:
        engine.forward_backward(INPUTS, VALUES[:, :1], own_mean)
    assert ["target size" in str(each.message) for each in caught] == [True] * 6
