"""A snapshot of containers tells what was rebound, and puts it back."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

import pytest
import torch

from scatterpar.objects.snapshot import Snapshot

pytestmark = pytest.mark.core


def containers():
    tensor = torch.ones(2)
    return [
        {"a": 1, "b": tensor, "c": "word"},
        OrderedDict({tensor: "by tensor", torch.ones(2): "by another"}),
        [tensor, 1],
        deque([tensor]),
        {1, 2},
        {},
    ]


CHANGES = {
    "a value": lambda c: c[0].update(a=2),
    "a key": lambda c: c[0].update(d=2),
    "a missing key": lambda c: c[0].pop("b"),
    "a tensor for an equal one": lambda c: c[0].update(b=torch.ones(2)),
    "a key that is a tensor": lambda c: c[1].update({torch.ones(2): 1}),
    "a list": lambda c: c[2].append(3),
    "a deque": lambda c: c[3].clear(),
    "a set": lambda c: c[4].add(3),
    "an empty one": lambda c: c[5].update(x=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_noticed_and_restored(change):
    watched = containers()
    earlier = [
        list(one.items()) if isinstance(one, dict) else list(one) for one in watched
    ]
    snapshot = Snapshot(watched)
    assert snapshot.unchanged()
    CHANGES[change](watched)
    assert not snapshot.unchanged()
    snapshot.restore()
    assert snapshot.unchanged()
    for one, before in zip(watched, earlier, strict=True):
        now = list(one.items()) if isinstance(one, dict) else list(one)
        pairs = zip(now, before, strict=True)
        assert all(
            new is old or new == old for new, old in pairs if one is not watched[1]
        )


def refused(*_):
    raise TypeError("an entry stays")


class Registry(dict):
    """Its entries are set once, and stay."""

    clear = update = refused

    def __setitem__(self, key, value):
        assert key not in self
        super().__setitem__(key, value)


class Recent(OrderedDict):
    """The latest entry is the first."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.move_to_end(key, last=False)


class Last(list):
    """The last three entries."""

    clear = extend = refused

    def append(self, value):
        super().append(value)
        del self[:-3]


class Marks(set):
    clear = update = refused


class Steps(deque):
    clear = extend = refused


# A container with methods of its own, and how a call writes it.
SUBCLASSES = {
    "dict": (Registry(a=1), lambda c: c.__setitem__("b", 2)),
    "ordered dict": (Recent([("a", 1), ("b", 2)]), lambda c: c.__setitem__("a", 3)),
    "counter": (Counter("aab"), lambda c: c.update("b")),
    "list": (Last([1, 2, 3]), lambda c: c.append(4)),
    "set": (Marks([1]), lambda c: c.add(2)),
    "deque": (Steps([1, 2], maxlen=2), lambda c: c.append(3)),
}


@pytest.mark.parametrize("name", SUBCLASSES)
def test_contents_restored_past_own_methods(name):
    """A look raised what such a method raises, or put other contents back."""
    container, change = SUBCLASSES[name]
    before = repr(container)
    snapshot = Snapshot([container])
    for _ in range(2):
        change(container)
        assert repr(container) != before
        snapshot.restore()
        assert repr(container) == before
        assert snapshot.unchanged()


def test_only_plain_values_are_copied():
    watched = containers()
    snapshot = Snapshot(watched)
    watched[0]["a"] = 5
    changes = snapshot.value_changes()
    assert changes == [(0, 0, "a", 5)]
    snapshot.apply_changes(changes)
    assert snapshot.unchanged()
    watched[0]["b"] = torch.ones(2)
    assert snapshot.value_changes() is None


def test_flags_are_switches_only():
    watched = [{"training": True, "rate": 0.1}]
    snapshot = Snapshot(watched)
    flags = snapshot.flags()
    watched[0]["rate"] = 0.2
    snapshot.apply_changes(snapshot.value_changes())
    assert snapshot.flags() == flags
    watched[0]["training"] = False
    snapshot.apply_changes(snapshot.value_changes())
    assert snapshot.flags() != flags
