"""Parameters, and products of them, that are too many to try them all at every run."""

import itertools

import pytest


def pairwise(quick=None, **factors):
    """Parametrize with a product of which few are run by default, and all with ``-m
    slow``.

    In those few any two values of two factors meet; of a factor in ``quick`` the values
    that it names alone.
    """
    parameters = all_pairs(factors | (quick or {}))
    in_default_run = set(parameters)
    for values in itertools.product(*factors.values()):
        if values not in in_default_run:
            parameters.append(pytest.param(*values, marks=pytest.mark.slow))
    return pytest.mark.parametrize(tuple(factors), parameters)


def few_of(names, quick, contract=()):
    """Values of a parameter, of which those in ``quick`` are run by default.

    Those in ``contract`` belong to the short run of promises, too.
    """
    assert {*quick, *contract} <= set(names)
    parameters = []
    for name in names:
        marks = [] if name in quick else [pytest.mark.slow]
        if name in contract:
            marks.append(pytest.mark.contract)
        parameters.append(pytest.param(name, marks=marks))
    return parameters


def all_pairs(factors):
    """Combinations of the product, each time the one that has most pairs not met
    before.
    """
    product = list(itertools.product(*factors.values()))
    missing = set()
    for combination in product:
        missing |= _pairs(combination)

    def num_new_pairs(combination):
        return len(missing & _pairs(combination))

    chosen = []
    while missing:
        best = max(product, key=num_new_pairs)
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(combination):
    return set(itertools.combinations(enumerate(combination), 2))
