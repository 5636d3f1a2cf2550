"""What does it cost to keep an unchanged module tree fresh on four replicas?

Two calls in turns, on the tree of ResNet-101::

    engine       engine.replicas, which refreshes them
    replicate    torch.nn.parallel.replicate(tree, …), with a broadcast that copies nothing
"""

import statistics
from functools import partial
from unittest import mock

from benchmarks.models import ResNet101Tree
from benchmarks.per_call import replicate_module
from benchmarks.tables import Table
from benchmarks.timing import in_a_row, interleaved
from scatterpar import ScatterOnceParallel

REPLICAS = 4
CALLS = 16  # nn.DataParallel replicates once per sub-step


def test_resnet101_tree(benchmark, publish, rounds):
    tree = ResNet101Tree(4)
    engine = ScatterOnceParallel(tree, device_ids=["cpu"] * REPLICAS)

    def refresh():
        return engine.replicas

    def replicate():
        return replicate_without_copies(tree)

    contenders = {
        "engine": partial(in_a_row, refresh, tree.zero_grad, []),
        "replicate": partial(in_a_row, replicate, tree.zero_grad, []),
    }
    seconds = interleaved(benchmark, contenders, rounds(15))
    engine_ms = 1e3 * statistics.median(seconds["engine"])
    replicate_ms = 1e3 * statistics.median(seconds["replicate"])
    ours = [f"{engine_ms:.2f}", f"{engine_ms:.2f}"]  # one call per step
    theirs = [f"{replicate_ms:.2f}", f"{CALLS * replicate_ms:.2f}"]
    rows = [
        ["engine, refresh of four replicas", *ours],
        ["torch.nn.parallel.replicate, its Python alone", *theirs],
    ]
    table = Table(["who", "ms a call", f"ms a step of {CALLS} sub-steps"], rows)
    publish("freshness", table, {"seconds": seconds})


def replicate_without_copies(tree):
    """Torch's own ``replicate``, with a broadcast that copies nothing."""

    def broadcast(tensors, devices, detach=False):
        return [list(tensors) for _ in devices]

    with mock.patch.object(replicate_module, "_broadcast_coalesced_reshape", broadcast):
        return replicate_module.replicate(tree, range(REPLICAS), detach=True)
