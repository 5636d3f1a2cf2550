"""Checkpoints: whole or the one before, and runs that go on from them bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal

import pytest
import torch
from faults.forked import run_forked
from harness.runs import Small, assert_same_run, records, steps

from scatterpar.train.options import UsageError
from scatterpar.train.records import FILE, load, save
from scatterpar.train.run import main

pytestmark = pytest.mark.draws

KILLED = {
    "while writing": "os.fsync = die",
    "before the name changes": "os.replace = die",
    "with half the file": "torch.save = lambda s, f: (f.write(b'PK' * 999), f.flush(), die())",
}


@pytest.mark.parametrize("when", KILLED)
def test_a_kill_during_a_save_leaves_the_checkpoint_before(tmp_path, when):
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


class Evil:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"format": 4, "model": Evil()}, "not a checkpoint that can be read: "),
        (None, "not a checkpoint that can be read"),
        ({"weights": torch.zeros(1)}, "a checkpoint of another program or version, which"),
        ({"format": 3}, "a checkpoint of scatterpar 0.2, which scatterpar 0.3 cannot read: use"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused_and_nothing_executed(
    tmp_path, capsys, content, words
):
    path = tmp_path / FILE
    torch.save(content, path) if content else path.write_bytes(b"torn")
    with pytest.raises(UsageError, match=f"checkpoint.pt is {words}"):
        load(path)
    assert "executed" not in capsys.readouterr().out


class Fragile(Small):
    """Fails in one of its steps, as often as it gets there."""

    fails_at = None

    def forward(self, images):
        if self.training and int(self.body[3].num_batches_tracked) == Fragile.fails_at:
            raise RuntimeError("the power is gone")
        return super().forward(images)


ARGUMENTS = [
    *("--model", f"{__name__}:Fragile", "--batch", "1024", "--epochs", "2"),
    *("--devices", "cpu", "--micro-batch-size", "1024", "--checkpoint-every", "3"),
]


def test_a_run_that_failed_is_resumed_bit_for_bit(tmp_path, capsys, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*ARGUMENTS, "--out", str(whole)]) == 0
    for fails_at in (4, 11):
        monkeypatch.setattr(Fragile, "fails_at", fails_at)
        resume = ["--resume"] if fails_at == 11 else []
        with pytest.raises(RuntimeError, match="the power is gone"):
            main([*ARGUMENTS, "--out", str(parts), *resume])
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # cut off as by a kill
    monkeypatch.setattr(Fragile, "fails_at", None)
    capsys.readouterr()
    assert main([*ARGUMENTS, "--out", str(parts), "--resume"]) == 0
    printed = capsys.readouterr().out
    assert "resumed after 9 steps, 9,216 images" in printed
    assert "finished after 2 of 2 epochs, 16 steps" in printed
    assert_same_run(whole, parts, 16)
    kinds = [json.loads(s)["kind"] for s in (parts / "metrics.jsonl").read_text().splitlines()]
    made = ["step"] * 3
    first, second = ["run", *made, "run", *made, *made[:2], "epoch"], ["step", "run", *made[:1]]
    assert kinds == [*first, *second, *["step"] * 6, "epoch", "summary"]
    epochs = [[r["train_loss"] for r in records(out, "epoch")] for out in (whole, parts)]
    assert epochs[0] == epochs[1]
    words = r"there is a .*checkpoint.pt: --resume goes on from it, another --out starts anew"
    assert main([*ARGUMENTS, "--out", str(parts)]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert main([*ARGUMENTS, "--out", str(parts), "--resume", "--seed", "1"]) == 2
    assert "is of a run with --seed 0, not 1" in capsys.readouterr().err
    before = {file: file.read_bytes() for file in parts.iterdir()}
    assert main([*ARGUMENTS, "--out", str(parts), "--resume"]) == 0
    assert "finished before, after 2 epochs and 16 steps; --out starts" in capsys.readouterr().out
    assert {file: file.read_bytes() for file in parts.iterdir()} == before
    assert_same_run(whole, parts, 16)


def test_a_run_goes_on_with_the_optimizers_state_shared_out_or_not(tmp_path, monkeypatch):
    """Bit for bit, with four replicas in four memories, in one, and in two."""
    options = [
        *ARGUMENTS[:4],
        "--epochs",
        "1",
        "--micro-batch-size",
        "256",
        "--checkpoint-every",
        "3",
    ]
    options += ["--optimizer", "adamw", "--base-lr", "0.003", "--clip", "1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*options, "--devices", "cpu,cpu,cpu,cpu", "--out", str(whole)]) == 0
    for fails_at, devices, more in (
        (4, "cpu:0,cpu:1,cpu:2,cpu:3", ["--shard-optimizer"]),
        (7, "cpu,cpu,cpu,cpu", ["--resume"]),
        (None, "cpu:0,cpu:1,cpu:0,cpu:1", ["--resume", "--shard-optimizer"]),
    ):
        monkeypatch.setattr(Fragile, "fails_at", fails_at)
        ends = pytest.raises(RuntimeError) if fails_at else contextlib.nullcontext()
        with ends:
            assert main([*options, "--devices", devices, "--out", str(parts), *more]) == 0
    assert_same_run(whole, parts, 8)
    sent = [record["bytes"]["replicate"] for record in steps(parts)]
    assert sent[-1] == 0 < sent[0]  # the new values were there already
