"""Random programs of ``harness/programs.py``: wrong ones are told, and none of the right ones."""

from __future__ import annotations

import pytest
from harness.programs import judged


@pytest.mark.draws
@pytest.mark.parametrize("seeds", [12, pytest.param(240, marks=pytest.mark.slow)])
def test_wrong_programs_are_told_and_right_ones_are_not(seeds):
    found = [*judged(range(seeds))]
    assert len(found) > seeds // 2
    assert not [each for each in found if each["right"] and each["said"] in ("refused", "warned")]
    wrong = [each for each in found if not each["right"]]
    assert len([each for each in wrong if not each["said"]]) <= 0.01 * len(wrong), wrong
