"""The bar of a run moves within a step, by any thread; without a terminal there are
lines.
"""

from __future__ import annotations

import io
import os
import re

import pytest
import torch
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.train import progress as progress_module
from scatterpar.train.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def make_terminal(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    return screen


@pytest.mark.draws
def test_bar_moves_within_a_step(monkeypatch):
    terminal = make_terminal(monkeypatch)
    seen = []
    criterion = nn.CrossEntropyLoss()
    model = nn.Linear(4, 3)
    batch = torch.randn(512, 4), torch.zeros(512, dtype=torch.int64)
    options = {"device_ids": ["cpu:0", "cpu:1"], "micro_batch_size": 32}
    with (
        ScatterOnceParallel(model, **options) as engine,
        Progress(1024, file=terminal) as progress,
    ):
        criterion.register_forward_hook(progress.add)
        criterion.register_forward_hook(lambda *_: seen.append(progress.n))
        for done in (512, 1024):
            progress.begin(512)
            engine.forward_backward(*batch, criterion)
            # The engine's look computes a few rows more; the step's end is the limit.
            assert progress.n == done
            progress.report(done)
    assert any(0 < number < 512 for number in seen)
    assert max(seen) == 1024


def test_bar_is_there_before_the_first_step(monkeypatch):
    terminal = make_terminal(monkeypatch)
    with Progress(100, file=terminal) as progress:
        progress.describe("reading the first batch")
        assert "reading the first batch" in terminal.getvalue()


def test_bar_in_a_terminal_of_unknown_size(monkeypatch):
    """As in a container's, or one that a program opens."""
    pty = pytest.importorskip("pty", reason="needs a terminal of Unix")
    screen, end = pty.openpty()
    with os.fdopen(end, "w") as terminal, os.fdopen(screen, "rb", 0) as shown:
        monkeypatch.setattr("sys.stderr", terminal)
        with Progress(100, file=terminal):
            assert b"0/100 " in shown.read(1000)


def test_lines_without_a_terminal(monkeypatch):
    monkeypatch.setattr(progress_module, "_LINE_SECONDS", 0.0)
    file = io.StringIO()
    with Progress(100, file=file) as progress:
        progress.describe("epoch 1/2", loss="0.5")
        progress.report(25)
        progress.mininterval = 1000.0
        progress.report(50)
    _, line = file.getvalue().splitlines()
    assert re.fullmatch(r"epoch 1/2: 25%, .* images/s, [\d:?]+ left, loss=0.5", line)
