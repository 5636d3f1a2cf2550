"""Modules of every kind, by every way to train them, beside plain torch on one device.

``harness/module_cases.py`` has the modules, ``harness/agree.py`` the comparison.
"""

from __future__ import annotations

import pytest
import torch
from harness.agree import RUNNERS, agree
from harness.module_cases import CASES, KINDS
from harness.rank_processes import run_on_ranks

from scatterpar import ScatterOnceParallel

pytestmark = [
    pytest.mark.usefixtures("one_thread_an_operation"),
    pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*weight_norm.*:FutureWarning"),
]
LAYOUTS = {
    "one memory": ["cpu"] * 3,
    "three memories": ["cpu:0", "cpu:1", "cpu:2"],
    "two memories": ("cpu:1", torch.device("cpu:0"), "cpu:1"),
}
BY_DEFAULT = "two memories"  # one is that of two replicas
ON_RANKS = [
    *("tied", "spectral norm", "own parameters", "frozen and thawed", "changes between steps"),
    *("complex", "conjugates", "negatives", "several dtypes", "half beside double"),
    *("layouts, torch.float64", "unused by some", "gradients in one memory", "a trained criterion"),
    *("a trained buffer", "constant buffers", "overlapping buffer, row"),
    *("bfloat16 beside double", "torch.float16"),
]
COMPILED = ["tied"]  # by default: others take seconds


def runs():
    for name, case in CASES.items():
        for runner in RUNNERS:
            compiles = runner == "compiled" and name not in COMPILED
            for layout in LAYOUTS if runner == "engine" else [BY_DEFAULT]:
                if runner not in case.unless:
                    marks = pytest.mark.slow if compiles or layout != BY_DEFAULT else []
                    yield pytest.param(name, runner, layout, marks=marks)


@pytest.mark.parametrize(("name", "runner", "layout"), list(runs()))
def test_it_is_as_on_one_device(name, runner, layout):
    agree(CASES[name], runner, LAYOUTS[layout])


def on_a_rank(group, name):
    return agree(CASES[name], "engine", ["cpu:0", "cpu:1"], group)


@pytest.mark.parametrize(("size", "name"), [(1, "tied"), (3, "tied"), *((2, n) for n in ON_RANKS)])
def test_ranks_are_as_one_device(size, name):
    first, *others = run_on_ranks(size, on_a_rank, name)
    assert all(all(map(torch.equal, first, other)) for other in others), "other bits on one of them"


@pytest.mark.parametrize("name", KINDS)
def test_replicas_are_of_the_module_s_class(name):
    module = CASES[name].build()
    with ScatterOnceParallel(module, 1, ["cpu"] * 2) as engine:
        for replica in engine.replicas:
            assert type(replica) is type(module)
            assert vars(replica).keys() >= vars(module).keys()
