"""kill -9 of a rank: torchrun starts all again, and the run ends as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import time

import psutil
import pytest
from helpers.torchrun import differences, finish, launched, steps, wait_until

TOOL = [
    *("--model", "helpers.torchrun:Slow", "--batch", "1024", "--devices", "cpu", "--accum", "2"),
    *("--checkpoint-every", "3"),
]
LAUNCHER = ["--standalone", "--nproc-per-node=2", "--monitor-interval=0.1"]
STEPS_PER_EPOCH = 8


def wait_for_step(out, number, process, log, attempts):
    """In the attempt after so many others: until it says so, the file has the steps of those."""

    def reached():
        assert process.poll() is None, "it ended before it could be killed"
        resumed = log.read_text(errors="replace").count("resumed after")
        return resumed == attempts and len(steps(out)) >= number

    wait_until(reached, out.parent)


def kill_a_rank(process, rank):
    """SIGKILL to a worker of torchrun's, which is a child of ``timeout``'s."""
    ours = psutil.Process(process.pid).children(recursive=True)
    workers = [p for p in ours if "scatterpar" in p.cmdline() and "--monitor" not in p.cmdline()]
    workers = [p for p in workers if p.environ().get("LOCAL_RANK") == str(rank)]
    os.kill(workers[0].pid, signal.SIGKILL)


def run(folder, name, epochs, kills=()):
    out, log = folder / name, folder / f"{name}.log"
    launcher = [*LAUNCHER, f"--max-restarts={len(kills)}"]
    tool = [*TOOL, "--epochs", str(epochs), "--out", str(out)]
    with launched(launcher, tool, log) as process:
        for attempts, (rank, step) in enumerate(kills):
            wait_for_step(out, step, process, log, attempts)
            kill_a_rank(process, rank)
        return out, finish(process, log)


def kill_and_compare(folder, epochs, kills):
    whole, _ = run(folder, "whole", epochs)
    start = time.monotonic()
    out, printed = run(folder, "killed", epochs, kills)
    print(f"{len(kills)} kills, {time.monotonic() - start:.0f} s; {printed.count('resumed after')}")
    assert printed.count("resumed after") == len(kills)
    assert differences(whole, out) == []
    first, second = ([(r["step"], r["loss"]) for r in steps(path)] for path in (whole, out))
    assert first == second
    assert len(first) == epochs * STEPS_PER_EPOCH


@pytest.mark.slow
def test_a_killed_rank_costs_nothing_but_time(tmp_path):
    kill_and_compare(tmp_path, epochs=2, kills=[(1, 5), (0, 11)])


@pytest.mark.slow
def test_ten_kills_at_random_steps(tmp_path):
    chance = random.Random(0)
    at = sorted(chance.sample(range(4, 38), 10))
    kill_and_compare(tmp_path, epochs=5, kills=[(chance.randrange(2), step) for step in at])
