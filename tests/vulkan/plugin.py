"""For pytest on Vulkan devices (``-p vulkan.plugin``): leaves out what these cannot
have.
"""

from __future__ import annotations

import re

import pytest
import torchvulkan  # noqa: F401 (registers the devices)

STREAMS = "there are no streams"
LEFT_OUT = {
    "test_on_the_users_stream_of_every_device": STREAMS,
    "test_workers_are_on_the_users_stream_of_every_device": STREAMS,
    "test_the_backward_pass_of_a_loss_in_another_stream": STREAMS,
    r"test_pinned_memory_may.*-pair\]": "exp of float64 is computed in float32",
    r"pair-\[0, 1": "autograd needs events between devices",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:.*torchvulkan.*")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, why in LEFT_OUT.items():
            if re.search(pattern, item.name):
                item.add_marker(pytest.mark.skip(reason=why))
