"""For pytest on Vulkan devices (``-p vulkan.plugin``): leaves out what these cannot have."""

from __future__ import annotations

import pytest
import torchvulkan  # noqa: F401 (registers the devices)

STREAMS = "there are no streams"
LEFT_OUT = {
    "test_on_the_users_stream_of_every_device": STREAMS,
    "test_workers_are_on_the_users_stream_of_every_device": STREAMS,
    "test_the_backward_pass_of_a_loss_in_another_stream": STREAMS,
    "test_autocast_reaches_every_replica[[": "there is no autocast to bfloat16",
    "test_pinned_memory_may_be_overwritten_after_a_call[[": "exp of float64 is computed in float32",
    "pair-[0, 1": "autograd needs events between devices",
}
_ONLY = {"test_autocast_reaches": "dtype0", "test_pinned_memory_may": "-pair]"}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:.*torchvulkan.*")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        only = next((part for name, part in _ONLY.items() if item.name.startswith(name)), "")
        for name, why in LEFT_OUT.items():
            if name in item.name and only in item.name:
                item.add_marker(pytest.mark.skip(reason=why))
