"""Ctrl-C in a notebook: the kernel's interrupt ends the cell, and the next cell trains on."""

from __future__ import annotations

import time

import pytest

from faults.processes import SILENCE, environment

pytestmark = pytest.mark.core

jupyter_client = pytest.importorskip("jupyter_client", reason="needs a notebook kernel")
pytest.importorskip("ipykernel", reason="needs a notebook kernel")

SET_UP = """
import torch
from torch import nn
from scatterpar import ScatterOnceParallel
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
engine = ScatterOnceParallel(model, 4, ["cpu"] * 2)
inputs, targets = torch.randn(32, 4, dtype=torch.float64), torch.randint(2, (32,))
criterion = nn.CrossEntropyLoss()
"""

TRAIN = """
print("training", flush=True)
while True:
    engine.forward_backward(inputs, targets, criterion)
"""

CHECK = """
model.zero_grad()
engine.forward_backward(inputs, targets, criterion)
expected = torch.autograd.grad(criterion(model(inputs), targets), list(model.parameters()))
worst = max((p.grad - e).abs().max().item() for p, e in zip(model.parameters(), expected))
assert worst < 1e-12, worst
print("exact", flush=True)
"""


@pytest.fixture
def kernel(monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    manager, client = jupyter_client.manager.start_new_kernel(
        startup_timeout=SILENCE, kernel_name="python3"
    )
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def reply_to(client, message):
    """The reply to this message: a slow start leaves replies to what asked for signs of life."""
    while True:
        reply = client.get_shell_msg(timeout=SILENCE)
        if reply["parent_header"]["msg_id"] == message:
            return reply["content"]


def wait_for(client, text):
    while True:
        content = client.get_iopub_msg(timeout=SILENCE)["content"]
        if text in content.get("text", ""):
            return


def run_cell(client, source):
    """The reply to a cell; for a moment after an error the kernel turns away what was waiting."""
    for _ in range(50):
        reply = reply_to(client, client.execute(source))
        if reply["status"] != "aborted":
            break
        time.sleep(0.1)
    return reply


def test_interrupting_the_kernel_again_and_again(kernel):
    manager, client = kernel
    assert run_cell(client, SET_UP)["status"] == "ok"
    for pause in (0.0, 0.1, 0.23, 0.37):
        message = client.execute(TRAIN)
        wait_for(client, "training")
        time.sleep(pause)
        manager.interrupt_kernel()
        reply = reply_to(client, message)
        assert reply["status"] == "error"
        assert reply["ename"] == "KeyboardInterrupt"
        reply = run_cell(client, CHECK)
        assert reply["status"] == "ok", reply
