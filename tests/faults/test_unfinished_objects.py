"""Objects whose constructor an interrupt has ended: their ``__del__`` reports nothing."""

from __future__ import annotations

import gc
import inspect
import sys
from pathlib import Path

import pytest
import torch

import scatterpar
from faults.interrupts import At
from scatterpar.devices.clocks import DeviceClock
from scatterpar.devices.transfers import Prefetcher

pytestmark = pytest.mark.core

CPU = torch.device("cpu")
WITH_DEL = [DeviceClock, Prefetcher]


@pytest.fixture
def unraisable(monkeypatch):
    """The errors in ``__del__`` that Python reports."""
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", reports.append)
    return reports


def test_every_class_with_del_is_in_the_table():
    package = Path(scatterpar.__file__).parent
    sources = [file.read_text("utf-8") for file in package.rglob("*.py")]
    assert "".join(sources).count("def __del__(") == len(WITH_DEL)


@pytest.mark.parametrize("kind", WITH_DEL)
def test_del_of_unconstructed_reports_nothing(unraisable, kind):
    created = kind.__new__(kind)
    del created
    assert unraisable == []


@pytest.mark.parametrize("kind", WITH_DEL)
def test_del_of_interrupted_reports_nothing(unraisable, kind):
    """The interrupt comes before each instruction of the constructor in turn."""
    watched = (inspect.getfile(kind),)
    with At(-1, watched) as count:
        kind(CPU)
    interrupts = 0
    for number in range(count.seen):
        try:
            with At(number, watched):
                kind(CPU)
        except KeyboardInterrupt:
            interrupts += 1
    gc.collect()
    assert interrupts > 20
    assert unraisable == []
