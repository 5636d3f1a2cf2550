"""What a sub-step runs beside the model, and in which thread."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter

import pytest
import torch
from faults.processes import run_forked
from harness.models import CLASSES, FEATURES, linear
from harness.oracle import build, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel

ROWS, LABELS = randn(13, FEATURES), randint(CLASSES, 13)
LOSS = nn.CrossEntropyLoss()


def test_one_replica_runs_in_callers_thread():
    """So a debugger stops in the user's own lines."""
    threads = set()

    def criterion(output, targets):
        threads.add(threading.current_thread())
        return LOSS(output, targets)

    with ScatterOnceParallel(linear(), 3, ["cpu"]) as engine:
        engine.forward_backward(ROWS, LABELS, criterion)
    assert threads == {threading.current_thread()}


@pytest.mark.contract
def test_micro_batch_without_terms_forwards(devices):
    model = build(
        lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))
    )
    targets = torch.full((12,), -100)
    targets[0] = 1
    with ScatterOnceParallel(model, 3, devices(1)) as engine:
        engine.forward_backward(randn(12, FEATURES), targets, LOSS)
    assert model[0].num_batches_tracked == 3


FREED = """
import sys
import weakref

import torch
from torch import nn
from harness.models import Of
from scatterpar import ScatterOnceParallel

device, kind = sys.argv[1:]
seen = []

def forward(model, inputs):
    seen.append(weakref.ref(inputs))
    return model.weight * inputs.detach().sum(1, keepdim=True)

class Loss(nn.CrossEntropyLoss):
    def forward(self, output, targets):
        assert seen[-1]() is None, "the inputs live on in the criterion"
        return super().forward(output, targets)

loss = Loss()
criterion = loss if kind == "module" else (lambda output, targets: loss(output, targets))
model = Of(forward, weight=nn.Parameter(torch.ones(3)))
with ScatterOnceParallel(model, 3, [device], verify=False) as engine:
    engine.forward_backward(torch.ones(6, 4), torch.zeros(6).long(), criterion)
print(len(seen))
"""


@pytest.mark.parametrize("kind", ["function", "module"])
def test_unneeded_inputs_freed_early(devices, kind):
    """In a process of its own: what traces or records here may keep them alive."""
    outcome = run_forked("-c", FREED, str(devices(1)[0]), kind)
    assert (outcome.code, outcome.out) == (0, "3\n"), outcome.err


# --- what a sub-step runs besides the model, with the GIL, times all replicas ---

SUBSTEPS = 16


def calls(work):
    """How many functions ``work()`` calls in this thread, those written in C among
    them.
    """
    found = Counter()

    def note(frame, event, argument):
        found[event] += 1

    before = sys.getprofile()
    gc.disable()  # finalizers of others are no calls of this
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found["call"] + found["c_call"]


def per_substep(work):
    """What one sub-step more adds to ``work(substeps)``, whose first two calls may
    prepare things, and look at all sub-steps.
    """
    for _ in range(2):
        work(SUBSTEPS), work(2 * SUBSTEPS)
    return (
        calls(lambda: work(2 * SUBSTEPS)) - calls(lambda: work(SUBSTEPS))
    ) / SUBSTEPS


def test_sub_step_calls_few_functions():
    model, inputs, targets = (
        linear(),
        randn(2 * SUBSTEPS, FEATURES),
        randint(CLASSES, 2 * SUBSTEPS),
    )
    engines = {
        n: ScatterOnceParallel(model, n, ["cpu"]) for n in (SUBSTEPS, 2 * SUBSTEPS)
    }

    def plain(substeps):
        for row in range(substeps):
            LOSS(model(inputs[row : row + 1]), targets[row : row + 1]).backward()

    def ours(substeps):
        engines[substeps].forward_backward(inputs[:substeps], targets[:substeps], LOSS)

    more = per_substep(ours) - per_substep(plain)
    assert more < 110, f"{more} calls more than a plain loop"


class LossInItsOwnTensor(nn.Module):
    """Without a graph, returns the tensor in which it keeps the last loss."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros((), dtype=torch.float64))

    def forward(self, output, targets):
        loss = LOSS(output, targets)
        self.last.copy_(loss.detach())
        return loss if loss.requires_grad else self.last


@pytest.mark.filterwarnings("ignore:forward passes move")
def test_loss_in_tensor_that_calls_write(devices):
    """A second micro-batch is written into the loss that the first one returned."""
    model = linear()
    with ScatterOnceParallel(model, 2, devices(2)) as engine, torch.no_grad():
        loss = engine.loss(ROWS, LABELS, LossInItsOwnTensor())
        assert loss.item() == pytest.approx(LOSS(model(ROWS), LABELS).item(), rel=1e-12)
