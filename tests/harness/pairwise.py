"""Products of parameters that are too many to try them all at every run."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import pytest

Combination = tuple[Any, ...]


def pairwise(**factors: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrize with a product of which few are run by default, and all with ``-m slow``.

    In those few any two values of two factors meet.
    """
    chosen = all_pairs(factors)
    few = [pytest.param(*combination) for combination in chosen]
    others = [
        pytest.param(*combination, marks=pytest.mark.slow)
        for combination in itertools.product(*factors.values())
        if combination not in chosen
    ]
    return pytest.mark.parametrize(tuple(factors), [*few, *others])


def all_pairs(factors: Mapping[str, Collection[Any]]) -> list[Combination]:
    """Combinations of the product, each time the one that has most pairs not met before."""
    product = list(itertools.product(*factors.values()))
    missing = set().union(*map(_pairs, product))
    chosen = []
    while missing:
        best = max(product, key=lambda combination: len(missing & _pairs(combination)))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(combination: Combination) -> set[Any]:
    return set(itertools.combinations(enumerate(combination), 2))
