"""When a replay differs from the sub-step itself.

``test_cuda_graphs.py`` has looks at replays.
"""

from __future__ import annotations

import math

import pytest

from scatterpar.options.replay_look import Comparison


@pytest.mark.parametrize(
    ("difference", "differs"), [(1e-3, True), (1e-5, False), (math.nan, False)]
)
def test_more_than_rounding_differs(difference, differs):
    assert Comparison(difference, limit=1e-4, draws=False).differs == differs
