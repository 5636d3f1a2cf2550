"""The case that asked for this engine, by arithmetic: ResNet-101 on four GPUs.

4096 images in 16 calls of ``nn.DataParallel``, or in one step that scatters once.
"""

import torch

from benchmarks.models import ResNet101Tree
from benchmarks.tables import Table

GPUS = 4
CALLS = 16
IMAGE_BYTES = 3 * 224 * 224 * 4
IMAGES = 4096


def test_resnet101_on_paper(benchmark, publish):
    with torch.device("meta"):
        tree = benchmark.pedantic(ResNet101Tree, rounds=1)
    parameters = sum(parameter.numel() for parameter in tree.parameters())
    assert parameters == 44_549_160
    images = _gigabytes(IMAGES * IMAGE_BYTES)
    bytes_once = (GPUS - 1) * 4 * parameters
    once = _gigabytes(bytes_once)
    by_call = _gigabytes(CALLS * bytes_once)
    rows = [
        [f"nn.DataParallel x {CALLS}", images, by_call, by_call],
        ["scattered once", images, once, once],
    ]
    columns = ["who", "images, GB", "parameters out, GB", "gradients back, GB"]
    data = {"parameters": parameters, "bytes_once": bytes_once}
    publish("on-paper", Table(columns, rows), data)


def _gigabytes(size):
    return f"{size / 1e9:.2f}"
