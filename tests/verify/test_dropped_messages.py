"""Records and warnings of user code during a look, and those in the step."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from contextvars import copy_context

import pytest
import torch
from harness.models import Of
from harness.oracle import build, randn
from torch import nn

from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel
from scatterpar.verify.dropped_messages import (
    is_look,
    records_dropped,
    warnings_dropped,
)

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


# --- warnings ---


def shown(function, action="default"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        function()
    return [str(warning.message) for warning in caught]


class Warns(nn.Linear):
    def forward(self, rows):
        warnings.warn("deprecated layer", stacklevel=2)
        return super().forward(rows)


def warning_loss(output, targets):
    warnings.warn("deprecated loss", stacklevel=2)
    return nn.functional.mse_loss(output, targets)


INPUTS = torch.ones(12, 3)
TARGETS = torch.arange(24.0).view(12, 2)


@pytest.mark.draws
def test_nothing_is_shown_or_noted():
    def code():
        for number in range(3):
            if number == 1:
                warnings.warn("once", stacklevel=1)
            else:
                with warnings_dropped():
                    warnings.warn("once", stacklevel=1)

    filters = list(warnings.filters)
    assert shown(code) == ["once"]
    assert warnings.filters == filters


@pytest.mark.draws
@pytest.mark.parametrize("verify", [True, False])
def test_engine_shows_a_warning_once(verify):
    """It was shown after each look, 5 times in 20 steps; plain torch shows it once."""
    engine = ScatterOnceParallel(Warns(3, 2), 3, ["cpu"] * 2, verify=verify)

    def steps():
        for _ in range(9):
            engine.forward_backward(INPUTS, TARGETS, warning_loss)

    with engine:
        assert sorted(shown(steps)) == ["deprecated layer", "deprecated loss"]


@pytest.mark.draws
def test_pair_shows_a_warning_once():
    model = DataParallelModel(nn.Linear(3, 2), ["cpu"] * 2)
    criterion = DataParallelCriterion(warning_loss)

    def calls():
        for _ in range(9):
            criterion(model(INPUTS), TARGETS)

    assert shown(calls) == ["deprecated loss"]
