"""Memory, messages, waits and the host's time of one step on 2, 4 and 8 simulated
cards.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tables import Table

ROOT = Path(__file__).parents[2]
DEVICES = (2, 4, 8)
STEPS = ("first", "later", "kept")
PHASES = ("scatter", "replicate", "compute", "reduce", "commit")
ROUNDS = 5
SECONDS = 1800


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """What a module of this folder says in a process of its own, of a model on some
    devices.
    """
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to build the simulated accelerator")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    folder = tmp_path_factory.mktemp("simulated")
    build = (
        "import pathlib, simulated, sys; "
        "print(simulated.build(pathlib.Path(sys.argv[1])))"
    )
    built = _run([sys.executable, "-c", build, str(folder)], environment)

    def asked(module, name, devices):
        more = {"SIMULATED_ACCELERATOR": built, "SIMULATED_DEVICES": str(devices)}
        # work that waits would keep this machine's memory
        more["SIMULATED_ORDER"] = "eager"
        command = [
            sys.executable,
            "-m",
            f"benchmarks.many_cards.{module}",
            name,
            str(devices),
        ]
        return json.loads(_run(command, environment | more))

    return asked


def _run(command, environment):
    done = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", ["resnet101", "gpt2"])
def test_many_cards(benchmark, publish, quick, ask, name):
    sizes = DEVICES[:1] if quick else DEVICES
    name_of_model = "small" if quick else name
    found = benchmark.pedantic(
        lambda: {devices: ask("count", name_of_model, devices) for devices in sizes},
        rounds=1,
    )
    columns = [
        "cards",
        "step",
        "master",
        "others",
        "messages out",
        "back",
        "waits",
        "kernels",
    ]
    rows = [
        [devices, step, *_cells(counts[step], counts["parameters"])]
        for devices, counts in found.items()
        for step in STEPS
    ]
    publish(name, Table(columns, rows), {"counts": found})


def _cells(counted, parameters):
    peaks = [
        f"{counted[who] / 2**20:.0f} MiB ({counted[who] / parameters:.2f} P)"
        for who in ("master", "others")
    ]
    messages = [counted["messages"][phase] for phase in ("replicate", "reduce")]
    return [*peaks, *messages, counted["blocking_copies"], counted["kernels"]]


def test_arrival(benchmark, publish, quick, ask):
    sizes = DEVICES[:1] if quick else DEVICES
    found = benchmark.pedantic(
        lambda: {
            place: {devices: ask("arrival", place, devices) for devices in sizes}
            for place in ("pinned", "host", "card")
        },
        rounds=1,
    )
    columns = [
        "the batch is",
        "cards",
        "compute",
        "arrival",
        "one micro-batch",
        "both",
        "rows",
    ]
    rows = [
        [
            {"pinned": "pinned", "host": "on the host", "card": "on the first card"}[
                place
            ],
            devices,
            *[f"{1e3 * each:.0f} ms" for each in (one["compute"], *times)],
            f"{one['peak'] / one['bytes_of_a_micro_batch']:.1f} micro-batches",
        ]
        for place, counts in found.items()
        for devices, one in counts.items()
        for times in zip(one["arrival"], one["micro_batch"], one["both"], strict=True)
    ]
    publish("arrival", Table(columns, rows), {"seconds": found})


@pytest.mark.parametrize("name", ["resnet101", "gpt2"])
def test_sharded_optimizer(benchmark, publish, quick, ask, name):
    sizes = DEVICES[:1] if quick else DEVICES
    name_of_model = "small" if quick else name
    found = benchmark.pedantic(
        lambda: {devices: ask("sharded", name_of_model, devices) for devices in sizes},
        rounds=1,
    )
    columns = [
        "cards",
        "optimizer",
        "master, backward",
        "master, step",
        "others, backward",
    ]
    columns += ["others, step", "between steps", "through the busiest card"]
    rows = []
    for n, counts in found.items():
        rows += [[n, kind, *_in_models(counted)] for kind, counted in counts.items()]
        through = 4 * (n - 1) / n  # a reduce-scatter and an all-gather, in and out
        rows += [
            [
                n,
                "ZeRO-1, by arithmetic",
                *"----",
                f"{2 + 2 / n:.2f} P",
                f"{through:.2f} P",
            ]
        ]
    publish(f"sharded-{name}", Table(columns, rows), {"counts": found})


def _in_models(counted):
    backward, step = counted["backward"], counted["step"]
    peaks = [backward[0], step[0], max(backward[1:]), max(step[1:])]
    numbers = [*peaks, max(counted["held"]), max(counted["crossed"])]
    return [f"{number / counted['parameters']:.2f} P" for number in numbers]


@pytest.mark.parametrize("name", ["resnet101", "gpt2"])
def test_host_time(benchmark, publish, quick, ask, name):
    sizes = DEVICES[:1] if quick else DEVICES
    rounds = benchmark.pedantic(
        lambda: [
            {devices: ask("host", name, devices) for devices in sizes}
            for _ in range(1 if quick else ROUNDS)
        ],
        rounds=1,
    )
    columns = ["cards", "step", *PHASES, "the caller in all", "the replicas' threads"]
    busy = [*PHASES, "caller", "workers"]
    rows = [
        [devices, step, *[_milliseconds(rounds, devices, step, who) for who in busy]]
        for devices in sizes
        for step in STEPS
    ]
    publish(f"host-{name}", Table(columns, rows), {"seconds": rounds})


def _milliseconds(rounds, devices, step, who):
    return f"{1e3 * statistics.median(one[devices][step][who] for one in rounds):.1f}"
