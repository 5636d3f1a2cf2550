"""Notes on the user's errors, restores after one, and where a warning points to."""

from __future__ import annotations

import copy

import pytest

from scatterpar.errors import Told, add_note, restore_after, restored, warn

pytestmark = pytest.mark.core


def notes(error):
    return getattr(error, "__notes__", [])


def test_note_is_added_once():
    error = ValueError()
    add_note(error, "replica 1")
    add_note(error, "replica 1")
    add_note(error, "replica 2")
    assert notes(error) == ["replica 1", "replica 2"]


class WithoutNotes(Exception):
    def add_note(self, _):
        raise TypeError


def test_error_refusing_notes_left_alone():
    error = WithoutNotes()
    add_note(error, "replica 1")
    assert not notes(error)


def failing():
    raise OSError("device lost")


@pytest.mark.parametrize("fails", [True, False])
def test_restores_run_in_order_after_body(fails):
    order = []
    try:
        with restored(lambda: order.append(1), lambda: order.append(2)):
            order.append(0)
            if fails:
                raise ValueError
    except ValueError:
        order.append("raised")
    assert order == [0, 1, 2, *["raised"] * fails]


def test_failed_restore_after_body_is_raised():
    with pytest.raises(OSError, match="device lost"), restored(failing):
        pass


def test_failed_restore_after_error_is_noted():
    order = []
    with (
        pytest.raises(ValueError, match="step") as caught,
        restored(failing, lambda: order.append(1)),
    ):
        raise ValueError("step")
    (note,) = notes(caught.value)
    assert note.endswith("could not be put back: OSError('device lost')")
    assert order == [1]


def test_interrupt_during_restore_is_raised():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore_after(ValueError(), interrupted)


def test_warning_points_to_users_line(recwarn):
    warn("a text")
    (warning,) = recwarn.list
    assert (str(warning.message), warning.filename) == ("a text", __file__)


def test_told_is_new_once_per_subject_and_copy():
    told = Told()
    assert [told.is_new("a"), told.is_new("b"), told.is_new("a")] == [True, True, False]
    assert copy.deepcopy(told).is_new("a")
