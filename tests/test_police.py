"""The fixtures that police every test can fail, and name what was left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.forked import run_forked

HERE = Path(__file__).parent

OFFENDERS = """
import threading
import pytest
import torch
from helpers import police
from torch import nn
from scatterpar import ScatterOnceParallel

police.GRACE_SECONDS = 0.3
release = threading.Event()


def test_thread():
    threading.Thread(target=release.wait, daemon=True, name="left-behind").start()


engines = []


def test_engine_that_lives_on():
    engine = ScatterOnceParallel(nn.Identity(), device_ids=["cpu"] * 2).eval()
    engine(torch.ones(4, 1))
    engines.append(engine)


def test_num_threads():
    torch.set_num_threads(torch.get_num_threads() + 1)


def test_default_dtype():
    torch.set_default_dtype(torch.float64)


def test_default_device():
    torch.set_default_device("meta")


def test_grad_mode():
    torch.set_grad_enabled(False)


def test_autocast():
    torch.set_autocast_enabled("cpu", True)


def test_autocast_dtype():
    torch.set_autocast_dtype("cpu", torch.float16)


def test_autocast_cache():
    torch.set_autocast_cache_enabled(False)


def test_deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)


def test_generator_identity():
    torch.random.default_generator = torch.Generator()


def test_random_numbers():
    torch.rand(1)


@pytest.mark.draws
def test_random_numbers_on_purpose():
    torch.rand(1)


def test_everything_was_put_back():
    release.set()
    engines.clear()
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device() == torch.device("cpu")
    assert not torch.is_autocast_enabled("cpu")
"""

EXPECTED = {
    "test_thread": "leaked threads: ['left-behind']",
    "test_engine_that_lives_on": "leaked threads: ['scatterpar replica 0, cpu', 's",
    "test_num_threads": "changed globals: {'num_threads'",
    "test_default_dtype": "changed globals: {'default dtype'",
    "test_default_device": "changed globals: {'default device'",
    "test_grad_mode": "changed globals: {'grad mode'",
    "test_autocast": "changed globals: {'autocast enabled'",
    "test_autocast_dtype": "changed globals: {'autocast dtype'",
    "test_autocast_cache": "changed globals: {'autocast cache'",
    "test_deterministic": "changed globals: {'deterministic'",
    "test_generator_identity": "changed globals: {'torch.random.default_generator'",
    "test_random_numbers": "moved random generators: ['torch']",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What pytest says of tests that misbehave, each under this suite's own conftest."""
    folder = tmp_path_factory.mktemp("offenders")
    (folder / "test_offenders.py").write_text(OFFENDERS)
    (folder / "conftest.py").write_text((HERE / "conftest.py").read_text())
    (folder / "pytest.ini").write_text("[pytest]\n")
    options = ["-q", "-rA", "--tb=short", "-p", "no:cacheprovider"]
    return run_forked("-m", "pytest", *options, str(folder)).out


@pytest.mark.parametrize("offender", EXPECTED)
def test_offenders_are_caught(report, offender):
    errors = [line.split(" - ")[0] for line in report.splitlines() if line.startswith("ERROR ")]
    assert any(error.endswith(f"test_offenders.py::{offender}") for error in errors)
    assert EXPECTED[offender] in report


@pytest.mark.parametrize(
    "citizen", ["test_random_numbers_on_purpose", "test_everything_was_put_back"]
)
def test_the_others_pass(report, citizen):
    lines = [line.split(" ")[0] for line in report.splitlines() if line.endswith(f"::{citizen}")]
    assert lines == ["PASSED"]
