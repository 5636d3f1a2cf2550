"""Where replicas live: one memory, memories of their own, and some of both."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _tensors_are_tiny(one_thread_an_operation):
    pass


@pytest.fixture(params=["shared", "virtual", "mixed"])
def placed(request: pytest.FixtureRequest):
    """``placed(n)``: n replicas; mixed ones share some memories, the master's among them."""
    if request.param == "mixed":
        order = ["cpu:0", "cpu:1", "cpu:1", "cpu:0"]
        return lambda n: order[:n]
    if request.param == "shared":
        return lambda n: ["cpu"] * n
    return lambda n: [f"cpu:{i}" for i in range(n)]
