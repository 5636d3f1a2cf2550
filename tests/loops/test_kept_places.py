"""Places that lead to tensors, kept while calls write plain values."""

from __future__ import annotations

import types
import weakref

import pytest
import torch
from harness.models import FEATURES
from torch import nn

from scatterpar.loops import kept_places
from scatterpar.loops.kept_places import KeptPlaces

pytestmark = pytest.mark.draws


class Owner:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(FEATURES, 2), nn.Linear(2, 1))
        self.first = self.net[0].weight
        self.pairs = [(0, (self.first, 1))]
        self.reference = weakref.ref(self.first)
        self.losses = []
        self.helper = types.SimpleNamespace(count=0)


def kept(owner):
    return KeptPlaces([owner]), KeptPlaces([*owner.net.modules()])


def values(places):
    return {id(place.value) for place in places.places}


def test_places_lead_to_tensors_alone():
    owner = Owner()
    of_owner, of_modules = kept(owner)
    names = {place.key for place in of_owner.places}
    assert names == {"first", "reference", 0}
    assert {id(p) for p in owner.net.parameters()} <= values(of_modules)
    assert id(owner.pairs[0]) in of_owner.made_of_others
    assert id(owner.pairs[0][1]) in of_owner.made_of_others


def test_tuple_in_tuples_that_are_found_later():
    """What leads to a tensor is searched again until nothing is added."""
    owner = Owner()
    owner.pair = (owner.first, 1)
    owner.deeper = [[(owner.pair, 2)]]
    of_owner, _ = kept(owner)
    assert id(owner.deeper[0][0]) in of_owner.made_of_others
    assert any(place.holder is owner.deeper[0] for place in of_owner.places)


def test_unchanged_places_are_not_searched_again(monkeypatch):
    owner = Owner()
    for places in kept(owner):
        before = places.places
        assert not places.update()
        assert places.places is before


def test_changed_places_are_found():
    owner = Owner()
    of_owner, of_modules = kept(owner)
    owner.losses.append(1.0)
    owner.helper.count += 1
    owner.best = owner.net[1].bias
    assert of_owner.update()
    assert id(owner.net[1].bias) in values(of_owner)
    assert not of_modules.update()
    owner.net[0].kept = [owner.first]
    assert of_modules.update()
    assert any(container is vars(owner.net[0]) for container in of_modules.changed)
    assert any(place.holder is owner.net[0].kept for place in of_modules.places)
    del owner.net[0].kept
    assert of_modules.update()
    assert not any(place.key == 0 for place in of_modules.places)


def test_what_changes_each_time_is_remembered_alone(monkeypatch):
    """A counter of the owner made all its modules be read and remembered again."""
    sizes = []

    class Counted(kept_places.Snapshot):
        def __init__(self, containers):
            super().__init__(containers)
            sizes.append(len(self._containers))

    monkeypatch.setattr(kept_places, "Snapshot", Counted)
    owner = Owner()
    places = KeptPlaces([owner, *owner.net.modules()])
    whole = max(sizes)
    owner.helper.count += 1
    assert places.update()
    del sizes[:]
    for _ in range(3):
        owner.helper.count += 1
        assert places.update()
    assert 0 < max(sizes) < whole / 2
    # What is remembered from the beginning is read, too.
    owner.net[1].bias = nn.Parameter(torch.zeros(1))
    assert places.update()
    assert id(owner.net[1].bias) in values(places)
    assert not places.update()


def test_container_of_two_roots_is_found_from_both():
    """Also if one of them has changed before."""
    first = types.SimpleNamespace(shared=[], own=0)
    second = types.SimpleNamespace(shared=first.shared)
    places = KeptPlaces([first, second])
    first.own = 1
    assert places.update()
    first.shared.append(torch.zeros(1))
    assert places.update()
    assert [place.value for place in places.places] == 2 * first.shared
    first.shared.clear()
    assert places.update()
    assert not places.places


def test_new_modules_are_entered():
    owner = Owner()
    of_owner, of_modules = kept(owner)
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    owner.net[1] = made
    assert of_modules.update()
    assert {id(p) for p in made.parameters()} <= values(of_modules)
    assert {*map(id, of_modules.created)} == {*map(id, made[0].parameters())}
    owner.other = nn.Linear(1, 1)
    assert of_owner.update()
    assert id(owner.other.weight) in values(of_owner)


def test_containers_with_tensors_as_keys_are_found():
    owner = Owner()
    owner.rates = {owner.first: 1.0}
    owner.ids = {id(owner.first)}
    owner.names = {"a": 1, 3: 2}
    state = {}
    places = KeptPlaces([owner], keyed=[state, None])
    found = {*map(id, places.keyed)}
    assert found == {id(owner.rates), id(owner.ids), id(state)}


def test_variables_are_read():
    total = torch.zeros(1)

    def function():
        return total

    places = KeptPlaces([function])
    assert id(total) in values(places)
    total = torch.ones(1)
    assert places.update()
    assert id(total) in values(places)


TOTAL = torch.zeros(1)


def first():
    return TOTAL


def second():
    return TOTAL


def test_variable_of_two_roots_is_read_for_both(monkeypatch):
    """The other one wrote the earlier value again."""
    places = KeptPlaces([first, second])
    total = torch.ones(1)
    monkeypatch.setitem(globals(), "TOTAL", total)
    assert places.update()
    assert [place.value for place in places.places] == [total] * 2
    assert not places.update()
