"""The case that asked for this engine: ResNet-101 on four GPUs, by arithmetic."""

import torch

from benchmarks.models import ResNet101Tree
from benchmarks.tables import Table

GPUS, CALLS = 4, 16
IMAGE_BYTES = 3 * 224 * 224 * 4
IMAGES = 4096


def test_resnet101_on_paper(benchmark, publish):
    with torch.device("meta"):
        tree = benchmark.pedantic(ResNet101Tree, rounds=1)
    parameters = sum(parameter.numel() for parameter in tree.parameters())
    assert parameters == 44_549_160
    once = (GPUS - 1) * 4 * parameters
    rows = [
        [
            f"nn.DataParallel x {CALLS}",
            *_gigabytes(IMAGES * IMAGE_BYTES, CALLS * once, CALLS * once),
        ],
        ["scattered once", *_gigabytes(IMAGES * IMAGE_BYTES, once, once)],
    ]
    table = Table(
        ["who", "images, GB", "parameters out, GB", "gradients back, GB"], rows
    )
    publish("on-paper", table, {"parameters": parameters, "bytes_once": once})


def _gigabytes(*sizes):
    return [f"{size / 1e9:.2f}" for size in sizes]
