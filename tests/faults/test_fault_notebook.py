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
batch = torch.randn(32, 4, dtype=torch.float64), torch.randint(2, (32,)), nn.CrossEntropyLoss()
engine = ScatterOnceParallel(model, 4, ["cpu"] * 2)
"""

TRAIN = """
print("training", flush=True)
while True:
    engine.forward_backward(*batch)
"""

CHECK = """
model.zero_grad()
loss = engine.forward_backward(*batch)
expected = batch[2](model(batch[0]), batch[1])
assert torch.allclose(loss, expected, rtol=1e-12)
for p, gradient in zip(model.parameters(), torch.autograd.grad(expected, [*model.parameters()])):
    assert torch.allclose(p.grad, gradient, rtol=1e-10, atol=1e-14)
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


def run_cell(client, source):
    """The reply to a cell; for a moment after an error the kernel turns away what was waiting."""
    while (reply := reply_to(client, client.execute(source)))["status"] == "aborted":
        time.sleep(0.1)
    return reply


def test_interrupting_the_kernel_again_and_again(kernel):
    manager, client = kernel
    assert run_cell(client, SET_UP)["status"] == "ok"
    for pause in (0.0, 0.1, 0.23, 0.37):
        message = client.execute(TRAIN)
        while "training" not in client.get_iopub_msg(timeout=SILENCE)["content"].get("text", ""):
            pass
        time.sleep(pause)
        manager.interrupt_kernel()
        assert reply_to(client, message)["ename"] == "KeyboardInterrupt"
        reply = run_cell(client, CHECK)
        assert reply["status"] == "ok", reply
