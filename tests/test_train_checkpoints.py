"""Checkpoints: whole or the one before, and runs that go on from them bit for bit."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import signal

import pytest
import torch
from faults.forked import run_forked
from helpers.rank_processes import run_on_ranks
from helpers.torchrun import Small, assert_same_run, flat, records, steps
from test_train_loop import toy_data
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.train.checkpoint import FILE, Progress, collect, find, load, restore, save
from scatterpar.train.data import UsageError
from scatterpar.train.feed import Feed
from scatterpar.train.machines import Machines
from scatterpar.train.models import OnPixels
from scatterpar.train.run import main
from scatterpar.train.training import Batches, Training, evaluate, foresee, train_epoch

pytestmark = pytest.mark.draws

KILLED = {
    "while writing": "os.fsync = die",
    "before the name changes": "os.replace = die",
    "with half the file": "torch.save = lambda s, f: (f.write(b'PK' * 999), f.flush(), die())",
}


@pytest.mark.parametrize("when", KILLED)
def test_a_kill_during_a_save_leaves_the_checkpoint_before(tmp_path, when):
    path = tmp_path / FILE
    save(path, {"format": 3, "number": torch.tensor(1)})
    code = (
        "import os, signal, sys, torch; from pathlib import Path\n"
        "from scatterpar.train.checkpoint import save\n"
        "def die(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        f"{KILLED[when]}\n"
        "save(Path(sys.argv[1]), {'format': 3, 'number': torch.tensor(2)})\n"
    )
    assert run_forked("-c", code, str(path)).code == -signal.SIGKILL
    assert load(path)["number"] == 1
    save(path, {"format": 3, "number": torch.tensor(3)})
    assert load(path)["number"] == 3
    assert os.listdir(tmp_path) == [FILE]


class Evil:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"format": 3, "model": Evil()}, "a checkpoint that can be read: "),
        (None, "a checkpoint that can be read"),
        ({"weights": torch.zeros(1)}, "a checkpoint of this version"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused_and_nothing_executed(
    tmp_path, capsys, content, words
):
    path = tmp_path / FILE
    torch.save(content, path) if content else path.write_bytes(b"torn")
    with pytest.raises(UsageError, match=f"checkpoint.pt is not {words}"):
        load(path)
    assert "executed" not in capsys.readouterr().out


def toy_training(machines, seed, dropout=0.3):
    torch.manual_seed(seed)
    random.seed(seed)
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Dropout(dropout), nn.Linear(6, 2))
    model = OnPixels(network, torch.tensor([128.0]), torch.tensor([70.0]))
    engine = ScatterOnceParallel(model, 2, ["cpu:0", "cpu:1"], process_group=machines.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    batches = Batches(10, 4, seed=3)
    return Training(engine, optimizer, scheduler, batches, machines, scaler)


def train_steps(training, number):
    losses, batches = [], training.batches
    while True:
        wanted = foresee(batches, batches.epoch, batches.epoch + 1, 0, 4, training.machines)
        data = Feed(toy_data(), wanted)
        for report, _ in train_epoch(training, data, nn.CrossEntropyLoss()):
            losses.append(report.loss)
            if len(losses) == number:
                return losses


def interrupted_and_not(group, tmp_path):
    machines = Machines(group)
    whole = toy_training(machines, seed=1)
    expected = train_steps(whole, 7)
    first = toy_training(machines, seed=1)
    losses = train_steps(first, 4)
    state = collect(first, Progress(step=4, ended=1, loss=0.25, accuracy=0.5))
    if machines.is_first:
        save(tmp_path / FILE, state)
    state = machines.from_rank(0, load(tmp_path / FILE) if machines.is_first else None)
    second = toy_training(machines, seed=2)
    assert restore(state, second) == Progress(step=4, ended=1, loss=0.25, accuracy=0.5)
    losses += train_steps(second, 3)
    ends = [collect(t, Progress()) for t in (whole, second)]
    for training in (whole, first, second):
        training.engine.close()
    return expected, losses, ends


@pytest.mark.parametrize("size", [1, 2])
def test_everything_goes_on_bit_for_bit(tmp_path, size):
    for expected, losses, ends in run_on_ranks(size, interrupted_and_not, tmp_path):
        assert losses == expected
        whole, second = map(flat, ends)
        assert whole.keys() == second.keys()
        for name, value in whole.items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            assert same(second[name], value), name
        assert whole["/scaler/scale"] > 64
        assert whole["/consumed"] == 24


def go_on(group, state, number):
    training = toy_training(Machines(group), seed=5, dropout=0.0)
    if state is not None:
        restore(torch.load(io.BytesIO(state)), training)
    used, share = [], training.machines.share
    training.machines.share = lambda rows: (used.extend(share(rows).tolist()), share(rows))[1]
    losses = train_steps(training, number)
    file = io.BytesIO()
    torch.save(collect(training, Progress()), file)
    training.engine.close()
    return used, losses, file.getvalue()


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3), (2, 3), (3, 1)])
def test_a_run_goes_on_with_other_machines_with_every_sample_once(before, after):
    """Ten rows in batches of 4, 4 and 2: fewer than three ranks, so one has none of them."""
    whole = run_on_ranks(1, go_on, None, 6)[0]
    first = run_on_ranks(before, go_on, None, 2)
    second = run_on_ranks(after, go_on, first[0][2], 4)
    rows = [row for found in (*first, *second) for row in found[0]]
    assert sorted(rows) == sorted([*range(10), *range(10)])
    assert [*first[0][1], *second[0][1]] == pytest.approx(whole[1], rel=1e-4)
    for name, value in torch.load(io.BytesIO(whole[2]))["model"].items():
        for found in second:
            model = torch.load(io.BytesIO(found[2]))["model"]
            torch.testing.assert_close(model[name], value, rtol=1e-3, atol=1e-4)


def found_by(group, folders):
    machines = Machines(group)
    try:
        return find(folders[group.rank()] / FILE, machines)
    except UsageError as error:
        return str(error)


def test_the_latest_checkpoint_is_found_whichever_rank_has_it(tmp_path):
    folders = [tmp_path / str(rank) for rank in range(3)]
    for consumed, folder in zip((4, None, 8), folders, strict=True):
        folder.mkdir()
        if consumed is not None:
            save(folder / FILE, {"format": 3, "consumed": consumed, "w": torch.ones(consumed)})
    found = run_on_ranks(3, found_by, folders)
    assert [state["consumed"] for state in found] == [8, 8, 8]
    assert all(torch.equal(state["w"], torch.ones(8)) for state in found)
    (folders[1] / FILE).write_bytes(b"torn")
    found = run_on_ranks(3, found_by, folders)
    assert found[0] == found[1] == found[2]
    assert "1/checkpoint.pt is not a checkpoint that can be read" in found[0]
    assert run_on_ranks(2, found_by, [tmp_path, tmp_path]) == [None, None]


def looked_at(group):
    def broken():
        raise UsageError("broken")

    machines = Machines(group)
    machines.first_does(lambda: None)
    try:
        machines.first_does(broken)
    except UsageError as error:
        return str(error)


def test_what_the_first_rank_cannot_do_ends_all_with_its_words():
    """A picture that --check-data found ended the first one, and the others waited for it."""
    assert run_on_ranks(2, looked_at) == ["broken", "broken"]


def shared_evaluation(group):
    machines = Machines(group)
    training = toy_training(machines, seed=1)
    wanted = foresee(training.batches, -1, 0, 10, 4, machines)
    found = evaluate(training, Feed(toy_data(), wanted))
    training.engine.close()
    numbers = [found.images, found.loss, found.top1, found.top5]
    return numbers, found.confusion.tolist(), [list(mistake) for mistake in found.worst]


def test_ranks_share_the_evaluation():
    (alone,) = run_on_ranks(1, shared_evaluation)
    for found in run_on_ranks(3, shared_evaluation):
        assert found[0] == pytest.approx(alone[0], rel=1e-6)
        assert found[1] == alone[1]
        assert [m[1:] for m in found[2]] == [m[1:] for m in alone[2]]


class Fragile(Small):
    """Fails in one of its steps, as often as it gets there."""

    fails_at = None

    def forward(self, images):
        if self.training and int(self.body[3].num_batches_tracked) == Fragile.fails_at:
            raise RuntimeError("the power is gone")
        return super().forward(images)


ARGUMENTS = [
    *("--model", "test_train_checkpoints:Fragile", "--batch", "1024", "--epochs", "2"),
    *("--devices", "cpu", "--accum", "1", "--checkpoint-every", "3"),
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
    assert main([*ARGUMENTS, "--out", str(parts), "--resume", "--accum", "1"]) == 0
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
    assert_same_run(whole, parts, 16)


def test_a_run_goes_on_with_the_optimizers_state_shared_out_or_not(tmp_path, monkeypatch):
    """Bit for bit, with four replicas in four memories, in one, and in two."""
    options = [*ARGUMENTS[:4], "--epochs", "1", "--accum", "1", "--checkpoint-every", "3"]
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
