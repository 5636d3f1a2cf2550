"""Numbers that statements add to are sums, and those that they set are not."""

from __future__ import annotations

from collections import Counter, defaultdict

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


def applied(call, values=VALUES):
    """The owner after calls with each of these values, and the places told."""
    owner, told, changes = Owner(), [], []
    statements = Statements(owner)
    for value in values:
        copies = kept.CallCopies(CPU)
        with standing_in(owner, (), copies, {}, in_place=False) as stand_in:
            state = KeptState(stand_in, (), statements.sets)
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
    # the first value of several is told: whether they add up does not show
    assert told == ["self.first"]


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
