"""Contexts in forward that change settings of the process, in several threads at once."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from harness.models import FEATURES, Of, linear
from harness.oracle import randn
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from scatterpar import ScatterOnceParallel
from scatterpar.threads.process_settings import FULL_FLOAT32

pytestmark = pytest.mark.core

ROWS, VALUES = randn(8, FEATURES), randn(8, 4)


def setting(read, write, value):
    """A context as libraries write it: set a value, and at the end the earlier one."""

    @contextlib.contextmanager
    def context():
        before = read()
        write(value)
        try:
            yield
        finally:
            write(before)

    return context


@contextlib.contextmanager
def without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


VALIDATION = torch.distributions.Distribution
CONTEXTS = {
    "sdpa": lambda: sdpa_kernel([SDPBackend.MATH], set_priority=True),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False, benchmark=True),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "warnings": without_warnings,
    "default dtype": setting(
        torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16
    ),
    "precision of products": setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "TF32": lambda: torch.backends.cudnn.flags(allow_tf32=False),
    "distributions": setting(
        lambda: VALIDATION._validate_args, VALIDATION.set_default_validate_args, False
    ),
    "stdout": lambda: contextlib.redirect_stdout(io.StringIO()),
    "logging": setting(
        lambda: logging.root.manager.disable, logging.disable, logging.CRITICAL
    ),
    "environment": lambda: mock.patch.dict(os.environ, {"SCATTERPAR_TEST": "1"}),
    "recursion": setting(sys.getrecursionlimit, sys.setrecursionlimit, 2000),
    "directory": lambda: contextlib.chdir("/"),
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
        "environment": dict(os.environ),
        "recursion": sys.getrecursionlimit(),
        "directory": os.getcwd(),
        "distributions": VALIDATION._validate_args,
        # Read by the older and the newer names: each fails after a mix of both.
        "precision": (
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.conv.fp32_precision,
        ),
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


def test_settings_that_cannot_be_read_stay(devices):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    crossing = Crossing(CONTEXTS["logging"], fails=False)
    model = Of(crossing.forward, linear=linear())
    matmul.fp32_precision = "tf32"  # from now on torch refuses to read its older name
    try:
        with ScatterOnceParallel(model, 1, devices(2), verify=False) as engine:
            engine.forward_backward(ROWS, VALUES, nn.MSELoss())
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
    assert logging.root.manager.disable == logging.NOTSET


class Met:
    """A look, in which a step of another engine begins; it ends after the look."""

    def __init__(self):
        self.looking = threading.Event()
        self.begun = threading.Event()
        self.ended = threading.Event()

    def forward_of_look(self, m, inputs):
        if not torch.backends.cudnn.benchmark and not self.looking.is_set():
            self.looking.set()
            assert self.begun.wait(30)
        return m.linear(inputs)

    def forward_of_step(self, m, inputs):
        self.begun.set()
        assert self.ended.wait(30)
        return m.linear(inputs)

    def step(self, devices):
        assert self.looking.wait(30)
        model = Of(self.forward_of_step, linear=linear())
        with ScatterOnceParallel(model, 1, devices, verify=False) as engine:
            engine.forward_backward(ROWS, VALUES, nn.MSELoss())


def test_step_that_outlives_a_look(devices, monkeypatch):
    """Its engine would restore what the look of the other one had switched off."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    met = Met()
    model = Of(met.forward_of_look, linear=linear())
    with ThreadPoolExecutor(1) as executor:
        step = executor.submit(met.step, devices(2))
        with ScatterOnceParallel(model, 2, devices(2)) as engine:
            engine.forward_backward(ROWS, VALUES, nn.MSELoss())
        met.ended.set()
        step.result()
    assert torch.backends.cudnn.benchmark


def test_float32_is_whole_until_the_last_thread_leaves():
    """Two looks in two threads: the second one began in the first one's body."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        first = second = FULL_FLOAT32
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert torch.get_float32_matmul_precision() == "highest"
        second.__exit__(None, None, None)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
