"""Beside DistributedDataParallel between processes, and on paper for up to 256 GPUs."""

import statistics

import pytest

from benchmarks.machines.on_paper import GPUS, MACHINES, SETTINGS
from benchmarks.machines.ranks import DDP, ENGINE, measure
from benchmarks.models import CASES
from benchmarks.tables import Table
from benchmarks.timing import ratio

TOLERANCE = 1e-3  # relative, between float32 parameters after some steps with momentum


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_beside_ddp(benchmark, publish, quick, name):
    case = CASES[name].small() if quick else CASES[name]
    rounds = 3 if quick else 20
    found = benchmark.pedantic(measure, args=(case, 2, rounds), rounds=1)
    assert found["difference"] < TOLERANCE
    seconds = found["seconds"]
    rows = [
        [
            who,
            f"{statistics.median(times) * 1e3:.1f}",
            f"{min(times) * 1e3:.1f} to {max(times) * 1e3:.1f}",
            str(ratio(times, seconds[ENGINE])) if who != ENGINE else "1",
        ]
        for who, times in seconds.items()
    ]
    table = Table(["contender", "ms, median", "ms, range", "time / engine's"], rows)
    parts = [
        [
            "parameters after all steps differ by",
            f"{found['difference']:.0e}, relative",
        ],
        ["all-reduce of flags and counts", f"{found['small_seconds'] * 1e6:.0f} us"],
        [
            f"all-reduce of {found['data_bytes'] / 1e6:.2f} MB of gradients",
            f"{found['data_seconds'] * 1e3:.2f} ms",
        ],
        ["packing and scaling them", f"{found['pack_seconds'] * 1e3:.2f} ms"],
    ]
    assert set(seconds) == {ENGINE, DDP}
    publish(name, f"{table}\n\n{Table(['piece', 'measured'], parts)}", found)


def test_on_paper(benchmark, publish):
    columns = ["setting", *(f"{n * GPUS} GPUs" for n in MACHINES)]
    found = benchmark.pedantic(
        lambda: {
            name: [s.seconds(n) for n in MACHINES] for name, s in SETTINGS.items()
        },
        rounds=1,
    )
    rows = []
    for name, setting in SETTINGS.items():
        steps = zip(MACHINES, found[name], strict=True)
        rows.append(
            [
                name,
                *(
                    f"{sum(s.values()):.3f} s, {setting.efficiency(n):.1%}"
                    for n, s in steps
                ),
            ]
        )
    publish("on-paper", Table(columns, rows), {"seconds": found}, draw)


def draw(axes):
    """Efficiency over the number of GPUs."""
    gpus = [n * GPUS for n in MACHINES]
    for name, setting in SETTINGS.items():
        axes.plot(
            gpus, [100 * setting.efficiency(n) for n in MACHINES], "o-", label=name
        )
    axes.plot(
        [8, 256], [100, 90], "kx", label="reported by Goyal et al., 8 to 256 GPUs"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, gpus)
    axes.set(
        xlabel="GPUs, 8 a machine",
        ylabel="efficiency against one machine, %",
        ylim=(0, 105),
    )
    axes.grid(alpha=0.3)
    axes.legend()
