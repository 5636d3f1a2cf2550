"""The fixtures of every benchmark: its size, its rounds, where results go."""

import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.environment import describe
from benchmarks.tables import Publisher

FEW_ROUNDS = 3  # enough to see a ratio, and a folder's tables in about a minute


def pytest_addoption(parser):
    parser.addoption("--write", action="store_true", help="all rounds; write the pages")
    parser.addoption("--quick", action="store_true", help="tiny sizes; write nothing")


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "longer: left out unless --write or -k asks for it, so that a folder's tables "
        "take a minute",
    )


def pytest_collection_modifyitems(config, items):
    asked = (config.getoption(name) for name in ("--write", "--quick", "keyword"))
    if any(asked):
        return
    longer = [item for item in items if item.get_closest_marker("longer")]
    for item in longer:
        items.remove(item)
    config.hook.pytest_deselected(items=longer)


@pytest.fixture(scope="session")
def quick(request):
    """Whether this is a smoke run."""
    return request.config.getoption("--quick")


@pytest.fixture(scope="session")
def writes(request, quick):
    """Whether results go into the pages of the benchmarks."""
    return request.config.getoption("--write") and not quick


@pytest.fixture(scope="session")
def rounds(writes):
    """``rounds(all)`` is how many of all rounds are run: a few, unless results are
    written.
    """
    return lambda number: number if writes else min(number, FEW_ROUNDS)


@pytest.fixture(scope="session", autouse=True)
def environment():
    """The machine, and how busy it was before the first benchmark."""
    return describe()


@pytest.fixture
def publish(request, writes, environment, tmp_path):
    """Prints a table. Writes it, its data and a picture into the folder of this
    benchmark, or into a temporary one.
    """
    folder = Path(request.path).parent
    if not writes:
        shutil.copy(folder / "README.md", tmp_path)
        folder = tmp_path
    return Publisher(folder, environment)


@pytest.fixture(autouse=True)
def same_seed():
    torch.manual_seed(0)
