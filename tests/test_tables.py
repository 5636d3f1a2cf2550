"""Tables and numbers as text."""

from __future__ import annotations

import pytest

from scatterpar.tables import as_html, as_text, shortened

pytestmark = pytest.mark.core
TABLE = [("phase", "ms"), ("scatter", "1.5"), ("a", "1,234.0")]


def test_columns_are_aligned():
    assert as_text(TABLE).splitlines() == [
        "phase         ms",
        "scatter      1.5",
        "a        1,234.0",
    ]


def test_columns_may_be_aligned_left():
    assert as_text(TABLE, str.ljust).splitlines() == [
        "phase    ms",
        "scatter  1.5",
        "a        1,234.0",
    ]


def test_cells_of_html_are_escaped():
    assert as_html([["a < b"]]) == "<table><tr><td>a &lt; b</td></tr></table>"


def test_long_lists_cut_behind_a_number():
    numbers = ", ".join(map(str, range(10, 100)))  # four characters each
    text = shortened(numbers)
    assert text == ", ".join(map(str, range(10, 28))) + ", ..."
    assert shortened(text) == text
