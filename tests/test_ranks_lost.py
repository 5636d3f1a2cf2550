"""A rank that is lost: an error on the others, within the group's timeout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.gang import failure
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import build, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel

CRITERION = nn.CrossEntropyLoss()


def die(rank, store, how):
    """Three steps; rank 1 is killed, or hangs, before the third."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    file = dist.FileStore(store, 2)
    limit = timedelta(seconds=5)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=2, timeout=limit)
    module = build(mlp)
    batch = randn(4, FEATURES), randint(CLASSES, 4)
    engine = ScatterOnceParallel(module, process_group=dist.group.WORLD)
    for _ in range(2):
        engine.forward_backward(*batch, CRITERION)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP if how == "hangs" else signal.SIGKILL)
    before = [p.grad.clone() for p in module.parameters()]
    start = time.monotonic()
    kind, words = failure(engine.forward_backward, *batch, CRITERION)
    assert time.monotonic() - start < 8
    assert all(map(torch.equal, before, [p.grad for p in module.parameters()]))
    print(kind, words.splitlines()[-1], flush=True)


@pytest.mark.parametrize("how", ["is killed", "hangs"])
def test_a_rank_that_is_lost_is_an_error_within_the_timeout(tmp_path, how):
    code = "import sys, test_ranks_lost as t; t.die(int(sys.argv[1]), *sys.argv[2:])"
    command = [sys.executable, "-c", code]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), how],
            cwd=os.path.dirname(__file__),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        printed, _ = workers[0].communicate(timeout=60)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    words = "another rank was lost in this step; nothing was changed on this one"
    assert f"RuntimeError {words}" in printed
