"""For pytest on the null CUDA (``-p nullcuda.plugin``): values for all operators, races in none.

With it every test runs under the race checker, and fails where it finds an unordered pair.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from nullcuda import card, values
from nullcuda.races import races

if not card.is_null():
    raise RuntimeError("nullcuda.plugin is for the null CUDA: run it with tests/nullcuda/run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "races: looks for races itself, planted ones")
    with warnings.catch_warnings(action="ignore"):  # torch notes that kernels are replaced
        values.install()


@pytest.fixture(autouse=True)
def _no_races(request: pytest.FixtureRequest):
    for device in range(torch.cuda.device_count()):
        if card.has_context(device):
            torch.cuda.synchronize(device)
    card.trace(True)
    yield
    card.trace(False)
    found = races(card.records())
    if request.node.get_closest_marker("races") is None:
        assert not found, f"accesses that nothing orders: {found[:6]}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for operator, why in values.failures.items():
        terminalreporter.write_line(f"no values for {operator}: {why}")
