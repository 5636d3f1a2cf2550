"""These tests need the null CUDA: ``tests/nullcuda/run`` makes it. Elsewhere they are left out."""

from __future__ import annotations

import pytest

from nullcuda import card

NEED_IT = ["test_the_path.py", "test_the_checker.py", "test_streams.py"]
collect_ignore = [] if card.is_null() else NEED_IT


@pytest.fixture
def counted():
    """Counts from zero, after all that came before is done."""
    card.reset()
    return card.counts
