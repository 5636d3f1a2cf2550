"""Whole or not at all: every fault, at every place, in first, middle and last sub-steps.

All combinations of a layout share one process; what a hanging one keeps from running has failed.
Without ``-m slow`` each place meets each kind and each moment on one of two layouts.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest

from faults.grid import LAYOUTS, UNDER_A_LOCK
from faults.kinds import KINDS
from faults.places import PLACES
from faults.processes import finish_all, start, start_forked

pytestmark = pytest.mark.core

MOMENTS = [
    *(f"replica {replica}, sub-step {number}" for replica in (0, 2) for number in (0, 1, 2)),
    "all replicas at once",
]
LAYOUTS_TRIED = ["shared", "virtual", pytest.param("accelerator", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=["pairs", pytest.param("all", marks=pytest.mark.slow)])
def extent(request):
    return request.param


@pytest.fixture(scope="module")
def found(request, extent):
    """What was tried on each layout, all at once; on the simulated accelerator if it can be built.

    It is loaded into an interpreter that has imported nothing yet.
    """
    scripts = {name: ("-m", "faults.grid", name, extent) for name in LAYOUTS}
    there = {n: start_forked(*script) for n, script in scripts.items() if n != "accelerator"}
    if extent == "all" and (built := request.getfixturevalue("simulated_accelerator")):
        there["accelerator"] = start(*scripts["accelerator"], **built)

    def results(outcome):
        lines = [line for line in outcome.out.splitlines() if line.startswith("{")]
        return [json.loads(line) for line in lines], outcome

    return {layout: results(outcome) for layout, outcome in finish_all(there).items()}


def of(found, layout):
    if layout not in found:
        pytest.skip("tried with -m slow, and where there is g++ to build the simulated accelerator")
    return found[layout]


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS_TRIED)
def test_nothing_changes_and_the_next_step_is_exact(found, layout, name):
    results, outcome = of(found, layout)
    mine = [result for result in results if result["place"] == name]
    assert mine, f"never came to this place:\n{outcome.err}"
    bad = [result for result in mine if result["wrong"]]
    wrong = [f"{one['kind']} in {one['moment']}: {', '.join(one['wrong'])}" for one in bad]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(mine)} do not hold:", *wrong])


@pytest.mark.parametrize("layout", LAYOUTS_TRIED)
def test_each_combination_was_tried_once_and_the_process_ended(found, layout):
    results, outcome = of(found, layout)
    assert outcome.code == 0
    assert outcome.out.endswith("end\n")
    assert "terminate called" not in outcome.err
    tried = Counter((result["place"], result["kind"], result["moment"]) for result in results)
    assert set(tried.values()) == {1}


def test_each_pair_was_tried_on_one_layout_or_the_other(found, extent):
    each = [results for results, _ in found.values()]
    for results in each if extent == "all" else [list(itertools.chain(*each))]:
        assert _met(results, "place", "kind") == set(itertools.product(PLACES, KINDS))
        assert _met(results, "kind", "moment") >= set(itertools.product(KINDS, MOMENTS))
        for name, place in PLACES.items():
            if not place.counted:
                mine = [result for result in results if result["place"] == name]
                moments = MOMENTS[:-1] if name in UNDER_A_LOCK else MOMENTS
                assert _met(mine, "moment") == {(moment,) for moment in moments}


def _met(results, *names):
    return {tuple(result[name] for name in names) for result in results}
