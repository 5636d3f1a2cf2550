"""One hint per step, from its times."""

import pytest

from scatterpar.hints import StepTraits, hint_for, remedies_of_launching

pytestmark = pytest.mark.core
FAST = StepTraits(
    serial=0.05,
    waits_for_host=False,
    graphs_are_off=False,
    may_still_capture=False,
    is_compiled=False,
    num_devices=4,
    num_substeps=8,
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
    ("devices", "substeps", "remedies"),
    [
        (1, 1, "larger batches"),
        (1, 2, "larger micro-batches (a smaller accum)"),
        (2, 1, "two processes with half of the devices each"),
    ],
)
def test_remedies_fit_the_step(devices, substeps, remedies):
    words = remedies_of_launching(devices, num_substeps=substeps, is_compiled=True)
    assert words == remedies
