"""For pytest on the null CUDA (``-p nullcuda.plugin``): values for all operators.

With it every test runs under the race checker, and fails if that finds a pair of
accesses that nothing orders.
"""

from __future__ import annotations

import warnings
from functools import wraps

import pytest
import torch

from nullcuda import card, values
from nullcuda.races import races
from scatterpar.threads.workers import Job, Workers

_BUSY = 3  # queries of an event that find it not ready

if not card.is_null():
    raise RuntimeError(
        "nullcuda.plugin is for the null CUDA: run it with tests/nullcuda/run"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Torch warns that kernels are replaced.
    with warnings.catch_warnings(action="ignore"):
        values.install()
    card.busy(_BUSY)
    record_hand_overs()


def record_hand_overs() -> None:
    """The caller hands each job to the workers, and takes it over when they are done."""
    begin = Job.__init__
    run = Job.run
    wait = Workers._wait

    @wraps(begin)
    def begun(job, *args):
        begin(job, *args)
        card.hand_over(id(job))

    @wraps(run)
    def taken(job, number):
        work = job.calls[number]

        def told():
            card.take_over(id(job))
            try:
                return work()
            finally:
                card.hand_over(id(job))

        job.calls[number] = told
        run(job, number)

    @wraps(wait)
    def waited(workers, job, deadline):
        try:
            wait(workers, job, deadline)
        finally:
            card.take_over(id(job))

    Job.__init__ = begun
    Job.run = taken
    Workers._wait = waited


@pytest.fixture(autouse=True)
def _no_races():
    for device in range(torch.cuda.device_count()):
        if card.has_context(device):
            torch.cuda.synchronize(device)
    card.trace(True)
    yield
    card.trace(False)
    records = card.records()
    unordered = races(records)
    assert not unordered, f"accesses that nothing orders: {unordered[:6]}"
    kinds = {record.kind for record in records}
    assert "wrong_device" not in kinds, "launched on a wrong card"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for operator, why in values.failures.items():
        terminalreporter.write_line(f"no values for {operator}: {why}")
