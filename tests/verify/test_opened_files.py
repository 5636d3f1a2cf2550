"""A look ends before its calls open a file to write; the step writes it."""

from __future__ import annotations

import contextlib
import gc
import gzip
import importlib
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from harness.oracle import build, randn
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.verify.dropped_records import is_look
from scatterpar.verify.opened_files import files_refused


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def append_by_path(path, text):
    with path.open("ab") as file:
        file.write(text.encode())


def by_descriptor(path, text):
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(number, text.encode())
    os.close(number)


def compressed(path, text):
    with gzip.open(path, "at") as file:
        file.write(text)


def array(path, text):
    np.save(path.with_suffix(f".{text}.npy"), np.ones(2))


def tensor(path, text):
    torch.save(torch.ones(2), path.with_suffix(f".{text}.pt"))


def caught(path, text):
    try:
        append(path, text)
    except Exception:
        append(path, "caught")  # raises, too


WRITES = [append, append_by_path, by_descriptor, compressed, array, tensor, caught]


def criterion_of(write, path):
    def criterion(output, targets):
        write(path, "look" if is_look() else "step")
        return (output - targets).square().mean()

    return criterion


def run_steps(engine, criterion):
    for _ in range(4):
        engine.forward_backward(randn(8, 3), randn(8, 2), criterion)


@pytest.mark.parametrize("device_ids", [["cpu"], ["cpu:0", "cpu:1"]])
@pytest.mark.parametrize("write", WRITES)
def test_look_touches_no_file(tmp_path, write, device_ids):
    model = build(lambda: nn.Linear(3, 2))
    path = tmp_path / "losses.txt"
    told = r"(?s)opens 'losses.*' to write.*not looked at"
    with (
        ScatterOnceParallel(model, 2, device_ids) as engine,
        pytest.warns(UserWarning, match=told) as warned,
    ):
        run_steps(engine, criterion_of(write, path))
    assert len(warned) == 1
    calls = 4 * 2 * len(device_ids)
    if write in (array, tensor):
        (file,) = tmp_path.iterdir()
        assert "step" in file.name
        return
    opened = gzip.open if write is compressed else open
    with opened(path, "rt") as file:
        assert file.read() == "step" * calls


class Log:
    """Writes its file when it is freed; it is in a cycle, so any call may free it."""

    def __init__(self, path):
        self.path = path
        self.itself = self

    def __del__(self):
        append(self.path, "freed")


def finalized(path):
    log = Log(path)
    log.path = os.devnull
    weakref.finalize(log, append, path, "freed")
    return log


@pytest.mark.parametrize("make", [Log, finalized])
def test_finalizer_in_a_look_writes_its_file(tmp_path, make):
    """Its text was lost, and the step was not looked at."""
    path = tmp_path / "losses.txt"
    gc.collect()
    make(path)

    def criterion(output, targets):
        gc.collect()
        return (output - targets).square().sum()

    model = build(lambda: nn.Linear(3, 2))
    with (
        ScatterOnceParallel(model, 2, ["cpu"]) as engine,
        pytest.raises(ValueError, match="reduction="),
    ):
        run_steps(engine, criterion)
    assert path.read_text() == "freed"


def test_loaded_compiler_hides_no_file(tmp_path):
    """Its frame around each step was once taken for a compiler that writes its cache."""
    importlib.import_module("torch._dynamo")
    told = r"(?s)opens 'losses.*' to write.*not looked at"
    model = build(lambda: nn.Linear(3, 2))
    with (
        ScatterOnceParallel(model, 2, ["cpu"]) as engine,
        pytest.warns(UserWarning, match=told),
    ):
        run_steps(engine, criterion_of(append, tmp_path / "losses.txt"))


def reads(path):
    return path.read_text()


def writes_nowhere(path):
    with open(os.devnull, "w") as file:
        file.write("nothing")


def runs_a_program(path):
    return subprocess.run([sys.executable, "-c", ""], input=b"", check=True)


def writes_in_another_thread(path):
    """A thread of the user's own is none of the look."""
    thread = threading.Thread(target=append, args=(path, "text"))
    thread.start()
    thread.join()


def test_pyc_of_an_import_is_written(tmp_path, monkeypatch):
    """Python writes compiled code beside a module that a call imports first."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "imported_in_a_look.py").write_text("NUMBER = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with files_refused():
        import imported_in_a_look
    assert imported_in_a_look.NUMBER == 1
    assert list((tmp_path / "__pycache__").iterdir())
    del sys.modules["imported_in_a_look"]


@pytest.mark.parametrize(
    "use", [reads, writes_nowhere, runs_a_program, writes_in_another_thread]
)
def test_what_leaves_nothing_is_allowed(tmp_path, use):
    path = tmp_path / "a.txt"
    path.write_text("text")
    with files_refused():
        use(path)


def test_hook_is_idle_outside_of_looks(tmp_path):
    with files_refused():
        pass
    append(tmp_path / "a", "text")
    torch.save(1, tmp_path / "b")
    assert (tmp_path / "a").read_text() == "text"


def test_error_that_was_caught_ends_the_look(tmp_path):
    with (
        pytest.raises(Inconclusive, match="'a'"),
        files_refused(),
        contextlib.suppress(Inconclusive),
    ):
        append(tmp_path / "a", "text")
    assert not (tmp_path / "a").exists()
