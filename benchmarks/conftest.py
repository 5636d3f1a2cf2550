"""The fixtures of every benchmark: its size, its environment, where results go."""

import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.environment import describe
from benchmarks.tables import Publisher


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="tiny sizes; write nothing")


@pytest.fixture(scope="session")
def quick(request):
    """Whether this is a smoke run."""
    return request.config.getoption("--quick")


@pytest.fixture(scope="session", autouse=True)
def environment():
    """The machine, and how busy it was before the first benchmark."""
    return describe()


@pytest.fixture
def publish(request, quick, environment, tmp_path):
    """Writes a table, its data and a picture into the folder of this benchmark."""
    folder = Path(request.path).parent
    if quick:
        shutil.copy(folder / "README.md", tmp_path)
        folder = tmp_path
    return Publisher(folder, environment)


@pytest.fixture(autouse=True)
def same_seed():
    torch.manual_seed(0)
