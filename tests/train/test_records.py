"""Checkpoints are whole or the one before; records are lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import types

import pytest
import torch
from faults.processes import finish, run_forked, start_forked

from scatterpar.train.command_line import UsageError
from scatterpar.train.records import FILE, Metrics, load, locked, save

KILLED = {
    "while writing": "os.fsync = die",
    "before the name changes": "os.replace = die",
}


@pytest.mark.parametrize("when", KILLED)
def test_killed_save_leaves_old_checkpoint(tmp_path, when):
    path = tmp_path / FILE
    save(path, number=torch.tensor(1))
    code = (
        "import os, signal, sys, torch; from pathlib import Path\n"
        "from scatterpar.train.records import save\n"
        "def die(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        f"{KILLED[when]}\n"
        "save(Path(sys.argv[1]), number=torch.tensor(2))\n"
    )
    assert run_forked("-c", code, str(path)).code == -signal.SIGKILL
    assert load(path)["number"] == 1
    save(path, number=torch.tensor(3))
    assert load(path)["number"] == 3
    assert os.listdir(tmp_path) == [FILE]


@pytest.mark.parametrize("size", [10, 10_000_000])
def test_full_disk_is_named(tmp_path, size):
    """torch's own error hides the system's; a limit of the process stands for the disk."""
    path = tmp_path / FILE
    save(path, number=torch.tensor(1))
    code = (
        "import resource, sys, torch; from pathlib import Path\n"
        "from scatterpar.train.command_line import UsageError\n"
        "from scatterpar.train.records import save\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\n"
        "try:\n"
        "    save(Path(sys.argv[1]), number=torch.zeros(int(sys.argv[2])))\n"
        "except UsageError as error:\n"
        "    print(error)\n"
    )
    outcome = run_forked("-c", code, str(path), str(size))
    assert outcome.out == f"--out: {path} cannot be written: File too large\n"
    assert load(path)["number"] == 1
    assert os.listdir(tmp_path) == [FILE]


def test_lock_ends_with_killed_process(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from scatterpar.train.records import locked\n"
        "with locked(Path(sys.argv[1])):\n"
        "    print('locked', flush=True)\n"
        "    time.sleep(3600)\n"
    )
    process = start_forked("-c", code, str(tmp_path))
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(UsageError, match="another run"), locked(tmp_path):
        pass
    process.kill()
    finish(process)
    with locked(tmp_path):
        pass


class Evil:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"format": 4, "model": Evil()}, "not a checkpoint that can be read: "),
        (None, "not a checkpoint that can be read"),
        (
            {"weights": torch.zeros(1)},
            "a checkpoint of another program or version: use the version",
        ),
        ({"format": 3}, "a checkpoint of another program or version"),
    ],
)
def test_other_file_refused_not_executed(tmp_path, capsys, content, words):
    path = tmp_path / FILE
    torch.save(content, path) if content else path.write_bytes(b"torn")
    with pytest.raises(UsageError, match=f"checkpoint.pt is {words}"):
        load(path)
    assert "executed" not in capsys.readouterr().out


def test_run_of_0_4_is_read_but_not_resumed(tmp_path):
    """Its --val held out other pictures, on which it would now be tested."""
    path = tmp_path / FILE
    torch.save({"format": 5, "step": 3}, path)
    assert load(path)["step"] == 3
    with pytest.raises(UsageError, match=r"new run .*0\.4 held out other pictures"):
        load(path, goes_on=True)
    save(path, step=4)
    assert load(path, goes_on=True)["step"] == 4


def test_metrics_are_json_lines_even_for_nan(tmp_path):
    with Metrics(tmp_path / "new" / "metrics.jsonl") as metrics:
        metrics.write(
            "step", step=1, loss=float("nan"), seconds={"scatter": float("inf")}
        )
    lines = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == metrics.records
    assert metrics.records[0]["loss"] is None
    assert metrics.records[0]["seconds"] == {"scatter": None}


def test_session_keeps_steps_drops_torn_line(tmp_path, monkeypatch):
    """TensorBoard drops steps from `purge_step` on: a resumed run once lost its last
    step.
    """
    purged, scalars = [], []

    def writer(folder, purge_step):
        purged.append(purge_step)
        add = lambda name, value, step: scalars.append((name, value, step))  # noqa: E731
        return types.SimpleNamespace(add_scalar=add, close=lambda: None)

    board = types.SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as metrics:
        for step in (1, 2, 3):
            metrics.write("step", step=step, loss=0.5)
        metrics.write("summary", loss=0.0)
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # cut off as by a kill
    with Metrics(path, 2) as metrics:
        metrics.write("step", step=3, loss=0.25)
    assert purged == [1, 3]
    losses = [scalar for scalar in scalars if scalar[0] == "step/loss"]
    assert losses[-2:] == [("step/loss", 0.5, 3), ("step/loss", 0.25, 3)]
    assert [json.loads(s)["loss"] for s in path.read_text().splitlines()] == [
        0.5,
        0.5,
        0.25,
    ]
