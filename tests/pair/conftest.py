"""Tensors of the pair's tests are tiny."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _tensors_are_tiny(one_thread_an_operation):
    pass
