"""Whole runs: what they report, and how they are stopped, break, and go
on bit for bit.
"""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import shlex
import shutil
import signal
import time
from importlib.util import find_spec
from unittest import mock

import psutil
import pytest
import torch
from faults.processes import finish, start_forked
from harness.pictures import truncate, write_folder
from harness.runs import (
    Small,
    Stop,
    assert_same_run,
    records,
    steps,
    stop_after,
    wait_until,
)

from scatterpar.__main__ import main as command
from scatterpar.train import model_training
from scatterpar.train import records as record_module
from scatterpar.train.data import load
from scatterpar.train.feed import BrokenError, Feed
from scatterpar.train.model_training import Training
from scatterpar.train.tool_run import main

pytestmark = pytest.mark.draws
# else the included images, without workers
HAS_PICTURES = find_spec("torchvision") is not None
OPTIONS = [
    "--batch",
    "24" if HAS_PICTURES else "1639",
    "--epochs",
    "4",
    "--devices",
    "cpu:0,cpu:1",
]
OPTIONS += [
    "--micro-batch-size",
    "6" if HAS_PICTURES else "410",
    "--ema",
    "0.9",
    "--clip",
    "1",
]
OPTIONS += ["--label-smoothing", "0.1", "--model", f"{__name__}:Slow"]
STEPS = 4 * 5
QUICK = [
    "--batch",
    "48",
    "--epochs",
    "3",
    "--devices",
    "cpu:0,cpu:1",
    "--micro-batch-size",
    "12",
]
QUICK += ["--model", "harness.runs:Small"]
PLAIN = ["--workers", "0", "--augment", "none"]
EMBEDDED = [
    "--model",
    "harness.runs:Small",
    "--epochs",
    "1",
    "--micro-batch-size",
    "128",
]


class Slow(Small):
    """Takes its time, so that a test can interrupt it where it likes."""

    def forward(self, images):
        time.sleep(0.01 * self.training)
        return super().forward(images)


class Stuck(Small):
    """Its third step takes longer than anyone waits."""

    def forward(self, images):
        if self.training and int(self.body[3].num_batches_tracked) == 2:
            print("stuck", flush=True)
            time.sleep(3600)
        return super().forward(images)


class Diverging(Small):
    """Its scores are no numbers from the second step on."""

    def forward(self, images):
        later = self.training and int(self.body[3].num_batches_tracked) > 0
        return super().forward(images) * (torch.nan if later else 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not HAS_PICTURES:
        return "embedded"
    return write_folder(tmp_path_factory.mktemp("pictures"), train=40, test=8)


def train(folder, out, *options):
    return main(["--data", str(folder), *QUICK, "--out", str(out), *options])


# --- stopped, and resumed ---


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The folder of a run that nobody stopped."""
    out = tmp_path_factory.mktemp("whole")
    with torch.random.fork_rng():
        assert (
            main(["--data", str(folder), *OPTIONS, "--workers", "0", "--out", str(out)])
            == 0
        )
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_stopped_run_resumes_bit_for_bit(folder, whole, tmp_path, capsys, number):
    """By the line that it prints: what was typed, and a word more. Other workers may
    read.
    """
    out = tmp_path / "out"
    words = [
        "train",
        "--data",
        str(folder),
        *OPTIONS,
        "--checkpoint-every",
        "2",
        "--out",
        str(out),
    ]
    process = start_forked("-m", "scatterpar", *words, "--workers", "2")
    wait_until(lambda: len(steps(out)) >= 6, tmp_path)
    others = psutil.Process(process.pid).children(recursive=True)
    assert len(others) >= 2 * HAS_PICTURES
    process.send_signal(number)
    ended = finish(process)
    wait_until(lambda: not any(map(is_running, others)), tmp_path)
    assert ended.code == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in ended.err
    if number != signal.SIGKILL:
        made, name = len(steps(out)), signal.Signals(number).name
        assert f"{name}: saving at the end of this step; again: ending now" in ended.err
        said = "interrupted" if number == signal.SIGINT else f"ended by {name}"
        assert re.search(rf"{said} after [12] of 4 epochs, {made} steps", ended.out)
        assert re.search(r"test accuracy: \d", ended.out)
        assert (out / "curves.png").exists()
        assert records(out, "summary")[0]["ending"] == said
        found = re.search(
            r"saved after step (\d+); this goes on from there:\n  (.*)\n", ended.out
        )
        assert int(found[1]) == made < STEPS
        assert shlex.split(found[2])[-1] == "--resume"
    # The options are those of the run; some may be passed again, and others change.
    again = words if number == signal.SIGKILL else ["train", "--out", str(out)]
    assert command([*again, "--workers", "0", "--resume"]) == 0
    assert_same_run(whole, out, STEPS)
    (said,) = re.findall(r"finished after .* (\d+\.\d) s\n", capsys.readouterr().out)
    assert float(said) >= sum(r["seconds_whole"] for r in steps(out)) - 0.1
    assert [start["options"]["resume"] for start in records(out, "run")] == [
        False,
        True,
    ]


def is_running(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False  # it ended in between


@pytest.mark.slow
def test_finished_run_stays_as_it_is(folder, whole, capsys):
    before = {file: file.read_bytes() for file in whole.iterdir()}
    words = ["--data", str(folder), *OPTIONS, "--out", str(whole)]
    for more, code, said in (
        (
            ["--resume"],
            0,
            "finished before, after 4 epochs and 20 steps; --out starts a new run",
        ),
        (
            [],
            2,
            "has a run of 20 steps: --resume goes on from its checkpoint.pt, if there is",
        ),
        (
            ["--resume", "--seed", "1"],
            2,
            "is of a run with --seed 0, not 1: pass --seed 0",
        ),
    ):
        capsys.readouterr()
        assert main([*words, *more]) == code
        assert said in "".join(capsys.readouterr())
    assert {file: file.read_bytes() for file in whole.iterdir()} == before
    assert records(whole, "run")[0].keys() >= {
        "command",
        "devices",
        "options",
        "versions",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_second_signal_ends_run_at_once(tmp_path, number):
    options = ["--model", f"{__name__}:Stuck", "--batch", "1024", "--devices", "cpu"]
    options += [
        "--micro-batch-size",
        "1024",
        "--checkpoint-every",
        "1",
        "--out",
        str(tmp_path),
    ]
    process = start_forked("-m", "scatterpar", "train", *options)
    while process.stdout.readline() != "stuck\n":
        pass
    process.send_signal(number)
    # else two might be seen as one
    while "again: ending now" not in process.stderr.readline():
        pass
    process.send_signal(number)
    assert finish(process).code == 128 + number
    assert torch.load(tmp_path / "checkpoint.pt")["position"]["step"] == 2


@pytest.mark.slow
def test_folder_of_a_run_refused(tmp_path, capsys, monkeypatch):
    """A second run once overwrote what was there."""
    options = [*EMBEDDED, "--devices", "cpu", "--batch", "1024", "--out", str(tmp_path)]
    with stop_after(monkeypatch, 3):
        main(options)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for more, words in (
        ([], "has a run of 3 steps: --resume goes on .* another --out starts anew"),
        (
            ["--resume"],
            "there is no .*checkpoint.pt; name the folder of a run",
        ),
    ):
        assert main([*options, *more]) == 2
        assert re.search(words, capsys.readouterr().err)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "best.pt").touch()
    assert main(options) == 2


@pytest.mark.slow
def test_two_runs_in_one_folder_refused(tmp_path, capsys):
    options = [*EMBEDDED, "--devices", "cpu", "--batch", "4096", "--out", str(tmp_path)]
    with record_module.locked(tmp_path):
        assert main(options) == 2
    assert "another run is writing into" in capsys.readouterr().err
    assert not (tmp_path / "metrics.jsonl").exists()
    assert main(options) == 0
    with record_module.locked(tmp_path):  # it is free again
        pass


@pytest.mark.slow
def test_each_epoch_ends_with_a_checkpoint(tmp_path, monkeypatch):
    """Although there are fewer steps than between two other checkpoints."""
    options = [*EMBEDDED, "--epochs", "2", "--batch", "4096", "--out", str(tmp_path)]
    with stop_after(monkeypatch, 3):
        main([*options, "--devices", "cpu"])
    position = torch.load(tmp_path / "checkpoint.pt")["position"]
    assert (position["step"], position["tested"]) == (2, 1)


@pytest.mark.slow
def test_resumed_run_keeps_its_options(tmp_path, monkeypatch, capsys):
    options = [*EMBEDDED, "--epochs", "2", "--batch", "4096", "--seed", "3"]
    options += ["--devices", "cpu,cpu", "--channels-last", "--drop-at", "1"]
    options += ["--warmup-epochs", "0"]
    with stop_after(monkeypatch, 2):
        main([*options, "--out", str(tmp_path)])
    again = ["--out", str(tmp_path), "--resume"]
    for more, words in (
        (
            ["--seed", "4"],
            "of a run with --seed 3, not 4: pass --seed 3 or leave it out",
        ),
        (["--clip", "1"], "of a run with --clip None, not 1.0: leave out --clip"),
        (["--pretrained"], "of a run with --pretrained False, not True"),
    ):
        assert main([*again, *more]) == 2
        assert words in capsys.readouterr().err
    assert main([*again, "--seed", "3", "--micro-batch-size", "512"]) == 0
    first, second = (start["options"] for start in records(tmp_path, "run"))
    assert second == first | {"resume": True, "micro_batch_size": 512}


@pytest.mark.pictures
def test_resume_with_other_images_refused(tmp_path, monkeypatch, capsys):
    folder, out = write_folder(tmp_path / "data", train=40, test=8), tmp_path / "out"
    with stop_after(monkeypatch, 3):
        train(folder, out, *PLAIN)
    checkpoint = (out / "checkpoint.pt").read_bytes()
    file = min((folder / "train" / "Bag").iterdir())
    file.rename(folder / "train" / "Sandal" / file.name)
    again = ["--out", str(out), "--resume"]
    assert main(again) == 2
    printed = capsys.readouterr().err
    assert "its class_counts were {'train': [40, 40, 40], 'test': [8, 8, 8]}" in printed
    assert "are {'train': [39, 41, 40], 'test': [8, 8, 8]}; restore it" in printed
    (folder / "train" / "Sandal" / file.name).rename(file)
    for part in ("train", "test"):
        (folder / part / "Bag").rename(folder / part / "Hat")
    assert main(again) == 2
    printed = capsys.readouterr().err
    assert "its class_names were ['Bag', 'Sandal', 'Trouser'], and those of" in printed
    for part in ("train", "test"):
        (folder / part / "Hat").rename(folder / part / "Bag")
    assert (out / "checkpoint.pt").read_bytes() == checkpoint
    assert main(again) == 0


# --- broken ---


@pytest.mark.pictures
@pytest.mark.parametrize("skipped", [(), ("--skip-broken", "1")])
def test_broken_picture_ends_resumable_run(tmp_path, capsys, skipped):
    folder = write_folder(tmp_path / "data", train=40, test=8, ending="jpg")
    file, out = min((folder / "train" / "Sandal").iterdir()), tmp_path / "out"
    content = file.read_bytes()
    truncate(file)
    assert train(folder, out, "--workers", "0") == 2
    printed = capsys.readouterr().err
    assert re.search(
        rf"error: {file} cannot be read as an image: image file is trunc", printed
    )
    number = len(steps(out))
    assert (
        f"; the checkpoint after step {number} is kept: --resume goes on from it"
        in printed
    )
    assert torch.load(out / "checkpoint.pt")["position"]["step"] == number
    if not skipped:
        file.write_bytes(content)
    assert train(folder, out, "--resume", *skipped) == 0
    assert len(steps(out)) == 9


@pytest.mark.pictures
def test_broken_first_batch_leaves_folder_free(tmp_path, capsys):
    folder = write_folder(tmp_path / "data", train=4, test=2, ending="png")
    for file in (folder / "train" / "Sandal").iterdir():
        truncate(file)
    options = ["--epochs", "1", "--workers", "0", "--out", str(tmp_path / "out")]
    assert main(["--data", str(folder), *options]) == 2
    assert "no checkpoint was written yet" in capsys.readouterr().err
    assert main(["--data", str(folder), *options, "--skip-broken", "4"]) == 0


@pytest.mark.pictures
def test_skipped_broken_pictures_counted(tmp_path, capsys):
    folder, out = (
        write_folder(tmp_path / "data", train=40, test=8, ending="jpg"),
        tmp_path / "out",
    )
    for part in ("train", "test"):
        truncate(min((folder / part / "Sandal").iterdir()))
    assert (
        train(folder, tmp_path / "first", "--skip-broken", "1", "--workers", "0") == 2
    )
    printed = capsys.readouterr()
    lines = [line for line in printed.out.splitlines() if line.startswith("left out: ")]
    assert ["image file is truncated" in line for line in lines] == [True] * 2
    assert "truncated" in printed.err
    assert "(--skip-broken 2 or more leaves out such images)" in printed.err
    assert train(folder, out, "--skip-broken", "2", "--workers", "0") == 0
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("left out: ") == 2
    assert "2 broken files left out" in printed.out
    assert [r["left_out"] for r in records(out, "epoch")] == [2, 4, 6]
    assert sorted(records(out, "summary")[0]["left_out"].values()) == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["checkpoint.pt", "metrics.jsonl"])
def test_full_disk_leaves_old_checkpoint(tmp_path, capsys, monkeypatch, where):
    def full_for_line(line, **to):
        if '"step": 5' in line:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        print(line, **to)

    def full_for_file(source, target):
        if target.name == where:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        shutil.move(source, target)

    options = [*EMBEDDED, "--devices", "cpu", "--batch", "1024", "--out", str(tmp_path)]
    with stop_after(monkeypatch, 4):
        main([*options, "--checkpoint-every", "4"])
    before = (tmp_path / "checkpoint.pt").read_bytes()
    options += ["--checkpoint-every", "2", "--resume"]
    with monkeypatch.context() as patch:
        if where == "metrics.jsonl":
            patch.setattr(record_module, "print", full_for_line, raising=False)
        else:
            patch.setattr(record_module.os, "replace", full_for_file)
        capsys.readouterr()
        assert main(options) == 2
    printed = capsys.readouterr().err
    assert re.search(
        rf"error: --out: .*{where} cannot be written: No space left on dev", printed
    )
    assert "the checkpoint after step 4 is kept: --resume goes on from it" in printed
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert not list(tmp_path.glob("*.part"))
    assert main(options) == 0
    assert [r["step"] for r in steps(tmp_path)] == [*range(1, 9)]


@pytest.mark.slow
def test_diverged_run_keeps_what_was_reached(tmp_path, capsys):
    options = [
        "--model",
        f"{__name__}:Diverging",
        "--epochs",
        "2",
        "--devices",
        "cpu:0",
    ]
    options += ["--batch", "4096", "--micro-batch-size", "4096", "--out", str(tmp_path)]
    assert main(options) == 1
    printed = capsys.readouterr().out
    assert re.search(
        r"training diverged \(.*\); a lower --base-lr may help; stopped", printed
    )
    assert "stopped after 0 of 2 epochs, 1 steps" in printed
    assert "test accuracy: not measured, no epoch was finished" in printed


@pytest.mark.parametrize("error", [BrokenError, FloatingPointError])
def test_signal_after_training_ends_run_at_once(tmp_path, monkeypatch, error):
    """While it looks for broken images, or draws what was reached."""
    taken = []

    def interrupt(*_, **__):
        taken.append(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    def take(self):
        if taken:
            interrupt()
        taken.append(error)
        raise error("photo.jpg")

    monkeypatch.setattr(Feed, "take", take)
    monkeypatch.setattr("scatterpar.train.tool_run.draw_curves", interrupt)
    with pytest.raises(KeyboardInterrupt):
        main([*EMBEDDED, "--devices", "cpu", "--out", str(tmp_path)])
    assert taken == [error, signal.SIGINT]


@pytest.mark.pictures
def test_summary_without_an_epoch_has_no_accuracy(tmp_path, monkeypatch):
    folder, out = write_folder(tmp_path / "data", train=4, test=2), tmp_path / "out"
    shutil.copytree(folder / "test", folder / "val")
    monkeypatch.setattr(Feed, "take", mock.Mock(side_effect=FloatingPointError))
    assert train(folder, out, *PLAIN) == 1
    (summary,) = records(out, "summary")
    assert summary["test_accuracy"] is None
    assert "val_accuracy" not in summary


@pytest.mark.parametrize(("batch", "devices"), [("1", "cpu"), ("2", "cpu:0,cpu:1")])
def test_sub_step_of_one_image_is_told(tmp_path, capsys, batch, devices):
    options = ["--batch", batch, "--devices", devices, "--out", str(tmp_path)]
    assert main(options) == 2
    printed = capsys.readouterr().err
    assert "--batch with two images for each device; no checkpoint was wri" in printed


def test_torchrun_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night-7")
    assert main([]) == 2
    assert "without torchrun: --processes N starts N" in capsys.readouterr().err


# --- what a run does and says ---


@pytest.mark.slow
def test_run_reports_and_opens_no_port(tmp_path, capsys, monkeypatch):
    def opened(self, address):
        raise AssertionError(f"a port was opened: {address}")

    monkeypatch.setattr("socket.socket.bind", opened)
    monkeypatch.setattr("scatterpar.train.progress._LINE_SECONDS", 0.0)
    devices = ["--devices", "cpu:0,cpu:1", "--batch", "1024"]
    assert main([*EMBEDDED, *devices, "--out", str(tmp_path)]) == 0
    printed, accuracy = (
        capsys.readouterr(),
        torch.load(tmp_path / "best.pt")["accuracy"],
    )
    for words in (
        f"writing to {tmp_path}\n",
        "cpu:1   512:1024  4 x 128",
        "batches of 1,024, for 8 steps an epoch of 8,192; --batch sets it",
        "epoch 1/1: loss",
        "finished after 1 of 1 epochs, 8 steps",
        f"best epoch: 1, test accuracy {accuracy:.2%}, in {tmp_path / 'best.pt'}",
        f"\ntest accuracy: {accuracy:.2%}",
        "images of each class: T-shirt/top 809 + 191, Trouser 792 + 208, ",
        "wrote metrics.jsonl, curves.png, confusion.png, mistakes.png, first_batch.png",
    ):
        assert words in printed.out
    line = r"^epoch 1/1: 25%, .* images/s, .* left, loss=\d+\.\d{4}, waiting=\d+%$"
    assert re.search(line, printed.out, re.MULTILINE)
    assert printed.err == ""  # a bar is for terminals
    lines = [
        json.loads(line)
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["kind"] for line in lines] == [
        "run",
        *["step"] * 8,
        "epoch",
        "summary",
    ]
    assert lines[1]["images"] == 1024
    assert lines[1]["bytes"]["scatter"] == 1024 * (28 * 28 + 8)
    assert lines[-1]["test_accuracy"] == lines[-2]["test_accuracy"] == accuracy
    assert lines[-1]["accuracy_per_class"].keys() == set(load().class_names)
    report = lines[8]
    copied = sum(report["bytes"].values())
    assert f"copied per step: {copied:,} bytes; nn.DataParallel, called" in printed.out
    for name in ("curves.png", "confusion.png", "first_batch.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.pictures
@pytest.mark.parametrize("ends", [False, True])
def test_val_picks_best_epoch_test_runs_once(tmp_path, capsys, monkeypatch, ends):
    """Also by a run that ends before that test, and goes on."""
    folder, out = write_folder(tmp_path / "data", train=40, test=8), tmp_path / "out"
    (folder / "test").rename(folder / "Valid")
    other = write_folder(tmp_path / "other", train=1, test=12)
    (other / "test").rename(folder / "test")
    if ends:
        real, tested = Training.test, []

        def test(self, feed, part="test", *more, **options):
            tested.append(part)
            if part == "test":
                raise Stop
            return real(self, feed, part, *more, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Training, "test", test)
            with pytest.raises(Stop):
                train(folder, out, *PLAIN, "--base-lr", "0.1")
        assert tested == ["val"] * 3 + ["test"]
        assert main(["--out", str(out), "--resume"]) == 0
    else:
        assert train(folder, out, *PLAIN, "--base-lr", "0.1") == 0
    printed = capsys.readouterr().out
    epochs, (summary,) = records(out, "epoch"), records(out, "summary")
    best = max(epoch["val_accuracy"] for epoch in epochs)
    assert torch.load(out / "best.pt")["accuracy"] == best
    assert "test_accuracy" not in epochs[0]
    assert summary["val_accuracy"] == epochs[-1]["val_accuracy"]
    assert f"val accuracy {best:.2%}, in {out / 'best.pt'}" in printed
    accuracy = summary["test_accuracy"]
    assert f"test accuracy: {accuracy:.2%}, of the best epoch's weights" in printed
    words = [str(out), str(folder / "test"), "--workers", "0"]
    assert command(["predict", *words, "--model", "harness.runs:Small"]) == 0
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    right = sum(line["file"].split("/")[0] == line["class"] for line in lines)
    assert right / len(lines) == pytest.approx(accuracy)


@pytest.mark.pictures
def test_training_options_reach_the_run(folder, tmp_path, capsys):
    options = ["--optimizer", "adamw", "--autocast", "float16", "--channels-last"]
    options += [
        "--base-lr",
        "0.003",
        "--drop-at",
        "1",
        "2",
        "--warmup-epochs",
        "0",
        *PLAIN,
    ]
    assert train(folder, tmp_path, *options) == 0
    printed = capsys.readouterr().out
    rates = [r["learning_rate"] for r in steps(tmp_path)]
    peak = 0.003 * (40 / 256) ** 0.5  # 120 images in three steps
    assert rates == pytest.approx([peak] * 3 + [peak / 10] * 3 + [peak / 100] * 3)
    state, best = (torch.load(tmp_path / name) for name in ("checkpoint.pt", "best.pt"))
    assert state["scaler"]["scale"] > 0
    assert "cpu:0   0:20" in printed
    assert re.search(r"images/s, waiting \d+%", printed)
    assert best["accuracy"] == max(
        r["test_accuracy"] for r in records(tmp_path, "epoch")
    )
    assert best["model"].keys() == Small(3).state_dict().keys()


def test_engine_options_reach_the_engine(tmp_path):
    refused = mock.patch.object(
        model_training, "ScatterOnceParallel", side_effect=KeyError
    )
    with refused as engine, pytest.raises(KeyError):
        main([*EMBEDDED, "--devices", "cpu,cpu", "--compile", "--out", str(tmp_path)])
    given = {
        "buffers": "batch",
        "compile": True,
        "micro_batch_size": 128,
    }
    assert given.items() <= engine.call_args.kwargs.items()


@pytest.mark.slow
def test_averaged_weights_tested_and_kept(tmp_path):
    options = [
        "--devices",
        "cpu",
        "--batch",
        "4096",
        "--ema",
        "0.5",
        "--out",
        str(tmp_path),
    ]
    assert main([*EMBEDDED, *options]) == 0
    state, best = (torch.load(tmp_path / name) for name in ("checkpoint.pt", "best.pt"))
    assert int(state["average"]["n_averaged"]) == 2
    for name, value in best["model"].items():
        assert torch.equal(value, state["average"][f"module.network.{name}"]), name
    assert not torch.equal(best["model"]["head.weight"], state["model"]["head.weight"])
