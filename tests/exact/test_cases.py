"""Everything that is trained, by every way to train it, beside plain torch on one
device.

``harness/agree.py`` has the ways and the comparison; the tables of cases lie beside it.
"""

import pytest
from harness import batches, contrastive, module_cases, weighted, whole_batches
from harness.agree import agree, identity_of, on_ranks, runs

pytestmark = [
    pytest.mark.usefixtures("one_thread_an_operation"),
    pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*weight_norm.*:FutureWarning"),
]
TABLES = [weighted, module_cases, contrastive, whole_batches, batches]
ALL = {name: case for table in TABLES for name, case in table.CASES.items()}
FEW = [
    *(
        "tied",
        "sparse gradients",
        "batch norm",
        "a trained criterion",
        "class weights, padded",
    ),
    *("count=", "clip", "texts"),
]
QUICK = {
    **dict.fromkeys(["engine", "pair"], ()),
    "whole batch": [name for name in ALL if not name.endswith("two rows")],
    "inference": [*module_cases.CASES, *batches.CASES],  # others have one model
    **dict.fromkeys(["loss", "check", "by cost", "guarded", "guarded pair"], FEW),
    "graphs": ["tied", "class weights, padded"],
    "compiled": ["tied"],  # others take seconds
}


def test_no_case_hides_another():
    assert len(ALL) == sum(len(table.CASES) for table in TABLES)


@pytest.mark.parametrize(
    ("case", "runner", "layout"), runs(ALL, QUICK, contract=["engine", "loss", "pair"])
)
def test_a_step_is_that_of_plain_torch(case, runner, layout):
    agree(case, runner, layout)


ON_RANKS = {  # in the default run; all of ``weighted`` in the slow one
    weighted: ["mean", "sum", "class weights, padded", "count=", "mean, two rows"],
    module_cases: [
        *(
            "tied",
            "spectral norm",
            "own parameters",
            "frozen and thawed",
            "several dtypes",
        ),
        *("complex", "conjugates", "changes between steps", "layouts, torch.float32"),
        *(
            "unused by some",
            "gradients in one memory",
            "torch.float16",
            "a trained criterion",
        ),
        *(
            "a trained buffer",
            "buffers of every dtype",
            "overlapping buffer, transposed",
        ),
    ],
    contrastive: ["clip"],
    batches: ["a codebook of 64 and 32 rows"],
}
QUICK_ON_RANKS = [
    *(
        (2, table, name, "engine")
        for table, names in ON_RANKS.items()
        for name in names
    ),
    *((size, module_cases, "tied", "engine") for size in (1, 3)),
    *((3, contrastive, "clip", runner) for runner in ("engine", "by cost")),
    (2, module_cases, "tied", "graphs"),
    *((2, weighted, name, "by cost") for name in ("padded", "mean")),
]
OTHERS = [name for name in weighted.CASES if name not in ON_RANKS[weighted]]
SLOW_ON_RANKS = [(2, weighted, name, "engine") for name in OTHERS]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("size", "table", "name", "runner"),
    [
        pytest.param(
            *run, id=identity_of(run[2], run[3], f"{run[0]}_ranks"), marks=marks
        )
        for runs_on_ranks, marks in (
            (QUICK_ON_RANKS, ()),
            (SLOW_ON_RANKS, pytest.mark.slow),
        )
        for run in runs_on_ranks
    ],
)
def test_a_step_of_ranks_is_that_of_one_device(size, table, name, runner):
    on_ranks(table.__name__, name, size, runner)
