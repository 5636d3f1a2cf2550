"""A rank that is lost: an error on the others, within the group's timeout. A group that is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from faults.forked import run_forked
from faults.processes import SILENCE
from harness.models import CLASSES, FEATURES, mlp
from harness.oracle import build, randint, randn
from harness.rank_processes import failure, run_on_ranks
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from scatterpar import ScatterOnceParallel

CRITERION = nn.CrossEntropyLoss()


def die(rank, store):
    """Three steps; rank 1 is killed before the third."""
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
        os.kill(os.getpid(), signal.SIGKILL)
    before = [p.grad.clone() for p in module.parameters()]
    kind, words = failure(engine.forward_backward, *batch, CRITERION)
    assert all(map(torch.equal, before, [p.grad for p in module.parameters()]))
    print(kind, words.splitlines()[-1], flush=True)


@pytest.mark.slow
def test_a_rank_that_is_lost_is_an_error_within_the_timeout(tmp_path):
    code = "import sys, test_ranks_lost as t; t.die(int(sys.argv[1]), *sys.argv[2:])"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(tmp_path / "store")],
            cwd=os.path.dirname(__file__),
            **options,
        )
        for rank in (0, 1)
    ]
    try:
        printed, _ = workers[0].communicate(timeout=SILENCE)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert "RuntimeError rank 0 of 2 waited " in printed
    assert "for the flags and counts of all ranks, and another rank was lost" in printed
    assert "nothing was changed on this rank" in printed


def absent(group, folder):
    limit = timedelta(seconds=100)
    pairs = [dist.new_group([0, 1], backend="cpu:gloo", timeout=limit) for _ in range(2)]
    if group.rank() == 2:
        return None
    module = build(mlp)
    batch = randn(4, FEATURES), randint(CLASSES, 4)
    engine = ScatterOnceParallel(module, process_group=pairs[0])
    for _ in range(2):
        engine.forward_backward(*batch, CRITERION)
    dist.barrier(group=pairs[1])
    found = []
    if group.rank() == 0:
        before = [p.grad.clone() for p in module.parameters()]
        for pair in pairs:  # only now, since on a busy machine one rank may be much later
            _set_pg_timeout(timedelta(seconds=0.5), pair)
        found.append(failure(engine.forward_backward, *batch, CRITERION))
        assert all(map(torch.equal, before, [p.grad for p in module.parameters()]))
        found.append(failure(ScatterOnceParallel, build(mlp), process_group=pairs[1]))
        (folder / "waited").touch()
    else:
        while not (folder / "waited").exists():  # alive, and not there
            time.sleep(0.02)
    for pair in pairs:
        dist.destroy_process_group(pair)
    return found


def test_who_waits_for_a_rank_that_does_not_come_says_what_for(tmp_path):
    found, *_ = run_on_ranks(3, absent, tmp_path)
    waited_for = ["the flags and counts of all ranks", "the other ranks' description of the module"]
    for (kind, words), what in zip(found, waited_for, strict=True):
        assert kind == "RuntimeError"
        assert re.match(rf"rank 0 of 2 waited \d+\.\d s for {what}, and another rank was", words)
        assert "did not come within the process group's timeout" in words
    assert "timeout; nothing was changed on this rank. The group cannot be used" in found[0][1]


def with_nccl_alone(group):
    with (
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        ScatterOnceParallel(build(mlp), process_group=group).close()
    return [str(warning.message) for warning in caught]


def test_a_group_without_gloo_is_warned_of():
    ((words,),) = run_on_ranks(1, with_nccl_alone)
    assert words.startswith("the process group has nccl alone, which ends this process where")
    assert 'init_process_group("cpu:gloo,' in words


LEAVE = """
import contextlib, glob, os, time
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import torch
import torch.distributed as dist
from torch import nn
from scatterpar import ScatterOnceParallel

def running():
    found = 0
    for name in glob.glob("/proc/self/task/*/comm"):
        with contextlib.suppress(OSError):  # a thread that has ended in between
            found += "gloo" in open(name).read()
    return found

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(4, 2)
batch = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)
engine = ScatterOnceParallel(model, 2, ["cpu"] * 2, process_group=dist.group.WORLD)
engine.forward_backward(*batch, nn.CrossEntropyLoss())
assert running()
dist.destroy_process_group()
deadline = time.monotonic() + 60
while running() and time.monotonic() < deadline:
    time.sleep(0.01)
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
    """The engine once held gloo's threads alive; two of 15 runs then ended with an abort."""
    outcome = run_forked("-c", LEAVE)
    assert outcome.code == 0, outcome.err
    threads, words = outcome.out.splitlines()
    assert threads == "0 threads"
    assert words.startswith("the engine's process group is gone, by dist.destroy_process_group()")
