"""Contexts in forward that change settings of the process, in several threads at once."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import warnings

import pytest
import torch
from harness.models import FEATURES, Of, linear
from harness.oracle import randn
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from scatterpar import ScatterOnceParallel

pytestmark = pytest.mark.core

ROWS, VALUES = randn(8, FEATURES), randn(8, 4)


@contextlib.contextmanager
def default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def without_logging():
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


CONTEXTS = {
    "sdpa": lambda: sdpa_kernel([SDPBackend.MATH], set_priority=True),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False, benchmark=True),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "warnings": without_warnings,
    "default dtype": default_dtype,
    "stdout": lambda: contextlib.redirect_stdout(io.StringIO()),
    "logging": without_logging,
}


def settings():
    return {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "order": torch._C._get_sdp_priority_order(),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark),
        "mkldnn": torch.backends.mkldnn.enabled,
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "dtype": torch.get_default_dtype(),
        "stdout": sys.stdout,
        "logging": logging.root.manager.disable,
    }


class Crossing:
    """Two threads: the second enters within the first one's body, and leaves last."""

    def __init__(self, make_context, fails):
        self.make_context, self.fails = make_context, fails
        self.first_in, self.both_in, self.first_out = (
            threading.Event() for _ in range(3)
        )

    def forward(self, m, inputs):
        if torch.equal(inputs[0], ROWS[0]):
            with self.make_context():
                self.first_in.set()
                assert self.both_in.wait(30)
            self.first_out.set()
        else:
            assert self.first_in.wait(30)
            with self.make_context():
                self.both_in.set()
                assert self.first_out.wait(30)
        if self.fails:
            raise ArithmeticError("after it")
        return m.linear(inputs)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", CONTEXTS)
def test_settings_restored_after_step(devices, name, fails):
    crossing = Crossing(CONTEXTS[name], fails)
    model = Of(crossing.forward, linear=linear())
    before = settings()
    with ScatterOnceParallel(model, 1, devices(2), verify=False) as engine:
        expected = pytest.raises(ArithmeticError) if fails else contextlib.nullcontext()
        with expected:
            engine.forward_backward(ROWS, VALUES, nn.MSELoss())
    assert settings() == before


def test_warning_after_step_is_seen(devices):
    crossing = Crossing(without_warnings, fails=False)
    model = Of(crossing.forward, linear=linear())
    with ScatterOnceParallel(model, 1, devices(2), verify=False) as engine:
        engine.forward_backward(ROWS, VALUES, nn.MSELoss())
    with pytest.warns(UserWarning, match="seen"):
        warnings.warn("seen", stacklevel=1)
