"""What does the interpreter's lock cost several replicas?

``python -m benchmarks interpreter`` times steps of 1 to 8 replicas, of modules that
compute next to nothing, with the lock and, if there is a free-threaded Python, without.
Two bounds stand beside each time, of a bare loop over one replica's sub-steps::

    N x forward          the replicas' forward passes hold the lock in turn
    on so many cores     N x (forward + backward) / min(N, cores)
"""

import contextlib
import os
import statistics
import sys
from functools import partial
from itertools import product

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
    """Several builds of Python, or this one alone."""
    with contextlib.ExitStack() as stack:
        by_name = {}
        for command in commands():
            interpreter = stack.enter_context(Interpreter(command))
            by_name[interpreter.name] = interpreter
        if all(interpreter.has_lock for interpreter in by_name.values()):
            print(f"\nno {FREE_THREADED} on the PATH: only with the lock")
        yield by_name


@pytest.mark.parametrize("subject", SUBJECTS)
def test_replicas(benchmark, publish, quick, rounds, interpreters, subject):
    request = {
        "subject": subject,
        "accum": 2 if quick else ACCUM,
        "switch_interval": INTERVALS[0],
    }
    counts = REPLICAS[:2] if quick else REPLICAS
    parts = {}
    contenders = {}
    for name, interpreter in interpreters.items():
        parts[name] = []
        contenders[name, 0] = partial(loop, interpreter, request, parts[name])
        for replicas in counts:
            of_replicas = request | {"replicas": replicas}
            contenders[name, replicas] = partial(step, interpreter, of_replicas)
    seconds = interleaved(benchmark, contenders, rounds(ROUNDS))
    rows = []
    bounds = {}
    for name in interpreters:
        forward = statistics.median(part["forward"] for part in parts[name])
        backward = statistics.median(part["backward"] for part in parts[name])
        for replicas in counts:
            times = seconds[name, replicas]
            lock = replicas * forward
            cores = replicas * (forward + backward) / min(replicas, CORES)
            bounds[name, replicas] = (lock, cores)
            measured = lock, cores, statistics.median(times)
            milliseconds = [f"{1e3 * value:.1f}" for value in measured]
            over_one = str(ratio(times, seconds[name, 1]))
            rows.append([f"{name}, {replicas}", *milliseconds, over_one])
    columns = [
        "Python, replicas",
        "N x forward, ms",
        "on so many cores, ms",
        "step, ms",
        "over one replica",
    ]
    data = {
        "cores": CORES,
        "seconds": with_text_keys(seconds),
        "bounds": with_text_keys(bounds),
    }
    picture = draw(SUBJECTS[subject].title, seconds, bounds)
    publish(subject, Table(columns, rows), data, picture)


def test_switch_interval(benchmark, publish, quick, rounds, interpreters):
    """How long may a thread hold the lock while another one waits for it?"""
    locked = [name for name in interpreters if interpreters[name].has_lock]
    contenders = {}
    for name, subject, interval in product(locked, SUBJECTS, INTERVALS):
        request = {
            "subject": subject,
            "replicas": 2,
            "accum": 2 if quick else ACCUM,
            "switch_interval": interval,
        }
        contender = partial(step, interpreters[name], request)
        contenders[name, subject, interval] = contender
    seconds = interleaved(benchmark, contenders, rounds(ROUNDS))
    default, *shorter = INTERVALS
    rows = []
    for name, subject in product(locked, SUBJECTS):
        by_default = seconds[name, subject, default]
        row = [f"{name}, {subject}", f"{1e3 * statistics.median(by_default):.1f}"]
        for interval in shorter:
            row.append(str(ratio(seconds[name, subject, interval], by_default)))
        rows.append(row)
    columns = ["Python, module", f"{1e3 * default:g} ms: step, ms"]
    columns += [f"{1e3 * interval:g} ms, over that" for interval in shorter]
    data = {"seconds": with_text_keys(seconds)}
    publish("switch-interval", Table(columns, rows), data)


def with_text_keys(values):
    """For JSON, which has no tuples as keys."""
    return {str(key): value for key, value in values.items()}


def step(interpreter, request):
    """The seconds of one step."""
    return interpreter(**request)["step"]


def loop(interpreter, request, parts):
    """The seconds of one replica's sub-steps without an engine; ``parts`` gets both."""
    seconds = interpreter(**request, replicas=0)
    parts.append(seconds)
    return sum(seconds.values())


def draw(title, seconds, bounds):
    """Step times against replicas, and both bounds."""

    def on(axes):
        names = list(dict.fromkeys(name for name, _ in bounds))
        counts = sorted({count for _, count in bounds})
        for name in names:
            medians = []
            for count in counts:
                medians.append(1e3 * statistics.median(seconds[name, count]))
            (line,) = axes.plot(counts, medians, "o-", label=name)
            if "without" not in name:
                lock = [1e3 * bounds[name, count][0] for count in counts]
                colour = line.get_color()
                axes.plot(counts, lock, ":", color=colour, label="N x forward")
        cores = [1e3 * bounds[names[-1], count][1] for count in counts]
        axes.plot(counts, cores, "--", color="gray", label=f"on {CORES} cores")
        axes.set(
            xlabel="replicas",
            ylabel="milliseconds per step",
            title=title,
            ylim=(0, None),
        )
        axes.legend()

    return on
