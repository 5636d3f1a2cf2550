"""Whatever the state: the interpreter ends within seconds, with its own code, without an abort."""

from __future__ import annotations

import json
import os
import signal

import pytest

from faults.exits import CODES, STATES
from faults.processes import run

pytestmark = pytest.mark.core

SECONDS = 60.0  # an engine gives its workers four, and a busy machine takes its time


@pytest.fixture(scope="module", params=["quick", pytest.param("whole", marks=pytest.mark.slow)])
def outcomes(request):
    outcome = run("-m", "faults.exits", request.param)
    assert outcome.code == 0, outcome.err
    return {found["name"]: found for found in map(json.loads, outcome.out.splitlines())}


@pytest.mark.skipif(os.name != "posix", reason="signals and fork")
@pytest.mark.parametrize("state", STATES)
def test_ends_promptly_with_its_own_code(outcomes, state):
    found = outcomes[state]
    words = ["terminate called", "Fatal Python error", "Exception ignored", "Timeout"]
    refusal = "can't create new thread at interpreter shutdown"
    if state == "a first step at exit" and refusal in found["said"]:  # from Python 3.12 on
        words.remove("Exception ignored")  # which Python says of any error in such a handler
    code = CODES.get(state, 0)
    if code == -signal.SIGINT and found["said"].endswith("\nKeyboardInterrupt\n"):
        assert found["code"] in (code, 1)  # 1 if exec was called with a string after the interrupt
        code = found["code"]
    for word in words:
        assert word not in found["said"], found["said"]
    assert found["code"] == code, found["said"]
    assert found["seconds"] < SECONDS
