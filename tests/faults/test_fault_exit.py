"""Whatever the state: the interpreter ends within seconds, with its own code, without
an abort.
"""

from __future__ import annotations

import json
import os
import signal

import pytest

from faults.exits import STATES
from faults.processes import run

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def outcomes():
    outcome = run("-m", "faults.exits")
    assert outcome.code == 0, outcome.err
    return {found["name"]: found for found in map(json.loads, outcome.out.splitlines())}


@pytest.mark.slow  # waits for processes
@pytest.mark.skipif(os.name != "posix", reason="signals and fork")
@pytest.mark.parametrize("state", STATES)
def test_process_ends_soon_with_own_code(outcomes, state):
    code, said = outcomes[state]["code"], outcomes[state]["said"]
    if code == 1 and said.endswith("\nKeyboardInterrupt\n"):
        code = -signal.SIGINT  # 1 if exec was called with a string after the interrupt
    for word in ("terminate called", "Fatal Python error", "Exception ignored"):
        assert word not in said, said
    assert code == STATES[state][0], said
