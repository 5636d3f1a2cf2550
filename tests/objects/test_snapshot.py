"""A snapshot of containers tells what was rebound, and puts it back."""

from __future__ import annotations

from collections import OrderedDict, deque

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


def test_only_plain_values_are_copied():
    watched = containers()
    snapshot = Snapshot(watched)
    watched[0]["a"] = 5
    changes = snapshot.value_changes()
    assert changes == [(0, 0, 5)]
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
