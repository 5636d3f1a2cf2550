"""What a synchronised batch normalisation costs beside a plain one, per layer."""

import copy
import statistics

import pytest
import torch
from torch import nn

from benchmarks.tables import Table
from benchmarks.timing import interleaved, timed
from scatterpar import ScatterOnceParallel

LAYERS = 10
CHANNELS = 16
SIDE = 16
ROWS_PER_SUB_STEP = 8
LAYOUTS = {
    "2 in one memory": ["cpu"] * 2,
    "2 memories": ["cpu:0", "cpu:1"],
    "4 memories": [f"cpu:{number}" for number in range(4)],
}
ACCUMS = (1, 4)


@pytest.mark.longer
def test_a_layer_in_a_sub_step(benchmark, publish, rounds):
    """Ten blocks of a convolution and a normalisation; the order of contenders turns.

    Per layer and sub-step of a replica: the median, over rounds, of the difference.
    """
    contenders = {}
    for name, layout in LAYOUTS.items():
        for accum in ACCUMS:
            contenders |= pair(name, layout, accum)
    seconds = interleaved(benchmark, contenders, rounds(21))
    rows = []
    costs = {}
    for name, layout in LAYOUTS.items():
        for accum in ACCUMS:
            plain = seconds[name, accum, "plain"]
            synchronised = seconds[name, accum, "synchronised"]
            pairs = zip(synchronised, plain, strict=True)
            difference = statistics.median(ours - bare for ours, bare in pairs)
            layers = LAYERS * accum * len(layout)
            milliseconds = 1e3 * difference / layers
            ratio = statistics.median(synchronised) / statistics.median(plain)
            rows.append([name, str(accum), f"{milliseconds:.2f}", f"{ratio:.2f}"])
            costs[f"{name}, accum {accum}"] = milliseconds
    columns = ["replicas", "accum", "ms per layer", "time of the step, ratio"]
    publish("synchronised", Table(columns, rows), {"milliseconds_per_layer": costs})


def pair(name, layout, accum):
    """Steps of the same network with plain and with synchronised layers."""
    blocks = []
    for _ in range(LAYERS):
        blocks.append(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1))
        blocks.append(nn.BatchNorm2d(CHANNELS))
        blocks.append(nn.ReLU())
    plain = nn.Sequential(*blocks)
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    rows = ROWS_PER_SUB_STEP * accum * len(layout)
    images = torch.randn(rows, CHANNELS, SIDE, SIDE)
    contenders = {}
    for kind, module in (("plain", plain), ("synchronised", synchronised)):
        engine = ScatterOnceParallel(module, accum, layout, verify=False)
        contenders[name, accum, kind] = stepping(engine, images)
    return contenders


def stepping(engine, images):
    """A function that takes one step and returns its seconds."""

    def step():
        engine.module.zero_grad()
        return timed(lambda: engine.forward_backward(images, None, mean_square))

    return step


def mean_square(outputs, _):
    return outputs.square().mean()
