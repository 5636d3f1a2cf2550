"""Values that calls have left, and whether somebody has written them since."""

from collections import deque

import pytest
import torch

from scatterpar.objects.left_data import LeftData

WAYS = {
    "itself": lambda tensor: tensor,
    "in a list": lambda tensor: [tensor],
    "in a dict in a tuple": lambda tensor: ({"a": tensor},),
    "in a deque": lambda tensor: deque([tensor]),
}


@pytest.mark.parametrize("way", WAYS)
def test_written_tensor_is_not_as_left(way):
    tensor = torch.zeros(2)
    container = {"left": WAYS[way](tensor)}
    left = LeftData()
    left.remember([(0, container, {})], {})
    assert left.is_as_left()
    tensor += 1
    assert not left.is_as_left()


def test_entry_that_moves_is_remembered():
    first, second = torch.zeros(2), torch.zeros(2)
    container = [first, second]
    left = LeftData()
    left.remember([(0, container, [])], {})
    del container[0]
    left.remember([(0, container, [first, second])], {})
    assert left.is_as_left()
    second += 1
    assert not left.is_as_left()


def test_entry_of_a_build_is_not_remembered():
    found = torch.zeros(2)
    left = LeftData()
    left.remember([(0, [found, torch.zeros(2)], [found])], {})
    found += 1
    assert left.is_as_left()


def test_written_copy_is_not_as_left():
    first, second = torch.zeros(2), torch.zeros(2)
    copied = {"a": [torch.zeros(2)]}
    container = [first]
    left = LeftData()
    left.remember([(0, container, [])], {id(first): [copied]})
    container.append(second)
    left.remember([(0, container, [first])], {id(second): [torch.zeros(2)]})
    assert left.is_as_left()
    copied["a"][0] += 1
    assert not left.is_as_left()
