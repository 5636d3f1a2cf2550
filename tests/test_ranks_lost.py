"""A rank that is lost: an error on the others, within the group's timeout. A group that is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from faults.processes import SILENCE, run
from helpers.gang import failure
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import build, randint, randn
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from scatterpar import ScatterOnceParallel

CRITERION = nn.CrossEntropyLoss()


def die(rank, store, how):
    """Three steps; rank 1 is killed, or hangs, before the third."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    file = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=2)
    module = build(mlp)
    batch = randn(4, FEATURES), randint(CLASSES, 4)
    engine = ScatterOnceParallel(module, process_group=dist.group.WORLD)
    for _ in range(2):
        engine.forward_backward(*batch, CRITERION)
    # Only now, since on a busy machine one rank may be much later than the other.
    _set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP if how == "hangs" else signal.SIGKILL)
    before = [p.grad.clone() for p in module.parameters()]
    kind, words = failure(engine.forward_backward, *batch, CRITERION)
    assert all(map(torch.equal, before, [p.grad for p in module.parameters()]))
    print(kind, words.splitlines()[-1], flush=True)


@pytest.mark.slow
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
        printed, _ = workers[0].communicate(timeout=SILENCE)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    words = "another rank was lost in this step; nothing was changed on this one"
    assert f"RuntimeError {words}" in printed


LEAVE = """
import glob
import torch
import torch.distributed as dist
from torch import nn
from scatterpar import ScatterOnceParallel

def running():
    names = [open(name).read() for name in glob.glob("/proc/self/task/*/comm")]
    return sum("gloo" in name for name in names)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(4, 2)
batch = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)
engine = ScatterOnceParallel(model, 2, ["cpu"] * 2, process_group=dist.group.WORLD)
engine.forward_backward(*batch, nn.CrossEntropyLoss())
assert running()
dist.destroy_process_group()
print(running(), "threads")
before = model.weight.grad.clone()
try:
    engine.forward_backward(*batch, nn.CrossEntropyLoss())
except RuntimeError as error:
    print(error)
assert torch.equal(before, model.weight.grad)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="asks Linux for its threads")
def test_the_end_of_a_group_is_the_end_of_its_threads():
    """The engine once held the group, and gloo's threads, alive after it was destroyed.

    Two of 15 runs of a script with two ranks then ended, after correct results, with "terminate
    called without an active exception": a thread of gloo's let go of a tensor of Python's while
    the interpreter was ending.
    """
    outcome = run("-c", LEAVE, GLOO_SOCKET_IFNAME="lo")
    assert outcome.code == 0, outcome.err
    threads, words = outcome.out.splitlines()
    assert threads == "0 threads"
    assert words.startswith("the engine's process group is gone, by dist.destroy_process_group()")
