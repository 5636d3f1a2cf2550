"""Whole or not at all: every fault, at every place, in first, middle and last
sub-steps.

All combinations of a layout share one process; what a hanging one keeps from running
has failed. Without ``-m slow`` each place meets each kind and each moment on one of two
layouts, with it each kind at each moment.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from faults.grid import LAYOUTS
from faults.places import PLACES
from faults.processes import finish, start, start_forked

pytestmark = pytest.mark.core

on_each_layout = pytest.mark.parametrize(
    ("extent", "layout"),
    [
        ("pairs", "shared"),
        ("pairs", "virtual"),
        *(pytest.param("half", name, marks=pytest.mark.slow) for name in LAYOUTS),
    ],
    indirect=["extent"],
    scope="module",
)


@pytest.fixture(scope="module")
def extent(request):
    return request.param


@pytest.fixture(scope="module")
def found(request, extent):
    """What was tried on each layout, all at once; on the simulated accelerator if it
    can be built.

    It is loaded into an interpreter that has imported nothing yet.
    """
    scripts = {name: ("-m", "faults.grid", name, extent) for name in LAYOUTS}
    there = {
        n: start_forked(*script) for n, script in scripts.items() if n != "accelerator"
    }
    if extent == "half" and (built := request.getfixturevalue("simulated_accelerator")):
        there["accelerator"] = start(*scripts["accelerator"], **built)
    with ThreadPoolExecutor() as pool:
        return dict(zip(there, pool.map(finish, there.values()), strict=True))


@pytest.fixture
def outcome(found, layout):
    if layout not in found:
        pytest.skip("there is no g++ to build the simulated accelerator")
    return found[layout]


@pytest.mark.parametrize("name", PLACES)
@on_each_layout
def test_fault_changes_nothing_next_is_exact(outcome, name):
    results = [
        json.loads(line) for line in outcome.out.splitlines() if line.startswith("{")
    ]
    mine = [result for result in results if result["place"] == name]
    assert mine, f"never came to this place:\n{outcome.err}"
    bad = [result for result in mine if result["wrong"]]
    wrong = [
        f"{one['kind']} in {one['moment']}: {', '.join(one['wrong'])}" for one in bad
    ]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(mine)} do not hold:", *wrong])


@on_each_layout
def test_process_ended_after_all_faults(outcome):
    assert outcome.code == 0
    assert outcome.out.endswith("end\n")
    assert "terminate called" not in outcome.err
