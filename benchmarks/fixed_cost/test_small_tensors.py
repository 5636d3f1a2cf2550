"""What do 2,000 small tensors in a module's containers cost a call?

Two training loops in turns, on two virtual devices::

    without    80 linear layers
    with       the same, and 100 lists of 20 tensors with three numbers each

A round of a loop is a call, its backward pass and an optimizer step. After each step the
call compares the values of all tensors that nobody has written, as torch counts it.
"""

import statistics
from functools import partial

import torch
from torch import nn

from benchmarks.tables import Table
from benchmarks.timing import in_a_row, interleaved, ratio
from scatterpar import ScatterOnceParallel

LAYERS = 80
WIDTH = 32
ROWS = 64


class Small(nn.Module):
    def __init__(self, lists):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.small = [[torch.randn(3) for _ in range(20)] for _ in range(lists)]

    def forward(self, rows):
        return self.layers(rows)


def loop(lists):
    module = Small(lists)
    # The checks of calls 1, 2, 4, 8, … would be in some rounds only.
    engine = ScatterOnceParallel(module, device_ids=["cpu:0", "cpu:1"], verify=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    rows = torch.randn(ROWS, WIDTH)

    def step():
        engine(rows).sum().backward()
        optimizer.step()

    return partial(in_a_row, step, optimizer.zero_grad, [])


def test_small_tensors(benchmark, publish, rounds):
    contenders = {"without": loop(0), "with": loop(100)}
    seconds = interleaved(benchmark, contenders, rounds(15))
    beside = ratio(seconds["with"], seconds["without"])
    names = {"without": "80 layers", "with": "80 layers, 2,000 tensors in 100 lists"}
    rows = []
    for contender, name in names.items():
        milliseconds = 1e3 * statistics.median(seconds[contender])
        rows.append([name, f"{milliseconds:.1f}", "1"])
    rows[1][2] = str(beside)
    table = Table(["module", "ms a call with its step", "times"], rows)
    publish("small-tensors", table, {"seconds": seconds})
