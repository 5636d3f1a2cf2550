"""``scatterpar.doctor()``: the examination, from what there is to the verdict."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from scatterpar.checkup import copies, exactness, machine, report, speed
from scatterpar.checkup.problems import PROBLEMS
from scatterpar.checkup.report import Report, title
from scatterpar.checkup.verdicts import judge
from scatterpar.devices.verbs import DeviceLike, resolve

__all__ = ["doctor"]

_WITHOUT_ACCELERATOR = ("cpu:0", "cpu:1")


def doctor(
    devices: Sequence[DeviceLike] | None = None, json: str | os.PathLike[str] | None = None
) -> Report:
    """Examine this machine: for a new one, and for a loss that looks wrong.

    Prints, as it goes, what there is, whether copies between all memories arrive as they were
    sent, whether one step on all devices has the gradient of one device, how fast the engine
    is, and what follows from that. Takes less than a minute on a quiet machine. Generators and
    gradients of the caller's stay as they are.

    Args:
        devices: one entry per replica, as ``device_ids`` of ``ScatterOnceParallel``. Default:
            every visible accelerator, or two virtual devices without any.
        json: a file for the findings as JSON.

    Returns:
        The findings: ``.passed``, ``.exit_code`` (0 fine, 1 something is wrong), ``.verdicts``
        and the rest of the page.

    Raises:
        TypeError: ``devices`` is no list, or has an entry that is no device.
        ValueError: a device that this machine does not have.
        OSError: the file cannot be written.

    Example:
        .. code-block:: python

            import scatterpar

            found = scatterpar.doctor(devices=["cpu:0", "cpu:1"])
            assert found.passed, found
    """
    if devices is None and not torch.accelerator.is_available():
        devices = _WITHOUT_ACCELERATOR
    places = resolve(devices)
    if json is not None:
        Path(json).open("a").close()  # a minute later is late for a name that cannot be written
    found = Report([str(place) for place in places])
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        _examine(places, found)
    if json is not None:
        found.write(Path(json))
    return found


def _examine(places: Sequence[torch.device], found: Report) -> None:
    """Each finding is shown as soon as it is there: a broken machine may hang in the next one."""
    from scatterpar import __version__

    load = machine.load_per_core()  # before this adds to it
    found.machine = machine.describe(places, __version__)
    _show(title("what there is").lstrip(), *report.machine_lines(found.machine))
    _show(title("copies"))
    for route in copies.examine(places):
        found.copies.append(route)
        _show(report.copy_line(route))
    _show(title("one exact step"))
    for problem in PROBLEMS:
        found.steps.append(exactness.examine(problem, places))
        _show(report.step_line(found.steps[-1]))
    _show(title("speed"))
    for problem in PROBLEMS:
        found.speeds.append(speed.examine(problem, places))
        _show(*report.speed_lines(found.speeds[-1]))
    found.verdicts = judge(places, found.copies, found.steps, found.speeds, load)
    _show(title("verdict"), *map(str, found.verdicts))


def _show(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)
