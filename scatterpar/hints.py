"""What would make a step faster: one hint, from its times."""

from __future__ import annotations

from typing import NamedTuple

# A hint tells of a serial part that is larger.
_MUCH_SERIAL = 0.15


class StepTraits(NamedTuple):
    """What the hint depends on.

    Attributes:
        serial: the part of the step in which no replica computes.
        waits_for_host: whether devices wait for the host to launch sub-steps.
        graphs_are_off: whether ``graphs=False`` was passed.
        may_still_capture: whether sub-steps become graphs if devices go on waiting.
        is_compiled: whether replicas run compiled.
        num_devices: the number of devices.
        num_substeps: the largest number of sub-steps of a replica.
        has_room: whether micro-batches of twice as many rows may fit into memory.
    """

    serial: float
    waits_for_host: bool
    graphs_are_off: bool
    may_still_capture: bool
    is_compiled: bool
    num_devices: int
    num_substeps: int
    has_room: bool


def hint_for(step: StepTraits) -> str:
    """What would make such a step faster; empty if nothing is worth a hint."""
    if step.serial > _MUCH_SERIAL:
        return (
            f"no replica computes in {step.serial:.0%} of the step: take more rows per "
            "step, with a larger accum"
        )
    if not step.waits_for_host or step.may_still_capture:
        return ""
    if step.graphs_are_off and not step.is_compiled:
        return "devices wait for the host to launch kernels: leave out graphs=False"
    remedies = remedies_of_launching(
        step.num_devices,
        num_substeps=step.num_substeps,
        is_compiled=step.is_compiled,
        has_room=step.has_room,
    )
    if not remedies:
        return ""
    return f"devices wait for the host to launch kernels: {remedies}"


def remedies_of_launching(
    num_devices: int, *, num_substeps: int, is_compiled: bool, has_room: bool
) -> str:
    """What helps if devices wait for the host, and no sub-step can be a graph.

    Returns an empty text if nothing does.
    """
    remedies: list[str] = []
    if num_substeps > 1 and has_room:
        remedies.append("larger micro-batches (a smaller accum)")
    if not is_compiled:
        remedies.append("compile=True")
    if num_devices > 1 and num_devices % 2:
        remedies.append("one process per device")
    elif num_devices > 1:
        remedies.append("two processes with half of the devices each")
    if not remedies and has_room:
        remedies.append("larger batches")
    if not remedies:
        return ""
    *others, last = remedies
    return f"{', '.join(others)} or {last}" if others else last
