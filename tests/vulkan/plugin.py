"""For pytest on Vulkan devices (``-p vulkan.plugin``): leaves out what these cannot
have.
"""

from __future__ import annotations

import re

import pytest
import torchvulkan  # noqa: F401 (registers the devices)

STREAMS = "there are no streams"
LEFT_OUT = {
    "test_steps_run_on_users_streams": STREAMS,
    "test_workers_run_on_users_streams": STREAMS,
    "test_backward_in_another_stream_is_exact": STREAMS,
    r"test_pinned_memory_reusable.*-pair\]": "exp of float64 is computed in float32",
    r"pair-\[0, 1": "autograd needs events between devices",
    r"test_pinned_memory_reusable.*-inference\]": "its call has a graph",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:.*torchvulkan.*")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, why in LEFT_OUT.items():
            if re.search(pattern, item.name):
                item.add_marker(pytest.mark.skip(reason=why))
