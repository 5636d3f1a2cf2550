"""How long one optimizer step's gradient takes, compiled and not: the engine and DDP."""

import statistics
from contextlib import ExitStack

import pytest

from benchmarks.models import KNOWN
from benchmarks.processes import Gang
from benchmarks.tables import Table
from benchmarks.timing import interleaved, ratio

REPLICAS = 2
EAGER = "engine"
CONTENDERS = {
    EAGER: ("engine", 1),
    "engine, compiled": ("engine, compiled", 1),
    "DistributedDataParallel, no_sync": ("ddp", REPLICAS),
    "DistributedDataParallel, no_sync, compiled": ("ddp, compiled", REPLICAS),
}
TOLERANCE = 1e-4  # relative, between float32 gradients summed in different orders


@pytest.mark.parametrize("name", ["cnn", "mlp", "gpt"])
def test_compiled(benchmark, publish, quick, name):
    case = KNOWN[name].small() if quick else KNOWN[name]
    with ExitStack() as stack:
        gangs = {
            who: stack.enter_context(Gang(kind, case, world))
            for who, (kind, world) in CONTENDERS.items()
        }
        expected = gangs[EAGER].gradient()
        for who, gang in gangs.items():
            error = float((gang.gradient() - expected).norm() / expected.norm())
            assert error < TOLERANCE, f"{who} computes another gradient: {error:.1e}"
        steps = {who: gang.step for who, gang in gangs.items()}
        seconds = interleaved(benchmark, steps, 3 if quick else 15)
    rows = [
        [
            who,
            f"{statistics.median(times) * 1e3:.1f}",
            f"{min(times) * 1e3:.1f} to {max(times) * 1e3:.1f}",
            str(ratio(times, seconds[EAGER])) if who != EAGER else "1",
        ]
        for who, times in seconds.items()
    ]
    columns = ["contender", "ms, median", "ms, range", "time / eager engine's"]
    publish(name, Table(columns, rows), {"seconds": seconds})
