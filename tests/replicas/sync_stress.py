"""Random programs with synchronised layers: exact steps, failures, interrupts.

    python tests/replicas/sync_stress.py FIRST_SEED PROGRAMS

Each program makes a network, a layout and a plan at random and takes steps. Some of
them fail in one replica, some are interrupted at a random moment. After each the state
is compared with plain torch's, or with that before the step. A program that does not
end within its limit prints where its threads wait, and ends the process.
"""

from __future__ import annotations

import copy
import faulthandler
import itertools
import os
import random
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.oracle import randn
from replicas.test_sync_batch_norm import (
    assert_same_buffers,
    assert_same_gradients,
    plain_step,
)

from scatterpar import ScatterOnceParallel

LIMIT_SECONDS = 60  # per program; one takes less than a second on an idle machine
STEPS = 5


class Boom(Exception):
    """The error that a replica raises."""


class Net(nn.Module):
    """Linear layers with batch normalisation between; it raises where it is told to."""

    def __init__(self, widths):
        super().__init__()
        blocks = []
        for width, following in itertools.pairwise(widths):
            blocks.append(nn.Linear(width, following))
            blocks.append(nn.BatchNorm1d(following))
            blocks.append(nn.Tanh())
        self.blocks = nn.ModuleList(blocks)
        self.failing_row = -1
        self.failing_block = 0
        self.in_backward = False

    def forward(self, inputs):
        numbers = inputs[:, -1]
        hidden = inputs
        for number, block in enumerate(self.blocks):
            fails = number == self.failing_block and self.failing_row in numbers
            if fails and not self.in_backward:
                raise Boom
            hidden = block(hidden)
            if fails and hidden.requires_grad:
                hidden.register_hook(self.boom)
        return hidden

    def boom(self, _):
        raise Boom


def criterion(outputs, targets):
    """Slow enough for interrupts to arrive in the middle of a step."""
    return (outputs - targets).square().mean()


def program(seed):
    """One network and its steps; returns how many steps were exact, failed and
    interrupted.
    """
    chance = random.Random(seed)
    replicas = chance.randint(2, 5)
    memories = chance.randint(1, replicas)
    layout = ["cpu:0", *(f"cpu:{chance.randrange(memories)}" for _ in range(replicas))]
    layout = layout[:replicas]
    widths = [chance.randint(2, 5) for _ in range(chance.randint(2, 4))]
    torch.manual_seed(seed)
    plain = Net(widths).double()
    module = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    counts = {"exact": 0, "failed": 0, "interrupted": 0}
    accum = chance.randint(1, 4)
    with ScatterOnceParallel(module, accum, layout, verify=False) as engine:
        for step in range(STEPS):
            rows = chance.randint(2 * replicas * accum, 9 * replicas * accum)
            inputs = randn(rows, widths[0], seed=seed + step)
            inputs[:, -1] = torch.arange(rows)
            targets = randn(rows, widths[-1], seed=seed - step)
            kind = chance.choice(("exact", "exact", "failed", "interrupted"))
            module.failing_row = chance.randrange(rows) if kind == "failed" else -1
            module.failing_block = chance.randrange(len(module.blocks))
            module.in_backward = chance.random() < 0.5
            delay = chance.random() * 0.02
            ended = take_step(engine, inputs, targets, kind, delay)
            counts[ended] += 1
            if ended == "exact":
                plain.zero_grad()
                plan = engine.plan(rows)
                plain_step(plain, plan, inputs, targets, criterion)
                assert_same_gradients(module, plain)
                assert_same_buffers(module, plain)
    return counts


def take_step(engine, inputs, targets, kind, delay):
    """How the step has ended; after a failure everything must be as before."""
    module = engine.module
    module.zero_grad()
    before = copy.deepcopy(module.state_dict())
    interrupt = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    try:
        try:
            if kind == "interrupted":
                interrupt.start()
            engine.forward_backward(inputs, targets, criterion)
            ended = "exact"
        finally:
            if kind == "interrupted":
                interrupt.join()  # one that comes late is raised here
    except Boom:
        ended = "failed"
    except KeyboardInterrupt:
        ended = "interrupted"
        has_committed = any(p.grad is not None for p in module.parameters())
        if has_committed:  # it came after the step
            return "exact"
    if ended != "exact":
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name]), f"{name} has changed"
        assert all(p.grad is None for p in module.parameters())
    assert (ended == "failed") == (kind == "failed"), f"{kind} step: {ended}"
    return ended


def main():
    first, programs = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    totals = {"exact": 0, "failed": 0, "interrupted": 0}
    for seed in range(first, first + programs):
        faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
        try:
            counts = program(seed)
        except BaseException:
            print("program", seed, flush=True)
            raise
        for kind, count in counts.items():
            totals[kind] += count
    faulthandler.cancel_dump_traceback_later()
    print(" ".join(f"{kind} {count}" for kind, count in totals.items()))


if __name__ == "__main__":
    main()
