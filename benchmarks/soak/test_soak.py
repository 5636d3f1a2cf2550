"""5,000 good steps, 500 faults and 50 interrupts: memory, threads and tensors, step by step."""

import dataclasses
import sys
from pathlib import Path

import pytest

from benchmarks.tables import Table

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from faults.places import PLACES
from faults.soak import soak

GROWTH_MEGABYTES = 20.0


def show(record):
    print(f"{record.steps[-1]}: {record.megabytes[-1]:.0f} MiB, wrong: {record.wrong}", flush=True)


@pytest.mark.filterwarnings("ignore")
def test_soak(quick, publish):
    sizes = (100, 20, 3) if quick else (5000, 500, 50)
    record = soak(*sizes, every=20 if quick else 50, report=show)
    first = len(record.steps) // 10 + 1  # after the allocator has warmed up
    ranges = {
        "threads": record.threads[first:],
        "live tensors": record.tensors[first:],
        "resident memory, MiB": record.megabytes[first:],
    }
    rows = [
        ["good steps, all exact", record.good, "", ""],
        ["faults, nothing changed", sum(record.faults.values()), "", ""],
        ["interrupted steps", record.interrupts, "", ""],
        *([what, "", f"{min(found):.0f}", f"{max(found):.0f}"] for what, found in ranges.items()),
    ]

    def draw(axes):
        axes.plot(record.steps, record.megabytes, label="resident memory, MiB")
        axes.plot(record.steps, record.tensors, label="live tensors")
        axes.plot(record.steps, record.threads, label="threads")
        axes.set(xlabel="step", ylim=(0, None), title=f"{sizes[0]} good steps, {sizes[1]} faults")
        axes.legend()

    data = {**dataclasses.asdict(record), "places": list(PLACES)}
    publish("soak", Table(["what", "count", "least", "most"], rows), data, draw)
    assert record.wrong == []
    assert max(ranges["threads"]) == min(ranges["threads"])
    assert max(ranges["live tensors"]) - min(ranges["live tensors"]) < 50
    assert ranges["resident memory, MiB"][-1] - ranges["resident memory, MiB"][0] < GROWTH_MEGABYTES
