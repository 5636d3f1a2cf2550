"""The note on an error in a sub-step."""

from __future__ import annotations

import os

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of
from harness.notes import beginning_of_note, note_of
from harness.oracle import build, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel

ROWS, LABELS = randn(13, FEATURES), randint(CLASSES, 13)
LOSS = nn.CrossEntropyLoss()
BAD = 1e6  # in a row that makes the model fail


class Fails(nn.Linear):
    def forward(self, inputs):
        if (inputs == BAD).any():
            raise ArithmeticError("a bad row")
        return super().forward(inputs)


def note_on(engine, row, **options):
    """The only note on the error of a step in which this row fails."""
    inputs = ROWS.clone()
    inputs[row] = BAD
    with engine, pytest.raises(ArithmeticError) as caught:
        engine.forward_backward(inputs, LABELS, LOSS, **options)
    (note,) = caught.value.__notes__
    return note


def failing_engine(device_ids, **options):
    model = build(lambda: Fails(FEATURES, CLASSES))
    return ScatterOnceParallel(model, device_ids=device_ids, verify=False, **options)


@pytest.mark.contract
@pytest.mark.parametrize("whole_batch", [False, True])
@pytest.mark.parametrize(
    ("row", "accum", "sub_step", "rows"),
    [(0, 3, 0, range(3)), (4, 3, 1, range(3, 5)), (6, 7, 6, range(6, 7))],
)
def test_note_names_consecutive_rows(devices, whole_batch, row, accum, sub_step, rows):
    engine = failing_engine(devices(2), accum=accum)
    note = note_on(engine, row, whole_batch=whole_batch)
    assert note == note_of(0, devices(2)[0], sub_step, accum, rows)


@pytest.mark.contract
def test_words_of_a_note():
    words = "in replica 1 on cpu:1, sub-step 2, rows 8 to 9 (numbers begin at 0)"
    assert note_of(1, "cpu:1", 2, sub_steps=4, rows=range(8, 10)) == words
    words = "in replica 0 on cpu, sub-step 0, row 6 (numbers begin at 0)"
    assert note_of(0, "cpu", 0, rows=range(6, 7)) == words


@pytest.mark.parametrize("accum", [3, 13])
def test_out_of_memory_names_larger_accum(accum):
    def exhausts(*_):
        raise torch.OutOfMemoryError("out of memory")

    out_of_memory = pytest.raises(torch.OutOfMemoryError)
    with failing_engine(["cpu"], accum=accum) as engine, out_of_memory as caught:
        engine.forward_backward(ROWS, LABELS, exhausts)
    assert ("larger accum=" in "".join(caught.value.__notes__)) == (accum == 3)


def test_constant_loss_of_rows_has_remedy():
    """A batch has objects, a micro-batch may have none; one loss of the batch has a
    graph.
    """

    def criterion(outputs, is_object):
        return outputs[is_object].sum() if is_object.any() else torch.zeros(())

    error = pytest.raises(RuntimeError, match="does not require grad")
    with failing_engine(["cpu"], accum=3) as engine, error as caught:
        engine.forward_backward(ROWS, torch.arange(13) == 2, criterion, reduction="sum")
    assert "(output * 0).sum()" in caught.value.__notes__[-1]


def test_detached_loss_is_named_first():
    def criterion(outputs, targets):
        return outputs.sum().detach()

    error = pytest.raises(RuntimeError, match="does not require grad")
    with failing_engine(["cpu"], accum=3) as engine, error as caught:
        engine.forward_backward(ROWS, LABELS, criterion, reduction="sum")
    assert "has no graph: .detach(), .item()" in caught.value.__notes__[-1]


TUNER = os.path.join("triton", "runtime", "autotuner.py")


@pytest.mark.parametrize(("file", "is_told"), [(TUNER, True), ("mine.py", False)])
def test_race_in_autotuner_has_remedy(file, is_told):
    """What its kernel kept of a call is gone, because another replica's has ended."""
    kernel = {"nargs": None}
    exec(compile("def launch(): return {**nargs}", file, "exec"), kernel)

    def forward(m, inputs):
        kernel["launch"]()
        return m.head(inputs)

    model = build(lambda: Of(forward, head=nn.Linear(FEATURES, CLASSES)))
    engine = ScatterOnceParallel(model, 1, ["cpu"] * 2, verify=False)
    with engine, pytest.raises(TypeError, match="not a mapping") as caught:
        engine.forward_backward(ROWS, LABELS, LOSS)
    assert ("torchrun" in "".join(caught.value.__notes__)) == is_told


@pytest.mark.parametrize(
    ("accum", "rows", "remedy"),
    [
        (4, 7, "use a smaller accum=, or micro_batch_size="),
        (1, 2, "use a larger batch, drop_last=True of the loader"),
    ],
)
def test_batch_norm_of_one_row_has_remedy(accum, rows, remedy):
    """torch's own error stays; a note has the way out."""
    model = build(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8)))
    error = pytest.raises(ValueError, match="Expected more than 1 value per channel")
    with ScatterOnceParallel(model, accum, ["cpu"] * 2) as engine, error as caught:
        engine.forward_backward(ROWS[:rows], LABELS[:rows], LOSS)
    where, *others = caught.value.__notes__
    assert f"a micro-batch of one row: {remedy}" in "\n".join(others)
    assert where.startswith(tuple(beginning_of_note(i, "cpu") for i in (0, 1)))
