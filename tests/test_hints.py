"""One hint per step, from its times."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from scatterpar import report
from scatterpar.hints import StepTraits, hint_for, remedies_of_launching
from scatterpar.plan import make_plan
from scatterpar.report import GraphReport

pytestmark = pytest.mark.core
FAST = StepTraits(
    serial=0.05,
    waits_for_host=False,
    graphs_are_off=False,
    may_still_capture=False,
    is_compiled=False,
    num_devices=4,
    num_substeps=8,
    has_room=True,
)


def test_fast_step_has_no_hint():
    assert hint_for(FAST) == ""


def test_serial_step_needs_more_rows():
    assert hint_for(FAST._replace(serial=0.31)) == (
        "no replica computes in 31% of the step: take more rows per step, with a "
        "larger accum"
    )
    assert hint_for(FAST._replace(serial=float("nan"))) == ""


def test_waiting_devices_need_fewer_launches():
    waiting = FAST._replace(waits_for_host=True)
    begin = "devices wait for the host to launch kernels: "
    assert hint_for(waiting) == (
        f"{begin}larger micro-batches (a smaller accum), compile=True or two processes "
        "with half of the devices each"
    )
    assert hint_for(waiting._replace(graphs_are_off=True)) == (
        f"{begin}leave out graphs=False"
    )
    # The engine does it by itself.
    assert hint_for(waiting._replace(may_still_capture=True)) == ""


def test_no_hint_excludes_what_is_on():
    """Compiled sub-steps are no graphs."""
    compiled = FAST._replace(waits_for_host=True, is_compiled=True)
    for graphs_are_off in (False, True):
        hint = hint_for(compiled._replace(graphs_are_off=graphs_are_off))
        assert "compile" not in hint
        assert "graphs" not in hint


@pytest.mark.parametrize(
    ("devices", "substeps", "has_room", "remedies"),
    [
        (1, 1, True, "larger batches"),
        (1, 2, True, "larger micro-batches (a smaller accum)"),
        (2, 1, True, "two processes with half of the devices each"),
        (3, 1, True, "one process per device"),
        (2, 2, False, "two processes with half of the devices each"),
        (1, 2, False, ""),
    ],
)
def test_remedies_fit_the_step(devices, substeps, has_room, remedies):
    words = remedies_of_launching(
        devices, num_substeps=substeps, is_compiled=True, has_room=has_room
    )
    assert words == remedies


def test_no_hint_where_nothing_helps():
    alone = FAST._replace(
        waits_for_host=True, is_compiled=True, num_devices=1, has_room=False
    )
    assert hint_for(alone) == ""


MORE_ROWS = "take more rows per step, with a larger accum"
LARGER = "larger micro-batches (a smaller accum)"
TWO = "two processes with half of the devices each"
WAITS = "devices wait for the host to launch kernels: "


class Situation(NamedTuple):
    """A step of one second on four devices, as a user meets it.

    Attributes:
        hint: what its report says.
        working: seconds for which devices work on a share, of which the host launches
            ``launching``.
        substeps: of each replica.
        facts: of the report.
        is_half_full: whether tensors have half of the devices' memory.
    """

    hint: str
    working: float
    launching: float
    substeps: int
    facts: Mapping[str, Any] = MappingProxyType({})
    is_half_full: bool = False


EAGER = GraphReport(0, 16, "a reason")
SITUATIONS = {
    "few sub-steps": Situation(
        f"no replica computes in 30% of the step: {MORE_ROWS}", 0.7, 0.1, 2
    ),
    "tiny micro-batches": Situation(
        f"{WAITS}{LARGER}, compile=True or {TWO}", 0.95, 0.95, 16
    ),
    "graphs are off by a reason": Situation(
        f"{WAITS}{LARGER}, compile=True or {TWO}", 0.9, 0.89, 4, {"graphs": EAGER}
    ),
    "graphs are off by the user": Situation(
        f"{WAITS}leave out graphs=False", 0.9, 0.89, 4, {"graphs_are_off": True}
    ),
    "graphs will come": Situation("", 0.9, 0.89, 4, {"may_still_capture": True}),
    "host is busy in one sub-step": Situation(
        f"{WAITS}compile=True or {TWO}", 0.95, 0.94, 1
    ),
    "compiled, and host is busy": Situation(
        f"{WAITS}{LARGER} or {TWO}", 0.95, 0.94, 4, {"is_compiled": True}
    ),
    "memory is full, and host is busy": Situation(
        f"{WAITS}compile=True or {TWO}", 0.95, 0.94, 4, is_half_full=True
    ),
    "memory is full, and few rows": Situation(
        f"no replica computes in 40% of the step: {MORE_ROWS}",
        0.6,
        0.1,
        4,
        is_half_full=True,
    ),
    "devices are busy": Situation("", 0.95, 0.5, 16),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_hint_fits_the_situation(name, monkeypatch):
    situation = SITUATIONS[name]
    # Devices that wait for the host are those with streams, which the CPU has not.
    monkeypatch.setattr(report, "has_streams", lambda device: True)
    monkeypatch.setattr(report, "is_half_full", lambda device: situation.is_half_full)
    devices = [torch.device(f"cpu:{number}") for number in range(4)]
    step = report.StepReport(
        make_plan(4 * situation.substeps, devices, situation.substeps),
        loss=0.5,
        seconds={"compute": 1.0},
        bytes={"compute": 0},
        messages={"compute": 0},
        device_seconds=(situation.working,) * 4,
        launch_seconds=(situation.launching,) * 4,
        **situation.facts,
    )
    assert step.hint == situation.hint
    hints = [line for line in str(step).splitlines() if line.startswith("hint: ")]
    assert hints == ([f"hint: {situation.hint}"] if situation.hint else [])
