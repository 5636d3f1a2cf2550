"""Everything that is trained, by every way to train it, beside plain torch on one
device.

``harness/agree.py`` has the ways and the comparison; the tables of cases lie beside it.
"""

import pytest
from harness import batches, contrastive, module_cases, weighted, whole_batches
from harness.agree import ON_RANKS, RUNNERS, agree, on_ranks, runs, runs_on_ranks

pytestmark = [
    pytest.mark.usefixtures("one_thread_an_operation"),
    pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*weight_norm.*:FutureWarning"),
]
TABLES = [weighted, module_cases, contrastive, whole_batches, batches]
ALL = {name: case for table in TABLES for name, case in table.CASES.items()}


def test_no_case_hides_another():
    assert len(ALL) == sum(len(table.CASES) for table in TABLES)


def test_default_run_names_runners():
    for name, case in ALL.items():
        assert {*case.default_run} <= {*RUNNERS, *ON_RANKS, "one"}, name


@pytest.mark.parametrize(("case", "runner", "layout"), runs(ALL))
def test_step_equals_plain_torch(case, runner, layout):
    agree(case, runner, layout)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("size", "table", "name", "runner"), runs_on_ranks(TABLES, slow=weighted)
)
def test_step_of_ranks_equals_one_device(size, table, name, runner):
    on_ranks(table, name, size, runner)
