"""Each row of the table: a value is moved, named, and put back."""

from __future__ import annotations

import array
import csv
import io
import itertools
import random
import zipfile
from collections import Counter, OrderedDict, deque
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from scatterpar.objects import savers
from scatterpar.objects.journal import Journal
from scatterpar.objects.walk import Walk

pytestmark = pytest.mark.draws


class Log(list):
    """A list with attributes."""


class Slots:
    __slots__ = ("unset",)


class Numbers(np.random.Generator):
    pass


class OldNumbers(np.random.RandomState):
    pass


class PythonsNumbers(random.Random):
    pass


def log():
    value = Log([1])
    value.calls = 0
    return value


def text():
    value = io.StringIO("first")
    value.seek(0, 2)
    return value


def file_that_is_read():
    return open(__file__, encoding="utf-8")


VIEWED = {"a": 1}


def buffered():
    layer = nn.Module()
    layer.register_buffer("steps", torch.zeros(2))
    return layer


def write_first(value):
    value[0] = 7


def write_all(value):
    value[...] = 7


def with_rows(value):
    value.resize_(4)
    value.fill_(1)


VALUES = {  # what it is, how a call moves it, what shows that
    "tensor": (lambda: torch.zeros(2), lambda v: v.add_(1), torch.Tensor.tolist),
    "tensor's memory": (
        lambda: torch.zeros(2),
        lambda v: setattr(v, "data", torch.ones(3)),
        torch.Tensor.tolist,
    ),
    "buffer": (buffered, lambda v: v.steps.add_(1), lambda v: v.steps.tolist()),
    "list": (lambda: [1], lambda v: v.append(2), list),
    "long list": (lambda: [1] * 2000, lambda v: v.append(2), len),
    "dict": (lambda: {1: 2}, lambda v: v.clear(), dict),
    "ordered dict": (
        lambda: OrderedDict(a=1, b=2),
        lambda v: v.move_to_end("a"),
        lambda v: [*v],
    ),
    "counter": (lambda: Counter("ab"), lambda v: v.update("b"), dict),
    "set": (lambda: {1}, lambda v: v.add(2), set),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda v: v.append(3), list),
    "list's attributes": (log, lambda v: setattr(v, "calls", 1), lambda v: v.calls),
    "unset slot": (
        Slots,
        lambda v: setattr(v, "unset", 1),
        lambda v: hasattr(v, "unset"),
    ),
    "array": (lambda: np.zeros(2), write_all, np.ndarray.tolist),
    "array of NaN": (lambda: np.full(2, np.nan), write_all, repr),
    "array of objects": (
        lambda: np.array([None, []], object),
        write_all,
        np.ndarray.tolist,
    ),
    "bytes": (lambda: bytearray(b"ab"), lambda v: v.extend(b"c"), bytes),
    "view": (lambda: memoryview(bytearray(4)), write_first, bytes),
    "view of a class": (
        lambda: memoryview(array.array("d", [1, 2])),
        write_first,
        memoryview.tolist,
    ),
    "list in an array": (
        lambda: np.array([[1], None], object),
        lambda v: v[0].append(2),
        repr,
    ),
    "view of a dictionary": (
        lambda: MappingProxyType(VIEWED),
        lambda v: VIEWED.update(a=7),
        dict,
    ),
    "values of a dictionary": (
        lambda: {"a": [1]}.values(),
        lambda v: next(iter(v)).append(2),
        repr,
    ),
    "array of bytes": (lambda: array.array("d", [1]), lambda v: v.append(2), list),
    "text": (text, lambda v: v.write("second"), lambda v: (v.getvalue(), v.tell())),
    "bytes in memory": (
        lambda: io.BytesIO(b"ab"),
        lambda v: v.write(b"c"),
        io.BytesIO.getvalue,
    ),
    "file that is read": (file_that_is_read, lambda v: v.read(3), lambda v: v.tell()),
    "Python's numbers": (
        lambda: random.Random(0),
        lambda v: v.random(),
        lambda v: v.getstate(),
    ),
    "torch's numbers": (
        torch.Generator,
        lambda v: torch.rand(1, generator=v),
        lambda v: v.get_state().tolist(),
    ),
    "NumPy's numbers": (
        lambda: np.random.default_rng(0),
        lambda v: v.random(),
        lambda v: str(v.bit_generator.state),
    ),
    "NumPy's numbers of a subclass": (
        lambda: Numbers(np.random.PCG64(0)),
        lambda v: v.random(),
        lambda v: str(v.bit_generator.state),
    ),
    "NumPy's older numbers of a subclass": (
        lambda: OldNumbers(0),
        lambda v: v.rand(),
        lambda v: str(v.get_state()),
    ),
    "NumPy's seeds": (
        lambda: np.random.SeedSequence(0),
        lambda v: v.spawn(1),
        lambda v: v.n_children_spawned,
    ),
    "NumPy's seeds in a generator": (
        lambda: np.random.default_rng(0),
        lambda v: v.spawn(1),
        lambda v: v.bit_generator.seed_seq.n_children_spawned,
    ),
    "NumPy's bits": (
        lambda: np.random.Philox(0),
        lambda v: v.random_raw(),
        lambda v: str(v.state),
    ),
    "Python's numbers of a subclass": (
        lambda: PythonsNumbers(0),
        lambda v: v.gauss(),
        lambda v: v.getstate(),
    ),
    "NumPy's older numbers": (
        lambda: np.random.RandomState(0),
        lambda v: v.rand(),
        lambda v: str(v.get_state()),
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_value_is_put_back(name):
    make, move, shown = VALUES[name]
    value = make()
    before = shown(value)
    journal = Journal(Walk([[value]]))
    for _ in range(2):
        move(value)
        assert shown(value) != before
        is_generator = any(saved.value is value for saved in journal._generators)
        journal.restore()
        assert shown(value) == before
        assert journal.drawn == is_generator
    getattr(value, "close", int)()


class Stream:
    """An iterator of the user, with a method of the name of an array's attribute."""

    position = 0

    def __next__(self):
        self.position += 1
        return self.position

    def nbytes(self):
        raise AssertionError("only an array is asked for its size")


def test_iterator_of_user_is_saved_by_its_attributes():
    stream = Stream()
    journal = Journal(Walk([[stream]]))
    assert journal.unsaved == []
    next(stream)
    journal.restore()
    assert next(stream) == 1


class Setter:
    """Its method is code of the user's, which a look does not call."""

    __slots__ = ("number",)

    def __setstate__(self, state):
        raise AssertionError("slots are put back one by one")


def test_slots_are_set_back_without_users_code():
    setter = Setter()
    setter.number = 1
    journal = Journal(Walk([[setter]]))
    setter.number = 2
    journal.restore()
    assert (setter.number, journal.unsaved) == (1, [])


def test_only_large_arrays_are_data(monkeypatch):
    monkeypatch.setattr("scatterpar.objects.journal._MAX_SAVED_BYTES", 4)
    values = [np.zeros(2), bytearray(8), io.BytesIO(b"12345678")]
    journal = Journal(Walk([values]))
    assert [saved.value for saved in journal._values] == values[2:]


@pytest.mark.skipif(
    not hasattr(np.dtypes, "StringDType"), reason="NumPy 2 has arrays of strings"
)
def test_strings_are_put_back():
    """One of the same length is written in place."""
    strings = np.array(["a" * 100, "b"], np.dtypes.StringDType())
    constant = strings.copy()
    constant.flags.writeable = False
    journal = Journal(Walk([[strings, constant]]))
    strings[0] = "c" * 100
    journal.restore()
    assert strings.tolist() == constant.tolist() == ["a" * 100, "b"]


def test_each_row_has_a_value():
    values = [make() for make, _, _ in VALUES.values()]
    values += [iter([1]), csv.writer(io.StringIO())]
    assert {*savers.SAVERS} <= {savers.saver_of(type(value)) for value in values}


# What has no memory to save, or memory whose pointers may lead nowhere later.
LEFT_ALONE = {
    "constant view": lambda: memoryview(b"ab"),
    "released view": lambda: released(memoryview(bytearray(2))),
    "empty view": lambda: memoryview(bytearray()),
}


def released(view):
    view.release()
    return view


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_memory_with_pointers_is_left_alone(name):
    journal = Journal(Walk([[LEFT_ALONE[name]()]]))
    assert journal.unsaved == []
    journal.restore()
    assert not journal.drawn


def test_view_with_gaps_cannot_be_saved():
    view = memoryview(bytearray(4))[::2]
    assert Journal(Walk([[view]])).unsaved == ["[0] (memoryview)"]


def test_file_in_an_archive_cannot_be_copied(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a", "text")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive, archive.open("a") as file:
        journal = Journal(Walk([[file]]))
        file.read(2)
        journal.restore()
        assert file.read() == b"text"


@pytest.mark.parametrize(
    "make", [lambda: iter([1, 2]), itertools.count, lambda: zip([1], [2], strict=True)]
)
def test_iterator_cannot_be_saved(make):
    with pytest.raises(savers.CannotSaveError):
        savers.saver_of(type(make()))(make())


def test_file_that_is_written_cannot_be_saved(tmp_path):
    with open(tmp_path / "a", "w") as file, pytest.raises(savers.CannotSaveError):
        savers.saver_of(type(file))(file)


@pytest.mark.parametrize(
    ("module", "is_saved"), [("torchlike.seeds", True), ("torch.seeds", False)]
)
def test_packages_told_by_whole_names(module, is_saved):
    """What begins like the name of a library is the user's."""
    namespace = {"__slots__": (), "__module__": module}
    kind = type("Seeds", (np.random.SeedSequence,), namespace)
    assert (savers.saver_of(kind) is savers._OwnState) == is_saved


def test_set_state_of_others_is_no_generator():
    namespace = {"set_state": None, "__module__": "of_numpy.random_rows"}
    assert savers.saver_of(type("Rows", (), namespace)) is None


def test_sequence_of_seeds_stays_shared():
    """A generator that was put back had a copy of it."""
    seeds = np.random.SeedSequence(0)
    numbers = np.random.default_rng(seeds)
    journal = Journal(Walk([[numbers]]))
    numbers.random()
    journal.restore()
    assert numbers.bit_generator.seed_seq is seeds
