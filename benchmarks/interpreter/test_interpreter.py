"""Steps of 1 to 8 replicas with the interpreter's lock and without, beside what bounds
them.
"""

import contextlib
import os
import statistics
import sys
from functools import partial

import pytest

from benchmarks.interpreter.interpreters import FREE_THREADED, Interpreter, commands
from benchmarks.interpreter.modules import SUBJECTS
from benchmarks.tables import Table
from benchmarks.timing import interleaved, ratio

REPLICAS = (1, 2, 4, 8)
ACCUM = 8
ROUNDS = 9
INTERVALS = (sys.getswitchinterval(), 5e-4, 5e-5)
CORES = len(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def interpreters():
    """What is measured: several builds of Python, or this one alone."""
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(Interpreter(command)) for command in commands().values()
        ]
        if all(one.found["lock"] for one in found):
            print(f"\nno {FREE_THREADED} on the PATH: only with the lock")
        yield {one.name: one for one in found}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_replicas(benchmark, publish, quick, interpreters, subject):
    request = {
        "subject": subject,
        "accum": 2 if quick else ACCUM,
        "switch_interval": INTERVALS[0],
    }
    counts = REPLICAS[:2] if quick else REPLICAS
    parts, contenders = {}, {}
    for name, interpreter in interpreters.items():
        parts[name] = []
        contenders[name, 0] = partial(loop, interpreter, request, parts[name])
        for replicas in counts:
            contenders[name, replicas] = partial(
                step, interpreter, request | {"replicas": replicas}
            )
    seconds = interleaved(benchmark, contenders, 3 if quick else ROUNDS)
    rows, bounds = [], {}
    for name in interpreters:
        forward, backward = (
            statistics.median(one[part] for one in parts[name])
            for part in ("forward", "backward")
        )
        for replicas in counts:
            took = seconds[name, replicas]
            lock = replicas * forward
            cores = replicas * (forward + backward) / min(replicas, CORES)
            bounds[name, replicas] = (lock, cores)
            rows.append(
                [
                    f"{name}, {replicas}",
                    *(
                        f"{1e3 * value:.1f}"
                        for value in (lock, cores, statistics.median(took))
                    ),
                    str(ratio(took, seconds[name, 1])),
                ]
            )
    columns = [
        "Python, replicas",
        "N x forward, ms",
        "on so many cores, ms",
        "step, ms",
        "over one replica",
    ]
    data = {
        "cores": CORES,
        "seconds": {str(key): value for key, value in seconds.items()},
        "bounds": {str(key): value for key, value in bounds.items()},
    }
    publish(
        subject,
        Table(columns, rows),
        data,
        draw(SUBJECTS[subject].title, seconds, bounds),
    )


def test_switch_interval(benchmark, publish, quick, interpreters):
    """What a thread may keep the lock for while another waits for it."""
    locked = {name: one for name, one in interpreters.items() if one.found["lock"]}
    accum = 2 if quick else ACCUM
    contenders = {
        (name, subject, interval): partial(
            step,
            interpreter,
            {
                "subject": subject,
                "replicas": 2,
                "accum": accum,
                "switch_interval": interval,
            },
        )
        for name, interpreter in locked.items()
        for subject in SUBJECTS
        for interval in INTERVALS
    }
    seconds = interleaved(benchmark, contenders, 3 if quick else ROUNDS)
    rows = [
        [
            f"{name}, {subject}",
            f"{1e3 * statistics.median(seconds[name, subject, INTERVALS[0]]):.1f}",
            *(
                str(
                    ratio(
                        seconds[name, subject, interval],
                        seconds[name, subject, INTERVALS[0]],
                    )
                )
                for interval in INTERVALS[1:]
            ),
        ]
        for name in locked
        for subject in SUBJECTS
    ]
    default, *others = (f"{1e3 * interval:g} ms" for interval in INTERVALS)
    columns = [
        "Python, module",
        f"{default}: step, ms",
        *(f"{one}, over that" for one in others),
    ]
    data = {"seconds": {str(key): value for key, value in seconds.items()}}
    publish("switch-interval", Table(columns, rows), data)


def step(interpreter, request):
    """The seconds of one step."""
    return interpreter(**request)["step"]


def loop(interpreter, request, parts):
    """The seconds of one replica's sub-steps without an engine; ``parts`` takes them
    apart.
    """
    found = interpreter(**request, replicas=0)
    parts.append(found)
    return sum(found.values())


def draw(title, seconds, bounds):
    """Step times against replicas, and what the lock and the cores would
    allow at best.
    """

    def on(axes):
        counts = sorted({n for _, n in bounds})
        for name in {name: None for name, _ in bounds}:
            medians = [1e3 * statistics.median(seconds[name, n]) for n in counts]
            (line,) = axes.plot(counts, medians, "o-", label=name)
            if "without" not in name:
                lock = [1e3 * bounds[name, n][0] for n in counts]
                axes.plot(
                    counts, lock, ":", color=line.get_color(), label="N x forward"
                )
        cores = [1e3 * bounds[name, n][1] for n in counts]
        axes.plot(counts, cores, "--", color="gray", label=f"on {CORES} cores")
        axes.set(
            xlabel="replicas",
            ylabel="milliseconds per step",
            title=title,
            ylim=(0, None),
        )
        axes.legend()

    return on
