"""What do parameters and gradients take on 2, 4 and 8 cards?

``python -m benchmarks many_cards`` steps on simulated cards, in a process for each
number of them: memory and messages (``count.py``), arriving rows (``arrival.py``), the
optimizer's state (``sharded.py``), and the host's time (``host.py``). It also divides
eight replicas among processes (``launchers.py``).
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.many_cards import launchers
from benchmarks.tables import Table
from benchmarks.timing import ratio

ROOT = Path(__file__).parents[2]
DEVICES = (2, 4, 8)
MODELS = ["resnet101", pytest.param("gpt2", marks=pytest.mark.longer)]
STEPS = ("first", "later", "kept")  # as in ``count.py``
PHASES = ("scatter", "replicate", "compute", "reduce", "commit")
ROUNDS = 5
SECONDS = 1800  # the limit of a process
PLACES = {"pinned": "pinned", "host": "on the host", "card": "on the first card"}
BUILD = """
import pathlib, simulated, sys
print(simulated.build(pathlib.Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Calls a module of this folder in a process: its name, its argument, devices."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to build the simulated accelerator")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        # Work that waits in queues would keep this machine's memory.
        "SIMULATED_ORDER": "eager",
    }
    folder = tmp_path_factory.mktemp("simulated")
    library = _run(["-c", BUILD, str(folder)], environment)
    environment["SIMULATED_ACCELERATOR"] = library

    def ask(module, argument, devices):
        module = f"benchmarks.many_cards.{module}"
        count = str(devices)
        arguments = ["-m", module, argument, count]
        return json.loads(_run(arguments, environment | {"SIMULATED_DEVICES": count}))

    return ask


def _run(arguments, environment):
    """The last line that a process of Python prints."""
    process = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()[-1]


@pytest.fixture
def sizes(quick):
    """The numbers of devices."""
    return DEVICES[:1] if quick else DEVICES


@pytest.fixture
def counted_model(quick, name):
    """The model that stands for ``name`` in this run."""
    return "small" if quick else name


@pytest.mark.parametrize("name", MODELS)
def test_many_cards(benchmark, publish, ask, sizes, counted_model, name):
    def measure():
        return {devices: ask("count", counted_model, devices) for devices in sizes}

    counts = benchmark.pedantic(measure, rounds=1)
    rows = []
    for devices, by_step in counts.items():
        for step in STEPS:
            cells = _cells(by_step[step], by_step["parameters"])
            rows.append([devices, step, *cells])
    memory = ["master", "others"]
    columns = ["cards", "step", *memory, "messages out", "back", "waits", "kernels"]
    publish(name, Table(columns, rows), {"counts": counts})


def _cells(counts, parameters):
    """Of one step: peaks, messages, waits and kernels."""
    peaks = []
    for card in ("master", "others"):
        size = counts[card]
        peaks.append(f"{size / 2**20:.0f} MiB ({size / parameters:.2f} P)")
    messages = counts["messages"]
    sent = [messages["replicate"], messages["reduce"]]
    return [*peaks, *sent, counts["blocking_copies"], counts["kernels"]]


@pytest.mark.longer
def test_arrival(benchmark, publish, ask, sizes):
    def measure():
        seconds = {}
        for place in PLACES:
            by_devices = {devices: ask("arrival", place, devices) for devices in sizes}
            seconds[place] = by_devices
        return seconds

    seconds = benchmark.pedantic(measure, rounds=1)
    rows = []
    for place, by_devices in seconds.items():
        for devices, result in by_devices.items():
            for times in _times_by_link(result):
                rows.append([PLACES[place], devices, *times, _peak(result)])
    times = ["compute", "arrival", "one micro-batch", "both"]
    columns = ["the batch is", "cards", *times, "rows"]
    publish("arrival", Table(columns, rows), {"seconds": seconds})


def _times_by_link(result):
    """Milliseconds of a step, as text: a row for each speed of the links."""
    rows = []
    for number in range(len(result["links"])):
        times = [result["compute"]]
        for kind in ("arrival", "micro_batch", "both"):
            times.append(result[kind][number])
        rows.append([f"{1e3 * time:.0f} ms" for time in times])
    return rows


def _peak(result):
    ratio = result["peak"] / result["bytes_of_a_micro_batch"]
    return f"{ratio:.1f} micro-batches"


@pytest.mark.longer
@pytest.mark.parametrize("name", MODELS)
def test_sharded_optimizer(benchmark, publish, ask, sizes, counted_model, name):
    def measure():
        return {devices: ask("sharded", counted_model, devices) for devices in sizes}

    counts = benchmark.pedantic(measure, rounds=1)
    rows = []
    for devices, by_optimizer in counts.items():
        for kind, of_kind in by_optimizer.items():
            rows.append([devices, kind, *_in_models(of_kind)])
        rows.append([devices, "ZeRO-1, by arithmetic", *_zero_1(devices)])
    peaks = ["master, backward", "master, step", "others, backward", "others, step"]
    columns = ["cards", "optimizer", *peaks]
    columns += ["between steps", "through the busiest card"]
    publish(f"sharded-{name}", Table(columns, rows), {"counts": counts})


def _in_models(counts):
    """Bytes as multiples of the parameters' bytes, P."""
    backward = counts["backward"]
    step = counts["step"]
    sizes = [backward[0], step[0], max(backward[1:]), max(step[1:])]
    sizes += [max(counts["held"]), max(counts["crossed"])]
    return [f"{size / counts['parameters']:.2f} P" for size in sizes]


def _zero_1(devices):
    """Parameters, gradients and a part of the state; peaks have no formula."""
    between_steps = 2 + 2 / devices
    # A reduce-scatter and an all-gather over a ring, in and out.
    crossed = 4 * (devices - 1) / devices
    return [*"----", f"{between_steps:.2f} P", f"{crossed:.2f} P"]


@pytest.mark.longer
@pytest.mark.parametrize("name", MODELS)
def test_host_time(benchmark, publish, rounds, ask, sizes, name):
    def measure():
        results = []
        for _ in range(rounds(ROUNDS)):
            results.append({devices: ask("host", name, devices) for devices in sizes})
        return results

    results = benchmark.pedantic(measure, rounds=1)
    rows = []
    for devices in sizes:
        for step in STEPS:
            times = []
            for part in (*PHASES, "caller", "workers"):
                seconds = [result[devices][step][part] for result in results]
                times.append(f"{1e3 * statistics.median(seconds):.1f}")
            rows.append([devices, step, *times])
    threads = ["the caller in all", "the replicas' threads"]
    columns = ["cards", "step", *PHASES, *threads]
    publish(f"host-{name}", Table(columns, rows), {"seconds": results})


@pytest.mark.longer
def test_launchers(benchmark, publish, quick, rounds):
    counts = [1, 2] if quick else [1, 2, 4]
    arguments = counts, rounds(11), 2 if quick else 8
    seconds = benchmark.pedantic(launchers.measure, args=arguments, rounds=1)
    rows = []
    for count, times in seconds.items():
        milliseconds = f"{1e3 * statistics.median(times):.0f}"
        beside = "1" if count == 1 else str(ratio(times, seconds[1]))
        replicas = launchers.REPLICAS // count
        rows.append([count, replicas, milliseconds, beside])
    columns = ["processes", "replicas of each", "step, ms", "beside one process"]
    publish("launchers", Table(columns, rows), {"seconds": seconds})
