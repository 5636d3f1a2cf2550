"""A device that is slowed down: how soon the shares settle, and how long the step then takes."""

import time

import torch
from torch import nn

from benchmarks.tables import Table
from scatterpar import ScatterOnceParallel

ROWS, ACCUM, STEPS = 320, 8, 8
SECONDS_A_ROW = 0.0005
SLOWER = 4


class Slowed(nn.Linear):
    """Takes a time of its own for every row, on the second device four times as long."""

    def forward(self, rows):
        slow = rows[0, 0].item() > 0  # the first column says which device a row is on
        time.sleep(SECONDS_A_ROW * len(rows) * (SLOWER if slow else 1))
        return super().forward(rows)


def test_shares(benchmark, publish, quick):
    found = benchmark.pedantic(measure, args=(3 if quick else STEPS,), rounds=1)
    rows = [
        [number, f"{step['rows'][0]} + {step['rows'][1]}", f"{1e3 * step['seconds']:.0f} ms"]
        for number, step in enumerate(found, 1)
    ]
    best = ROWS * SECONDS_A_ROW * SLOWER / (SLOWER + 1)
    table = Table(["step", "rows of each device", "time"], rows)
    publish("steps", table, {"steps": found, "arithmetic": best})


def measure(steps):
    """The plan and the time of each step."""
    found = []
    with ScatterOnceParallel(Slowed(4, 1), ACCUM, ["cpu:0", "cpu:1"], shares="auto") as engine:
        for _ in range(steps):
            inputs = torch.zeros(ROWS, 4)
            inputs[engine.plan(ROWS).shares[0].stop :, 0] = 1
            start = time.perf_counter()
            engine.forward_backward(inputs, torch.zeros(ROWS, 1), nn.MSELoss())
            seconds = time.perf_counter() - start
            found.append(
                {"rows": [s.rows for s in engine.last_step.plan.shares], "seconds": seconds}
            )
    return found
