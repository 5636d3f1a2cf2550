"""What a report prints."""

import pytest
from splitting.loop_models import Net, backward_sums, images, new

from scatterpar import splitcheck


def test_ipython_shows_the_report():
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    report = splitcheck(backward_sums, new(Net), images())
    assert pretty(report) == str(report)
    assert str(report).startswith("gradient of 24 rows as 10 + 7 + 5 + 2, compared")
