"""The report of a step, from its outcome."""

from __future__ import annotations

from scatterpar.report import GraphReport, StepReport
from scatterpar.step.reduce import Outcome
from scatterpar.step.substeps import Schedule


def make_report(outcome: Outcome, waited: float, schedule: Schedule) -> StepReport:
    """Report a step, which began ``waited`` seconds after the last one."""
    attempt = outcome.attempt
    device_seconds: list[float] = []
    launch_seconds: list[float] = []
    for clock in outcome.clocks:  # none of a step of two passes
        working = clock.working()
        if working is None:  # a device is not done: no time is shown
            device_seconds.clear()
            launch_seconds.clear()
            break
        device_seconds.append(working)
        launch_seconds.append(clock.launching)
    num_substeps = 0
    for share_weights in attempt.weights.by_share:
        num_substeps += len(share_weights)
    graphs = GraphReport(schedule.replayed, num_substeps, schedule.why_eager)
    return StepReport(
        plan=attempt.plan,
        loss=outcome.loss,
        seconds=attempt.seconds,
        bytes=attempt.transfers.bytes,
        messages=attempt.transfers.messages,
        retries=attempt.retries,
        waited=waited,
        replica_seconds=tuple(attempt.threads.seconds),
        device_seconds=tuple(device_seconds),
        launch_seconds=tuple(launch_seconds),
        check_seconds=attempt.check_seconds,
        graphs=graphs,
        graphs_are_off=schedule.graphs_are_off,
        may_still_capture=schedule.may_still_capture,
        is_compiled=attempt.replicas.has_compiled(),
        logged=dict(outcome.logged),
    )
