"""The time to keep an unchanged module tree fresh on four replicas,
beside torch's own.
"""

import importlib
import statistics
from unittest import mock

from benchmarks.models import ResNet101Tree
from benchmarks.tables import Table
from benchmarks.timing import in_a_row, interleaved
from scatterpar import ScatterOnceParallel

REPLICAS = 4
CALLS = 16  # nn.DataParallel replicates once a sub-step

_replicate = importlib.import_module("torch.nn.parallel.replicate")


def test_resnet101_tree(benchmark, publish, quick):
    tree = ResNet101Tree(4)
    engine = ScatterOnceParallel(tree, device_ids=["cpu"] * REPLICAS)
    contenders = {
        "engine": lambda: in_a_row(lambda: engine.replicas, tree.zero_grad, []),
        "replicate": lambda: in_a_row(
            lambda: replicate_without_copies(tree), tree.zero_grad, []
        ),
    }
    seconds = interleaved(benchmark, contenders, 3 if quick else 15)
    engine_ms, replicate_ms = (
        1e3 * statistics.median(seconds[who]) for who in contenders
    )
    rows = [
        ["engine, refresh of four replicas", f"{engine_ms:.2f}", f"{engine_ms:.2f}"],
        [
            "torch.nn.parallel.replicate, its Python alone",
            f"{replicate_ms:.2f}",
            f"{CALLS * replicate_ms:.2f}",
        ],
    ]
    table = Table(["who", "ms a call", f"ms a step of {CALLS} sub-steps"], rows)
    publish("freshness", table, {"seconds": seconds})


def replicate_without_copies(tree):
    """Torch's own ``replicate``, with a broadcast that copies nothing."""

    def broadcast(tensors, devices, detach=False):
        return [list(tensors) for _ in devices]

    with mock.patch.object(_replicate, "_broadcast_coalesced_reshape", broadcast):
        return _replicate.replicate(tree, range(REPLICAS), detach=True)
