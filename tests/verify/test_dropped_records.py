"""Records that user code logs during a look, and those that it logs in the step."""

from __future__ import annotations

import contextlib
import logging
import threading
from contextvars import copy_context

import pytest
import torch
from harness.models import Of
from harness.oracle import build, randn

from scatterpar import ScatterOnceParallel
from scatterpar.verify.dropped_records import is_look, records_dropped

LOGGER = logging.getLogger("of.a.user")
ALONE = logging.getLogger("of.a.user.alone")


class Kept(logging.Handler):
    """Keeps the texts of its records."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.fixture(params=["root", "of.a.user", "of.a.user.alone"])
def kept(request):
    """A handler of the root, of a logger, or of one that does not propagate."""
    logger = logging.getLogger("" if request.param == "root" else request.param)
    handler = Kept()
    logger.addHandler(handler)
    ALONE.propagate = logger is not ALONE
    yield handler
    ALONE.propagate = True
    logger.removeHandler(handler)


def test_only_this_threads_records_dropped(kept):
    with records_dropped():
        ALONE.warning("dropped")
        other = threading.Thread(target=ALONE.warning, args=("of another thread",))
        other.start()
        other.join()
    ALONE.warning("later")
    assert kept.texts == ["of another thread", "later"]
    assert kept.filters == []


def test_loop_can_ask_whether_a_look_calls():
    def criterion(output, targets):
        errors = (output - targets).square()
        return errors.sum() if is_look() else errors.mean()

    model = build(lambda: torch.nn.Linear(3, 2))
    inputs, targets = randn(8, 3), randn(8, 2)
    with ScatterOnceParallel(model, 2, ["cpu", "cpu"]) as engine:
        with pytest.raises(ValueError, match="sum"):
            engine.forward_backward(inputs, targets, criterion)
        engine.verify = False
        loss = engine.forward_backward(inputs, targets, criterion)
    expected = criterion(model(inputs), targets).detach()
    torch.testing.assert_close(loss, expected)


def test_last_resort_writes_nothing(capsys):
    with records_dropped():
        LOGGER.warning("dropped")
    assert "dropped" not in capsys.readouterr().err


def test_handler_added_in_a_look_gets_nothing_there():
    """As one of a logger that user code makes in its first call."""
    handler = Kept()
    try:
        with records_dropped():
            ALONE.addHandler(handler)
            ALONE.warning("dropped")
        ALONE.warning("later")
    finally:
        ALONE.removeHandler(handler)
    assert handler.texts == ["later"]


def test_filter_ends_with_an_error(kept):
    with pytest.raises(KeyError), records_dropped():
        raise KeyError
    assert kept.filters == []


@pytest.mark.parametrize("whole_batch", [False, True])
def test_step_logs_once_per_micro_batch(kept, whole_batch):
    """A look at the step logged its own calls, too."""

    def forward(module, inputs):
        ALONE.warning("forward of %d rows", len(inputs))
        return module.linear(inputs)

    def criterion(outputs, targets):
        ALONE.warning("criterion")
        return (outputs - targets).square().mean()

    model = build(lambda: Of(forward, linear=torch.nn.Linear(4, 3)))
    inputs, targets = randn(8, 4), randn(8, 3)
    with ScatterOnceParallel(model, 2, ["cpu"] * 2) as engine:
        engine.forward_backward(inputs, targets, criterion, whole_batch=whole_batch)
    forwards = kept.texts.count("forward of 2 rows")
    criteria = kept.texts.count("criterion")
    assert len(kept.texts) == forwards + criteria
    # The second pass calls the earlier of a replica's two micro-batches again.
    assert (forwards, criteria) == ((6, 1) if whole_batch else (4, 4))


def test_handling_is_put_back_after_looks_that_overlap():
    """The look that ended last put back the other one's."""
    handling = logging.Logger.callHandlers
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    # As in two threads: each look has a context of its own.
    of_first, of_second = copy_context(), copy_context()
    of_first.run(first.enter_context, records_dropped())
    of_second.run(second.enter_context, records_dropped())
    of_first.run(first.close)
    assert logging.Logger.callHandlers is not handling
    of_second.run(second.close)
    assert logging.Logger.callHandlers is handling
    assert not is_look()
