"""``splitcheck`` finds wrong loops, names them, and passes right ones."""

import re

import pytest
from splitting.hidden_mistakes import HIDDEN
from splitting.loop_models import new
from splitting.right_loops import RIGHT
from splitting.wrong_loops import WRONG

from scatterpar import splitcheck

QUICK = {
    "averaged_after_a_global_count",
    "global_count_times_ranks-2",
}


# One mask stands for those of other dtypes, and the first model of a loop for others.
REPEATED = re.compile(r"-\d+$|^nested_mask_of_(?!bool)|^compiled_model$")


def cases(table):
    """Each entry; repeats, and those that start processes, are slow, but for a few."""
    params = []
    for name, case in table.items():
        is_slow = "ranks" in case.options or REPEATED.search(name)
        marks = [pytest.mark.slow] if is_slow and name not in QUICK else []
        params.append(pytest.param(case, id=name, marks=marks))
    return params


@pytest.mark.parametrize("case", cases(WRONG))
def test_wrong_loop_is_found_and_named(case):
    report = splitcheck(case.step, new(case.model), case.batch(), **case.options)
    assert not report.passed
    assert report.cause == case.cause, report
    for words in case.words:
        assert words in f"{report.why} {report.remedy}"
    assert len(str(report).splitlines()) == 4
    with pytest.raises(AssertionError, match="NOT the same"):
        report.assert_passed()


@pytest.mark.parametrize("case", cases(HIDDEN))
def test_hidden_mistake_is_found_and_named(case):
    report = splitcheck(case.step, new(case.model), case.batch(), **case.options)
    assert not report.passed
    assert report.cause == case.cause, report


@pytest.mark.parametrize("case", cases(RIGHT))
def test_right_loop_passes(case):
    report = splitcheck(case.step, new(case.model), case.batch(), **case.options)
    report.assert_passed()
    assert report.cause == ""
