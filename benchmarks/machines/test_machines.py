"""What do more machines cost? Beside DistributedDataParallel, and on paper.

``python -m benchmarks machines`` times two gloo processes on one machine, each of which
runs steps of the engine and of DDP in turn (``ranks.py``), and computes the step time on
up to 256 GPUs by a formula (``on_paper.py``).
"""

import statistics

import pytest

from benchmarks.machines.on_paper import GPUS, MACHINES, SETTINGS
from benchmarks.machines.ranks import DDP, ENGINE, measure
from benchmarks.models import CASES
from benchmarks.tables import Table
from benchmarks.timing import ratio

TOLERANCE = 1e-3  # relative, between float32 parameters after some steps with momentum


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_beside_ddp(benchmark, publish, quick, rounds, name):
    case = CASES[name].small() if quick else CASES[name]
    count = rounds(20)
    results = benchmark.pedantic(measure, args=(case, 2, count), rounds=1)
    assert results["difference"] < TOLERANCE
    publish(name, f"{times_of(results)}\n\n{pieces_of(results)}", results)


def times_of(results):
    """The contenders' step times."""
    seconds = results["seconds"]
    rows = []
    for name in (ENGINE, DDP):
        milliseconds = [1e3 * time for time in seconds[name]]
        middle = f"{statistics.median(milliseconds):.1f}"
        extremes = f"{min(milliseconds):.1f} to {max(milliseconds):.1f}"
        beside = "1"
        if name != ENGINE:
            beside = str(ratio(seconds[name], seconds[ENGINE]))
        rows.append([name, middle, extremes, beside])
    return Table(["contender", "ms, median", "ms, range", "time / engine's"], rows)


def pieces_of(results):
    """What a step between machines adds, and how far the contenders are apart."""
    megabytes = results["data_bytes"] / 1e6
    difference = f"{results['difference']:.0e}, relative"
    flags = f"{results['small_seconds'] * 1e6:.0f} us"
    gradients = f"{results['data_seconds'] * 1e3:.2f} ms"
    packing = f"{results['pack_seconds'] * 1e3:.2f} ms"
    rows = [
        ["parameters after all steps differ by", difference],
        ["all-reduce of flags and counts", flags],
        [f"all-reduce of {megabytes:.2f} MB of gradients", gradients],
        ["packing and scaling them", packing],
    ]
    return Table(["piece", "measured"], rows)


def test_on_paper(benchmark, publish):
    seconds = benchmark.pedantic(compute, rounds=1)
    rows = []
    for name, setting in SETTINGS.items():
        cells = []
        for number in MACHINES:
            efficiency = setting.efficiency(number)
            cells.append(f"{setting.total(number):.3f} s, {efficiency:.1%}")
        rows.append([name, *cells])
    columns = ["setting", *[f"{number * GPUS} GPUs" for number in MACHINES]]
    publish("on-paper", Table(columns, rows), {"seconds": seconds}, draw)


def compute():
    """The parts of a step, by setting and number of machines."""
    seconds = {}
    for name, setting in SETTINGS.items():
        seconds[name] = [setting.seconds(number) for number in MACHINES]
    return seconds


def draw(axes):
    """Efficiency over the number of GPUs."""
    gpus = [number * GPUS for number in MACHINES]
    for name, setting in SETTINGS.items():
        efficiencies = [100 * setting.efficiency(number) for number in MACHINES]
        axes.plot(gpus, efficiencies, "o-", label=name)
    reported = "reported by Goyal et al., 8 to 256 GPUs"
    axes.plot([8, 256], [100, 90], "kx", label=reported)
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, gpus)
    axes.set_xlabel("GPUs, 8 a machine")
    axes.set_ylabel("efficiency against one machine, %")
    axes.set_ylim(0, 105)
    axes.grid(alpha=0.3)
    axes.legend()
