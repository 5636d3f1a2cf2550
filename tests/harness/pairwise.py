"""Parameters, and products of them, that are too many to try them all at every run."""

import itertools

import pytest


def pairwise(**factors):
    """Parametrize with a product of which few are run by default, and all with ``-m
    slow``.

    In those few any two values of two factors meet.
    """
    few = all_pairs(factors)
    others = [each for each in itertools.product(*factors.values()) if each not in few]
    slow = [pytest.param(*each, marks=pytest.mark.slow) for each in others]
    return pytest.mark.parametrize(tuple(factors), few + slow)


def few_of(names, quick):
    """Values of a parameter, of which those in ``quick`` are run by default."""
    assert set(quick) <= set(names)
    slow = {name: pytest.param(name, marks=pytest.mark.slow) for name in names}
    return [name if name in quick else slow[name] for name in names]


def all_pairs(factors):
    """Combinations of the product, each time the one that has most pairs not met
    before.
    """
    product = list(itertools.product(*factors.values()))
    missing = set().union(*map(_pairs, product))
    chosen = []
    while missing:
        best = max(product, key=lambda combination: len(missing & _pairs(combination)))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(combination):
    return set(itertools.combinations(enumerate(combination), 2))
