"""What turns cost: a step function sleeps 10 ms, and its backward pass 20 ms.

::

    in parallel          replicas call the step function at the same time
    in turns             one at a time calls it; backward passes overlap
    one after the other  one replica has all sub-steps, as with accumulation

A sleep releases the GIL, as a kernel does that computes.
"""

import time

import torch
from torch import nn

from benchmarks.tables import Table
from benchmarks.timing import interleaved, ratio, timed
from scatterpar import ScatterOnceParallel
from scatterpar.step.loop_options import LoopOptions

CALL_SECONDS = 0.010
BACKWARD_SECONDS = 0.020
REPLICAS = (2, 4, 8)
ACCUM = 4
KINDS = ("in parallel", "in turns", "one after the other")


class Sleep(torch.autograd.Function):
    """The identity, which takes its time in both passes."""

    @staticmethod
    def forward(context, rows):
        time.sleep(CALL_SECONDS)
        return rows.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(BACKWARD_SECONDS)
        return gradient


class StepFunction(nn.Module):
    """A module whose forward pass is a step function: it returns the loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, rows):
        return Sleep.apply(self.layer(rows)).square().mean()


def test_turns(benchmark, publish, quick, rounds):
    contenders = {}
    for replicas in REPLICAS[:1] if quick else REPLICAS:
        gradients = []
        for kind in KINDS:
            contenders[replicas, kind], gradient = contender(replicas, kind)
            gradients.append(gradient)
        for gradient in gradients[1:]:
            torch.testing.assert_close(gradient, gradients[0])
    seconds = interleaved(benchmark, contenders, rounds(11))
    rows = []
    for replicas in dict.fromkeys(replicas for replicas, _ in contenders):
        cells = [str(replicas)]
        parallel = seconds[replicas, "in parallel"]
        for kind in KINDS:
            of_kind = seconds[replicas, kind]
            median = ratio(of_kind, parallel).median
            milliseconds = 1e3 * sorted(of_kind)[len(of_kind) // 2]
            cells.append(f"{milliseconds:.0f} ms ({median:.2f})")
        rows.append(cells)
    columns = ["replicas", *KINDS]
    publish("turns", Table(columns, rows), {"rows": rows})


def contender(replicas, kind):
    """A function that runs a step and returns its seconds; and the step's gradient."""
    torch.manual_seed(0)
    module = StepFunction()
    accum = ACCUM
    devices = ["cpu"] * replicas
    if kind == "one after the other":
        accum = ACCUM * replicas
        devices = ["cpu"]
    engine = ScatterOnceParallel(module, accum, devices, verify=False)
    engine.loop = LoopOptions(takes_turns=kind == "in turns")
    batch = torch.linspace(-1, 1, 4 * ACCUM * replicas).view(-1, 4)
    engine.forward_backward(batch)
    gradient = module.layer.weight.grad.clone()
    return lambda: timed(lambda: engine.forward_backward(batch)), gradient
