"""Numbers that statements add to are sums, and those that they set are not."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from scatterpar.integrations import kept
from scatterpar.integrations.changes import KeptState, apply_changes, standing_in
from scatterpar.integrations.kept import Attribute, Entry
from scatterpar.integrations.statements import Statements

CPU = torch.device("cpu")
VALUES = [1.0, 2.0, 4.0, 8.0]


def average_of(average, value):
    return 0.9 * average + 0.1 * value


class Meter:
    """As in many training scripts."""

    def __init__(self):
        self.value = self.average = self.total = 0.0
        self.count = 0

    def update(self, value, rows):
        self.value = value
        self.total += value * rows
        self.count += rows
        self.average = self.total / self.count


def add_outside(owner, value):
    owner.outside = owner.outside + float(value)


class Owner:
    def __init__(self):
        self.added = self.summed = self.reversed = self.subtracted = 1.0
        self.called = self.named = self.outside = 1.0
        self.tensor, self.in_place = torch.ones(()), torch.ones(())
        self.first = None
        self.sums = {"a": 1.0, "b": 1.0}
        self.counts = Counter()
        self.last = self.scaled = self.largest = self.averaged = 1.0
        self.last_named = self.pair = self.other = 1.0
        self.last_tensor, self.filled = torch.ones(()), torch.ones(())
        self.stats = {"last": 1.0}
        self.found = defaultdict(int)
        self.rows = 3
        self.meter = Meter()

    def add(self, value):
        number = float(value)
        self.added += number
        self.summed = self.summed + number + 0
        self.reversed = number + self.reversed
        self.subtracted = self.subtracted - number
        self.called = float(self.called + value)
        setattr(self, "named", getattr(self, "named") + number)  # noqa: B009, B010
        self.tensor = torch.add(self.tensor, value).detach()
        self.in_place.add_(value)
        self.first = value if self.first is None else self.first + value
        self.sums["a"] += number
        name = "b"
        self.sums[name] = self.sums.get(name, 0) + number
        self.counts[name] += 1
        add_outside(self, value)

    def set(self, value):
        self.last = float(value)
        self.scaled *= float(value)
        self.largest = max(self.largest, float(value))
        self.averaged = average_of(self.averaged, float(value))
        setattr(self, "last_named", float(value))  # noqa: B010
        self.pair, self.other = float(value), -float(value)
        self.last_tensor = value.detach()
        self.filled.copy_(value)
        self.stats["last"] = float(value)
        self.found["a"] = int(value)

    def set_the_same(self, value):
        self.rows = 4
        self.last_tensor = torch.tensor(2.0)

    def measure(self, value):
        self.meter.update(float(value), 2)


def applied(call, values=VALUES, kind=Owner):
    """The owner after calls with each of these values, and the places told."""
    owner, told, changes = kind(), [], []
    statements = Statements(owner)
    for value in values:
        copies = kept.CallCopies(CPU)
        with standing_in(owner, (), copies, {}, in_place=False) as stand_in:
            state = KeptState(stand_in, (), statements)
            call(stand_in, torch.tensor(value))
            changes.append(state.changes())
    apply_changes(owner, changes, CPU, told.append)
    return owner, told


def test_numbers_added_are_summed():
    owner, told = applied(Owner.add)
    total = 1 + sum(VALUES)
    added = {"added", "summed", "reversed", "called", "named", "outside"}
    assert {name: getattr(owner, name) for name in added} == dict.fromkeys(added, total)
    assert owner.subtracted == 1 - sum(VALUES)
    assert owner.tensor == owner.in_place == total
    assert owner.sums == {"a": total, "b": total}
    assert owner.counts == {"b": 4}
    assert owner.first == sum(VALUES)
    assert not told


class Begins:
    """Has no values of sums yet, but says what they begin with."""

    of_class = 2
    class_none = None

    def __init__(self):
        self.sums = {}
        self.unset = None

    def add(self, value):
        number = float(value)
        self.calls = getattr(self, "calls", 0) + 1
        self.tensor = value + getattr(self, "tensor", 1.0)
        self.__dict__.setdefault("defaulted", 3)
        self.defaulted += number
        vars(self)["entry"] = vars(self).get("entry", 1) + number
        if not hasattr(self, "checked"):
            self.checked = 0
        self.checked += 1
        self.of_class += number
        total = self.class_none
        self.class_none = number if total is None else self.class_none + number
        if self.unset is None:
            self.unset = number
        else:
            self.unset += number
        self.sums["calls"] = self.sums.get("calls", 0) + 1
        self.sums.setdefault("rows", 5)
        self.sums["rows"] += 2
        self.made = getattr(self, "made", {})
        self.made["calls"] = self.made.get("calls", 0) + 1
        self.histogram = self.histogram_of(3) + torch.tensor([1, 0, number])
        self.counts = getattr(self, "counts", 0) + torch.tensor([0, number])

    def histogram_of(self, size):
        return getattr(self, "histogram", torch.zeros(size))


def test_sums_begin_as_stated():
    owner, told = applied(Begins.add, kind=Begins)
    stock = Begins()
    for value in VALUES:
        Begins.add(stock, torch.tensor(value))
    same = [*vars(stock).keys() - {"histogram", "counts"}]
    assert len(same) == 10
    assert [getattr(owner, name) for name in same] == [vars(stock)[n] for n in same]
    assert torch.equal(owner.counts, stock.counts)
    assert told == ["self.histogram"]  # what it begins with does not show
    assert not hasattr(owner, "histogram")


class Unclear:
    """Its sums begin with what no statement shows."""

    offset = 4

    def add(self, value):
        self.calls = getattr(self, "calls", self.offset) + 1


def test_sum_with_unknown_start_told():
    owner, told = applied(Unclear.add, [1.0, 2.0], Unclear)
    assert (told, vars(owner)) == (["self.calls"], {})


class Histograms:
    """Tensors with dimensions: some are added to, of others entries are set."""

    def __init__(self):
        self.of_labels, self.summed = torch.zeros(3), torch.zeros(2, 2)
        self.by_entry, self.queue = torch.zeros(3), torch.zeros(9)
        self.scattered, self.average = torch.zeros(3), torch.zeros(3)

    def add(self, value):
        number = int(value) % 3
        self.of_labels += torch.bincount(torch.tensor([number]), minlength=3)
        self.summed = self.summed + torch.ones(2, 2)
        self.by_entry[number] += 1
        self.scattered.index_add_(0, torch.tensor([number]), torch.ones(1))
        self.queue[int(value)] = value
        self.average = 0.9 * self.average + 0.1 * torch.ones(3)


def test_added_tensors_are_summed():
    owner, told = applied(Histograms.add, [*VALUES, 5.0], Histograms)
    for name in ("of_labels", "by_entry", "scattered"):
        assert getattr(owner, name).tolist() == [0, 2, 3], name
    assert owner.summed.tolist() == [[5, 5], [5, 5]]
    assert told == ["self.queue"]


def test_numbers_set_told_by_name_and_stay():
    owner, told = applied(Owner.set)
    names = ["last", "scaled", "largest", "averaged", "last_named", "pair", "other"]
    names += ["last_tensor", "filled", "stats['last']", "found['a']"]
    assert sorted(told) == sorted(f"self.{name}" for name in names)
    before = Owner()
    for name in [*names[:9], "stats", "found"]:
        assert getattr(owner, name) == getattr(before, name), name


def test_equal_values_of_calls_are_set():
    owner, told = applied(Owner.set_the_same)
    assert not told
    assert (owner.rows, owner.last_tensor) == (4, 2.0)


def test_value_set_by_only_call_is_set():
    owner, told = applied(Owner.set, [4.0])
    assert not told
    assert (owner.last, owner.stats, owner.filled) == (4.0, {"last": 4.0}, 4.0)


def test_meter_sums_sums_and_tells_means():
    owner, told = applied(Owner.measure)
    assert told == ["self.meter.value", "self.meter.average"]
    assert (owner.meter.total, owner.meter.count) == (30.0, 8)


def test_number_without_source_is_a_sum():
    space = {}
    exec("class Made:\n    def step(self, value): self.last = float(value)", space)
    statements = Statements(space["Made"]())
    assert not statements.sets((Attribute("last"),))


@pytest.mark.parametrize(
    ("path", "is_set"),
    [
        ((Attribute("stats"), Entry("last")), True),
        ((Attribute("stats"), Entry("unknown")), False),
        ((Attribute("sums"), Entry("any")), False),
        ((Attribute("found"), Entry("a")), True),
        ((Attribute("meter"), Attribute("average")), True),
        ((Attribute("meter"), Attribute("count")), False),
    ],
)
def test_places_are_found_by_names(path, is_set):
    assert Statements(Owner()).sets(path) is is_set


class Grows:
    """Keeps arrays, tuples and texts to which its steps append or add."""

    def __init__(self):
        self.table, self.rows = np.zeros(9), np.zeros(0)
        self.joined, self.all_rows = torch.zeros(0), None
        self.names, self.text, self.frozen = (), "", frozenset()
        self.of_numpy = 1.0
        self.center, self.shape = torch.zeros(0), ()

    def grow(self, value):
        number = int(value)
        self.table[number] += 1
        self.rows = np.append(self.rows, number)
        self.joined = torch.cat([self.joined, value[None]])
        if self.all_rows is None:
            self.all_rows = value[None]
        else:
            self.all_rows = torch.cat([self.all_rows, value[None]])
        self.names += (number,)
        self.text += f"{number},"
        self.frozen |= {number}
        self.of_numpy += np.float64(number)

    def set(self, value):
        self.center = value[None]
        self.shape = (int(value),)


def test_arrays_and_texts_are_joined():
    """Arrays of NumPy had what looks added; tensors and tuples stayed as they were."""
    owner, told = applied(Grows.grow, kind=Grows)
    assert not told
    assert owner.table.tolist() == [0, 1, 1, 0, 1, 0, 0, 0, 1]
    assert owner.joined.tolist() == owner.all_rows.tolist() == VALUES
    assert owner.rows.tolist() == list(owner.names) == VALUES
    assert (owner.text, owner.frozen) == ("1,2,4,8,", {*VALUES})
    assert owner.of_numpy == 1 + sum(VALUES)


def test_new_arrays_and_tuples_are_told():
    owner, told = applied(Grows.set, kind=Grows)
    assert told == ["self.center", "self.shape"]
    assert (len(owner.center), owner.shape) == (0, ())
