"""Nested values, their atoms, and values of the same structure put together."""

from __future__ import annotations

from collections import ChainMap, UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import pytest
import torch

from scatterpar.batch import nested

pytestmark = pytest.mark.core

A, B, C = torch.tensor([1.0]), torch.tensor([2.0, 3.0]), torch.tensor([4.0])


class Pair(NamedTuple):
    left: object
    right: object


@dataclass(frozen=True)
class Boxes:
    corners: object
    name: str = "boxes"

    @cached_property
    def doubled(self):
        return 2 * self.corners


VALUE = {"a": A, "b": (B, [C, 7]), "c": Pair("text", Boxes(1.5))}
LEAVES = [A, B, C, 7, "text", 1.5, "boxes"]


def test_atoms_in_written_order():
    found = nested.atoms(VALUE)
    assert [id(atom) for atom in found] == [id(atom) for atom in LEAVES]


def test_containers_before_their_atoms():
    inner = [C, 7]
    found = nested.with_contents({"b": inner})
    assert found == [{"b": inner}, inner, C, 7]


def test_tensors_leaves_other_atoms_out():
    found = nested.tensors(VALUE)
    assert [id(tensor) for tensor in found] == [id(A), id(B), id(C)]


def test_flatten_rebuilds_with_other_atoms():
    atoms, build = nested.flatten(VALUE)
    assert [id(atom) for atom in atoms] == [id(atom) for atom in LEAVES]
    numbered = build(iter(range(len(atoms))))
    assert numbered == {"a": 0, "b": (1, [2, 3]), "c": Pair(4, Boxes(5, 6))}


def test_map_tensors_leaves_other_atoms():
    lengths = nested.map_tensors(len, VALUE)
    assert lengths == {"a": 1, "b": (2, [1, 7]), "c": Pair("text", Boxes(1.5))}


def test_map_atoms_leaves_callers_containers():
    value = {"a": [1, 2]}
    assert nested.map_atoms(lambda atom: -atom, value) == {"a": [-1, -2]}
    assert value == {"a": [1, 2]}


def test_merge_adds_leaf_by_leaf():
    values = [{"a": 1, "b": (2, Pair(3, 4))}, {"b": (20, Pair(30, 40)), "a": 10}]
    assert nested.merge(sum, values) == {"a": 11, "b": (22, Pair(33, 44))}


def test_merge_passes_other_structures_on():
    assert nested.merge(list, [(1, [2]), (3, [4, 5])]) == ([1, 3], [[2], [4, 5]])


def test_merge_of_other_keys_refused():
    with pytest.raises(ValueError, match=r"\['a'\] and \['b'\]; return mappings"):
        nested.merge(sum, [{"a": 1}, {"b": 1}])


def test_cached_property_computed_again():
    boxes = Boxes(3)
    assert boxes.doubled == 6
    assert nested.map_atoms(lambda _: 5, boxes).doubled == 10
    assert boxes.doubled == 6


def test_subclasses_keep_class_and_attributes():
    class Polygon(list):
        pass

    polygon = Polygon([1, 2])
    polygon.colour = "red"
    found = nested.map_atoms(lambda atom: atom + 1, polygon)
    assert type(found) is Polygon
    assert found == [2, 3]
    assert found.colour == "red"
    largest = nested.map_tensors(len, torch.max(torch.ones(4, 2), 0))
    assert type(largest) is torch.return_types.max
    assert tuple(largest) == (2, 2)


def test_mapping_iterating_rows_refused():
    class Table(dict):
        def __iter__(self):
            return iter([{"x": 1}])

    with pytest.raises(TypeError, match="a Table iterates over its rows"):
        nested.atoms(Table(x=1))


def test_walk_ends_at_depth_and_number():
    """Values that raise are passed over."""
    lists = [1, [2, [3, [4]]]]

    def entries(value):
        if isinstance(value, list):
            return value
        raise AttributeError("a user's object")

    found = nested.walk([lists], entries, depth=2)
    assert [value for value in found if type(value) is int] == [1, 2]
    assert len(nested.walk([lists], entries, depth=9)) == 8
    assert len(nested.walk([lists, object()], entries, depth=9, max_values=3)) == 3


def test_walk_meets_a_ring_once():
    ring = [1]
    ring.append(ring)
    assert nested.walk([ring], list, depth=50) == [ring, 1]


class Frozen(Mapping):
    """Its copy is itself."""

    def __init__(self, values):
        self._values = dict(values)

    def __copy__(self):
        return self

    def __getitem__(self, key):
        return self._values[key]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)


class Described(UserDict):
    """Has another dictionary with the same keys."""

    def __init__(self, values):
        super().__init__(values)
        self.units = {"a": "metres"}


MAPPINGS = [Frozen({"a": A}), ChainMap({"a": A}), Described({"a": A})]


@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda each: type(each).__name__)
def test_mappings_with_a_copy_of_their_own(mapping):
    """A batch was cut to one share; a ``ChainMap`` became a ``dict``."""
    made = nested.map_tensors(lambda _: B, mapping)
    assert made["a"] is B
    assert mapping["a"] is A
    assert type(made) is (dict if isinstance(mapping, Frozen) else type(mapping))
    assert getattr(made, "units", None) == getattr(mapping, "units", None)


def test_value_that_contains_itself():
    """It was followed for ever, and Ctrl-C did not end that."""
    value = {"a": A}
    value["self"] = value
    with pytest.raises(RecursionError):
        nested.with_contents(value)


def test_paths_lead_to_tensors():
    first, second = torch.ones(2), torch.zeros(3)
    value = (1, [first, {"a": "b", "c": second}])
    paths = nested.paths_of_tensors(value)
    assert [nested.part_at(value, path) for path in paths] == nested.tensors(value)
    assert paths == [(1, 0), (1, 1, 1)]
