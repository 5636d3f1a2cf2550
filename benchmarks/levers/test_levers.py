"""What each lever is worth: the engine with it, and without it."""

import statistics
from contextlib import ExitStack

import pytest

from benchmarks.levers.variants import KEPT, LEVERS
from benchmarks.models import CASES
from benchmarks.processes import Gang
from benchmarks.step_time.test_step_time import disagreement, draw
from benchmarks.tables import Table
from benchmarks.timing import interleaved, ratio


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_levers(benchmark, publish, quick, name):
    case = CASES[name].small() if quick else CASES[name]
    with ExitStack() as stack:
        gangs = {lever: stack.enter_context(Gang(lever, case, 1)) for lever in LEVERS}
        errors = disagreement(gangs, KEPT)
        steps = {lever: gang.step for lever, gang in gangs.items()}
        seconds = interleaved(benchmark, steps, 3 if quick else 15)
    rows = [
        [
            lever,
            f"{statistics.median(times) * 1e3:.1f}",
            str(ratio(times, seconds[KEPT])) if lever != KEPT else "1",
        ]
        for lever, times in seconds.items()
    ]
    table = Table(["one lever off", "ms, median", "time / with all levers"], rows)
    publish(name, table, {"seconds": seconds, "errors": errors}, draw(seconds))
