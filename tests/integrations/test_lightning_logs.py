"""Logged values of several calls as those of one, on calls that are made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from harness.optional import needed

needed("lightning.pytorch", "'.[lightning]'")

from torchmetrics.classification import BinaryAUROC  # noqa: E402

from scatterpar.integrations import lightning_logs  # noqa: E402
from scatterpar.integrations.lightning_logs import (  # noqa: E402
    LoggedValues,
    Silent,
    StepCall,
    joined_outputs,
)

pytestmark = pytest.mark.loops
HOME = torch.device("cpu")


class Results:
    """Keeps what is logged, as the results of a Trainer."""

    def __init__(self):
        self.logged = []
        self.resets = 0

    def log(self, fx, name, value, **options):
        assert fx == "training_step"
        self.logged.append((name, float(value), options))

    def reset(self, *, metrics, fx):
        assert not self.logged  # tensors of the last epoch, and metrics stay
        assert (metrics, fx) == (False, "training_step")
        self.resets += 1


class Connector:
    """That of a Trainer, in the first batch of an epoch."""

    _current_fx = None

    def should_reset_tensors(self, fx):
        return fx != self._current_fx


class Module:
    """What a LightningModule knows of its Trainer, in ``training_step``."""

    device = HOME
    _current_fx_name = "training_step"

    def __init__(self):
        self.trainer = mock.Mock(_results=Results(), _logger_connector=Connector())

    @property
    def logged(self):
        logged = self.trainer._results.logged
        return {name: (value, options) for name, value, options in logged}


def calls_of(rows, log):
    """Calls of so many rows; ``log(call, rows)`` logs in each."""
    calls = []
    first = 0
    for number in rows:
        call = StepCall(first, number)
        log(call, number)
        calls.append(call)
        first += number
    return calls


def logged(rows, log):
    values = LoggedValues()
    calls = calls_of(rows, log)
    for call in calls:
        values.note_sizes(call)
    module = Module()
    values.log(module, calls, {})
    return module.logged


@pytest.mark.parametrize(
    ("size", "batch_size"),
    [
        (lambda rows: None, None),
        (lambda rows: rows, 10),  # the call's terms: they are added
        (lambda rows: 12, 12),  # a constant: that of the whole batch
        (lambda rows: rows - 1, 6),
    ],
    ids=["unsaid", "rows", "constant", "terms"],
)
def test_means_have_the_weights_of_their_sizes(size, batch_size):
    def log(call, rows):
        options = {} if size(rows) is None else {"batch_size": size(rows)}
        call.note("loss", torch.tensor(float(rows)), options)

    value, options = logged([2, 2, 2, 4], log)["loss"]
    if size(2) == 1:  # 3 calls of one term, one of 3 terms
        mean = (2 + 2 + 2 + 3 * 4) / 6
    else:
        mean = (3 * 2 * 2 + 4 * 4) / 10
    assert value == pytest.approx(mean)
    assert options["batch_size"] == batch_size


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 10), ("max", 4)])
def test_named_reductions_are_those_of_calls(reduction, expected):
    def log(call, rows):
        call.note("rows", torch.tensor(float(rows)), {"reduce_fx": reduction})

    assert logged([2, 2, 2, 4], log)["rows"][0] == expected


def test_name_logged_twice_is_two_values():
    def log(call, rows):
        call.note("loss", torch.tensor(1.0), {})
        call.note("loss", torch.tensor(float(rows)), {})

    values = LoggedValues()
    module = Module()
    values.log(module, calls_of([2, 2], log), {})
    results = module.trainer._results
    assert [entry[:2] for entry in results.logged] == [("loss", 1.0), ("loss", 2.0)]
    assert results.resets == 1


def test_copies_of_results_leave_users_metrics():
    """A call on another device moves its copy."""
    metric = BinaryAUROC(thresholds=5)
    results = {"area": SimpleNamespace(is_tensor=False, value=metric)}
    copied = lightning_logs._copy_of(results)
    copied["area"].value.to("meta")
    tensors = [metric.thresholds, metric.confmat, *metric._defaults.values()]
    assert {tensor.device for tensor in tensors} == {HOME}


def test_outputs_are_joined_in_the_order_of_rows():
    def log(call, rows):
        call.output = {
            "scores": torch.full((rows, 2), float(rows)),
            "right": rows,
            "mean": torch.tensor(float(rows)),
        }

    outputs = joined_outputs(calls_of([2, 4], log), HOME)
    assert outputs["scores"][:, 0].tolist() == [2, 2, 4, 4, 4, 4]
    assert outputs["right"] == [2, 4]  # numbers are no means
    assert float(outputs["mean"]) == pytest.approx((2 * 2 + 4 * 4) / 6)


class Experiment:
    """What a logger writes to."""

    def __init__(self):
        self.written = []

    def add(self, value):
        self.written.append(value)


class Logger:
    version = 3
    save_dir = None

    def __init__(self):
        self.experiment = Experiment()

    def log(self, value):
        self.experiment.add(value)

    def get_name(self):
        return "of the logger"

    def is_offline(self):
        return True


def test_silent_logger_writes_nothing():
    logger = Logger()
    silent = Silent(logger)
    silent.log(1)
    silent.experiment.add(2)
    silent.experiment(3)
    assert logger.experiment.written == []
    # User code asks for its class, names and flags.
    assert isinstance(silent, Logger)
    assert (silent.version, silent.save_dir) == (3, None)
    assert (silent.get_name(), silent.is_offline()) == ("of the logger", True)
    with pytest.raises(AttributeError):
        _ = silent.unknown
