"""The fixtures that check every test for leaks can fail, and name what was left behind."""

from __future__ import annotations

import re
from pathlib import Path

from faults.processes import run_forked

TESTS = Path(__file__).parent.parent

# What a test leaves behind, and what the check says of it.
OFFENDERS = {
    "threading.Thread(target=release.wait, daemon=True, name='a').start()": "leaked threads: ['a'",
    "engines.append(ScatterOnceParallel(nn.Identity(), device_ids=['cpu'] * 2).eval())\n"
    "    engines[0](torch.ones(4, 1))": "leaked threads: ['scatterpar replica 0, cpu', 's",
    "torch.set_num_threads(torch.get_num_threads() + 1)": "changed globals: {'num_threads'",
    "torch.set_default_dtype(torch.float64)": "changed globals: {'default dtype'",
    "torch.set_default_device('meta')": "changed globals: {'default device'",
    "torch.set_grad_enabled(False)": "changed globals: {'grad mode'",
    "torch.set_autocast_enabled('cpu', True)": "changed globals: {'autocast enabled'",
    "torch.set_autocast_dtype('cpu', torch.float16)": "changed globals: {'autocast dtype'",
    "torch.set_autocast_cache_enabled(False)": "changed globals: {'autocast cache'",
    "torch.use_deterministic_algorithms(True, warn_only=True)": "changed globals: {'determinist",
    "torch.random.default_generator = torch.Generator()": "{'torch.random.default_generator'",
    "torch.rand(1)": "moved random generators: ['torch']",
}
FILE = """
import threading
import pytest
import torch
from harness import leak_checks
from torch import nn
from scatterpar import ScatterOnceParallel

leak_checks.GRACE_SECONDS = 0.3
release, engines = threading.Event(), []
{tests}

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


def test_offenders_are_caught_and_named_and_the_others_pass(tmp_path):
    """What pytest says of tests that misbehave, each under this suite's own conftest."""
    tests = "".join(f"\ndef test_{i}():\n    {line}\n" for i, line in enumerate(OFFENDERS))
    (tmp_path / "test_offenders.py").write_text(FILE.replace("{tests}", tests))
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-q", "-rA", "--tb=short", "-p", "no:cacheprovider"]
    report = run_forked("-m", "pytest", *options, str(tmp_path)).out
    errors = [line.split(" - ")[0] for line in report.splitlines() if line.startswith("ERROR ")]
    assert len(errors) == len(OFFENDERS)
    for number, words in enumerate(OFFENDERS.values()):
        assert any(error.endswith(f"test_offenders.py::test_{number}") for error in errors), number
        assert words in report
    for name in ("random_numbers_on_purpose", "everything_was_put_back"):
        assert f"::test_{name}" not in "".join(errors)
        assert re.search(rf"PASSED .*::test_{name}$", report, re.MULTILINE)
