"""Whole runs on folders of pictures: resumed, broken, killed, on a full disk, and used."""

from __future__ import annotations

import csv
import errno
import os
import re
import sys
import time

import pytest
import torch
from faults.processes import run
from harness.pictures import truncate, write_folder
from harness.runs import assert_same_run, records, steps
from torch import nn

from scatterpar.__main__ import main as command
from scatterpar.train import feed, training
from scatterpar.train import records as record_module
from scatterpar.train import run as tool
from scatterpar.train.records import Metrics
from scatterpar.train.run import main

pytestmark = [pytest.mark.pictures, pytest.mark.draws]

QUICK = ["--batch", "48", "--epochs", "3", "--devices", "cpu:0,cpu:1", "--micro-batch-size", "12"]
QUICK += ["--model", f"{__name__}:Dropping"]  # a third of the default network's time
PLAIN = ["--workers", "0", "--augment", "none"]


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch):
    """Only the run whose page is looked at draws its curves, which takes longer than to train."""
    monkeypatch.setattr(tool, "draw_curves", lambda metrics, path: path.touch())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pictures"), train=40, test=8)


def train(folder, out, *options):
    return main(["--data", str(folder), *QUICK, "--out", str(out), *options])


class Stop(Exception):
    pass


def test_a_run_resumed_in_the_middle_of_an_epoch_is_the_uninterrupted_one(
    folder, tmp_path, monkeypatch, capsys
):
    """Augmented, averaged, with dropout; with other numbers of workers before and after."""
    options = ["--ema", "0.9", "--clip", "1", "--label-smoothing", "0.1", "--checkpoint-every", "1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(folder, whole, *options, "--workers", "0") == 0
    for last in (2, 4):
        stop_after(monkeypatch, last)
        resume = ["--resume"] if last == 4 else []
        with pytest.raises(Stop):
            train(folder, parts, *options, "--workers", str(last // 2), *resume)
    monkeypatch.undo()
    assert train(folder, parts, *options, "--workers", "2", "--resume") == 0
    assert_same_run(whole, parts, 9)
    results = [[r["test_accuracy"] for r in records(out, "epoch")] for out in (whole, parts)]
    assert results[0] == results[1]
    starts = records(parts, "run")
    assert [start["options"]["resume"] for start in starts] == [False, True, True]
    assert starts[0]["versions"]["torch"] == torch.__version__
    assert starts[0].keys() >= {"command", "devices", "system", "commit"}
    assert_all_sessions_count(parts, capsys.readouterr().out)


def assert_all_sessions_count(out, printed):
    (said,) = re.findall(r"finished after .* steps, (\d+\.\d) s in 3 sessions", printed)
    assert float(said) >= sum(r["seconds_whole"] for r in steps(out)) - 0.1
    epochs = records(out, "epoch")
    counted = sum(r["seconds"] * r["images_per_second"] for r in epochs)
    assert counted == pytest.approx(3 * 120)


class Dropping(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, 16), nn.BatchNorm1d(16))
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(16, num_classes))

    def forward(self, images):
        return self.head(self.body(images))


def stop_after(monkeypatch, number):
    """Let the run end once so many steps are recorded and saved."""
    write = Metrics.write

    def stopping(self, kind, **fields):
        if kind == "step" and fields["step"] > number:
            raise Stop
        write(self, kind, **fields)

    monkeypatch.setattr(Metrics, "write", stopping)


def test_a_broken_picture_ends_a_run_that_can_go_on(tmp_path, capsys):
    folder = write_folder(tmp_path / "data", train=40, test=8, ending="jpg")
    file, out = min((folder / "train" / "Sandal").iterdir()), tmp_path / "out"
    content = file.read_bytes()
    truncate(file)
    assert train(folder, out, "--workers", "1") == 2
    printed = capsys.readouterr().err
    assert re.search(rf"error: {file} cannot be read as an image: image file is trunc", printed)
    reached = re.search(r"; the checkpoint after step (\d+) is kept: --resume goes on", printed)
    number = int(reached[1]) if reached else 0
    assert number or "no checkpoint was written yet" in printed
    assert len(steps(out)) == number
    file.write_bytes(content)
    assert train(folder, out, *(["--resume"] if number else [])) == 0
    assert len(steps(out)) == 9


def test_a_run_whose_first_picture_is_broken_leaves_nothing_to_resume(tmp_path, capsys):
    folder = write_folder(tmp_path / "data", train=16, test=2, ending="jpg")
    for file in (folder / "train").rglob("*.jpg"):
        truncate(file)
    options = ["--image-size", "28", "--workers", "0"]
    assert train(folder, tmp_path / "out", *options) == 2
    assert "; no checkpoint was written yet" in capsys.readouterr().err
    assert not (tmp_path / "out" / "checkpoint.pt").exists()


def test_broken_pictures_can_be_left_out_and_are_counted(tmp_path, capsys):
    folder = write_folder(tmp_path / "data", train=40, test=8, ending="jpg")
    for part in ("train", "test"):
        truncate(min((folder / part / "Sandal").iterdir()))
    out = tmp_path / "out"
    for skipped in ("1", "2"):
        options = ["--skip-broken", skipped, "--workers", "0"]
        assert train(folder, out if skipped == "2" else tmp_path / "first", *options) == (
            2 if skipped == "1" else 0
        )
        printed = capsys.readouterr()
        assert ("(--skip-broken 2 or more leaves it out)" in printed.err) == (skipped == "1")
    assert (printed.out + printed.err).count("left out: ") == 2
    assert "2 broken files left out" in printed.out
    assert [r["left_out"] for r in records(out, "epoch")] == [2, 4, 6]
    (summary,) = records(out, "summary")
    assert sorted(summary["left_out"].values()) == [3, 3]


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["checkpoint", "metrics"])
def test_a_full_disk_leaves_the_checkpoint_before(folder, tmp_path, capsys, monkeypatch, where):
    out = tmp_path / "out"
    stop_after(monkeypatch, 4)
    with pytest.raises(Stop):
        train(folder, out, "--checkpoint-every", "4", "--workers", "0")
    monkeypatch.undo()
    kept = (out / "checkpoint.pt").read_bytes()
    if where == "checkpoint":
        monkeypatch.setattr(record_module.torch, "save", full)
    else:
        late = lambda line, **to: full() if '"step": 5' in line else print(line, **to)  # noqa: E731
        monkeypatch.setattr(record_module, "print", late, raising=False)
    options = ["--checkpoint-every", "2", "--workers", "0", "--resume"]
    capsys.readouterr()
    assert train(folder, out, *options) == 2
    printed = capsys.readouterr().err
    name = "(best|checkpoint).pt" if where == "checkpoint" else "metrics.jsonl"
    assert re.search(rf"error: --out: .*{name} cannot be written: No space left on dev", printed)
    assert "the checkpoint after step 4 is kept: --resume goes on from it" in printed
    assert (out / "checkpoint.pt").read_bytes() == kept
    assert not list(out.glob("*.part"))
    monkeypatch.undo()
    assert train(folder, out, *options) == 0
    assert [r["step"] for r in steps(out)] == [*range(1, 10)]


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path):
    """A file that may not grow beyond 100 KB stands for it: the checkpoint is larger."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
        "from scatterpar.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    tool = ["train", "--epochs", "1", "--devices", "cpu", "--out", str(tmp_path)]
    outcome = run("-c", code, *tool, OMP_NUM_THREADS="1")
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    assert re.search(r"error: --out: .*best.pt cannot be written: .*no checkpoint", outcome.err)
    assert not (tmp_path / "best.pt").exists()


class Convolving(Dropping):
    """With a layer that takes images in the layout that is asked for."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.first = nn.Conv2d(3, 3, 1)

    def forward(self, images):
        assert images.dtype == torch.float32
        return super().forward(self.first(images))


def test_the_options_of_training_reach_the_run(folder, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--optimizer", "adamw", "--autocast", "float16", "--channels-last"]
    options += ["--model", f"{__name__}:Convolving", "--measure-noise"]
    options += ["--base-lr", "0.003", "--drop-at", "1", "2", "--warmup-epochs", "0", *PLAIN]
    assert train(folder, out, *options) == 0
    printed = capsys.readouterr().out
    rates = [r["learning_rate"] for r in steps(out)]
    peak = 0.003 * 40 / 256  # 120 images in three steps
    assert rates == pytest.approx([peak] * 3 + [peak / 10] * 3 + [peak / 100] * 3)
    state = torch.load(out / "checkpoint.pt")
    assert state["scaler"]["scale"] > 0
    assert state["noise"]["noise"] > 0
    assert "noise scale" in printed
    assert "cpu:0   0:20" in printed
    best = torch.load(out / "best.pt")
    assert best["accuracy"] == max(r["test_accuracy"] for r in records(out, "epoch"))
    assert best["model"].keys() == Convolving(3).state_dict().keys()


@pytest.mark.parametrize("batch", ["4096", "auto"])
def test_the_rate_is_that_of_the_images_that_a_step_has(folder, tmp_path, capsys, batch):
    """120 images were once trained on with the rate of 4096, or with that of 256 that grow."""
    options = [*QUICK[-2:], "--micro-batch-size", "24", "--devices", "cpu:0,cpu:1", *PLAIN]
    options += ["--epochs", "2", "--base-lr", "0.003", "--warmup-epochs", "0", "--batch", batch]
    assert main(["--data", str(folder), "--out", str(tmp_path), *options]) == 0
    rates = [r["learning_rate"] for r in steps(tmp_path)]
    peak = 0.003 * 120 / 256
    assert rates == pytest.approx([peak, peak / 2])
    assert [r["images"] for r in steps(tmp_path)] == [120, 120]
    assert [r["batch"] for r in records(tmp_path, "epoch")] == [120, 120]
    printed = capsys.readouterr().out
    said = "--batch 4096 is more than the 120 images to train on: each step takes all of them"
    assert (said in printed) == (batch == "4096")
    assert ("the gradient's noise scale doubles it" in printed) == (batch == "auto")


def test_how_the_engine_works_is_said_to_it(folder, tmp_path, monkeypatch, capsys):
    def refusing(*_, **keywords):
        raise ValueError(f"{keywords}")

    monkeypatch.setattr(training, "ScatterOnceParallel", refusing)
    for option, words in [
        (["--compile"], "'buffers': 'batch', 'measure_noise': False, 'compile': True"),
        (["--measure-noise"], "'measure_noise': True, 'compile': None"),
    ]:
        assert train(folder, tmp_path, *option) == 2
        assert words in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["--devices", "cpu", "--measure-noise", "--out", str(tmp_path)]) == 2
    words = "--measure-noise compare the gradients of replicas, and there is one"
    assert words in capsys.readouterr().err


def test_the_average_is_what_is_tested_and_kept(folder, tmp_path):
    assert train(folder, tmp_path, "--ema", "0.5", "--epochs", "1", *PLAIN) == 0
    state, best = (torch.load(tmp_path / name) for name in ("checkpoint.pt", "best.pt"))
    average = {name: value for name, value in state["average"].items() if name != "n_averaged"}
    assert int(state["average"]["n_averaged"]) == 3
    for name, value in best["model"].items():
        assert torch.equal(value, average[f"module.network.{name}"]), name
    assert any(
        not torch.equal(best["model"][name], value) for name, value in state["model"].items()
    )


def test_waiting_is_shown(folder, tmp_path, capsys, monkeypatch):
    joined = feed._joined

    def slowly(*pieces):
        time.sleep(0.05)
        return joined(*pieces)

    monkeypatch.setattr(feed, "_joined", slowly)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert train(folder, tmp_path, "--workers", "0", "--epochs", "1", "--batch", "12") == 0
    printed = capsys.readouterr()
    assert re.search(r"images/s, waiting \d+%", printed.out)
    assert re.search(r"images/s, loss=\d.*, waiting=\d+%", printed.err)
    (epoch,) = records(tmp_path, "epoch")
    assert epoch["seconds_waited"] >= 10 * 0.05  # in each of ten steps


def test_a_whole_step_says_what_crossed(folder, tmp_path, capsys):
    """A test sends the parameters, and then the next step has none to send."""
    assert train(folder, tmp_path, *PLAIN) == 0
    sent = [r["bytes"]["replicate"] for r in steps(tmp_path)]
    assert sent[3] == sent[6] < min(sent[:3])
    (summary,) = records(tmp_path, "summary")
    assert summary["bytes"]["replicate"] == sent[0]
    assert "crossed between devices in a step, in MB: scatter 0.09" in capsys.readouterr().out
    options = ["--devices", "cpu,cpu", "--epochs", "1", *PLAIN]
    assert train(folder, tmp_path / "shared", *options) == 0
    assert "\nnothing had to cross between devices\n" in capsys.readouterr().out


def test_without_a_terminal_a_line_comes_now_and_then(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tool, "_LINE_SECONDS", 0.0)
    assert train(folder, tmp_path, "--epochs", "1", *PLAIN) == 0
    line = r"^epoch 1/1, 67%: loss \d+\.\d{4}, [\d,]+ images/s, \d+:\d\d:\d\d left$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """A run that has learned its three classes."""
    out = tmp_path_factory.mktemp("out") / "run"
    options = ["--epochs", "6", "--base-lr", "0.1", "--model", "cnn", *PLAIN]
    with torch.random.fork_rng():
        assert train(folder, out, *options) == 0
    return out


def predicted(capsys, *arguments):
    assert command(["predict", *map(str, arguments)]) == 0
    return list(csv.DictReader(capsys.readouterr().out.splitlines()))


def test_predict_writes_classes_and_scores(folder, finished, capsys, tmp_path):
    found = predicted(capsys, finished / "best.pt", folder / "test", "--top", "2", "--workers", "0")
    assert [row["file"] for row in found] == sorted(row["file"] for row in found)
    assert len(found) == 24
    right = sum(row["file"].split("/")[0] == row["class"] for row in found)
    assert right / 24 == torch.load(finished / "best.pt")["accuracy"] > 0.8
    for row in found:
        assert 1 >= float(row["score"]) >= float(row["score_2"]) >= 0
        assert row["class"] != row["class_2"]
    out = tmp_path / "found.csv"
    options = ["--devices", "cpu:0,cpu:1", "--micro-batch-size", "2", "--workers", "1", "--out"]
    assert predicted(capsys, finished / "best.pt", folder / "test", *options, out) == []
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [(r["file"], r["class"]) for r in rows] == [(r["file"], r["class"]) for r in found]
    one = folder / "test" / found[5]["file"]
    (alone,) = predicted(capsys, finished / "best.pt", one, "--top", "2", "--workers", "0")
    assert alone == found[5] | {"file": one.name}
    last = predicted(capsys, finished / "checkpoint.pt", folder / "test", "--workers", "0")
    assert len(last) == 24


@pytest.mark.slow
def test_predict_reads_the_pictures_of_a_model_of_grey_images(folder, tmp_path, capsys):
    """The default run's model, of MNIST-family data, takes one channel."""
    options = ["--epochs", "1", "--devices", "cpu", "--base-lr", "0.05"]
    assert main([*options, "--batch", "512", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    found = predicted(capsys, tmp_path / "best.pt", folder / "train", "--workers", "0")
    assert sum(row["file"].split("/")[0] == row["class"] for row in found) > 80


class Elsewhere(Dropping):
    pass


def test_predict_says_what_is_wrong(folder, finished, tmp_path, capsys):
    def refused(words, *arguments):
        assert command(["predict", *map(str, arguments)]) == 2
        printed = capsys.readouterr().err
        assert re.search(words, printed)
        assert re.fullmatch("scatterpar predict: error: .*\n", printed)

    (tmp_path / "empty").mkdir()
    refused("empty contains no pictures", finished / "best.pt", tmp_path / "empty")
    refused("nowhere contains no pictures", finished / "best.pt", tmp_path / "nowhere")
    refused("is not a checkpoint that can be read", folder / "absent.pt", folder)
    state = torch.load(finished / "best.pt")
    state["about"]["model"] = f"{__name__}:Elsewhere"
    torch.save(state, tmp_path / "other.pt")
    words = f"code from elsewhere: give --model {__name__}:Elsewhere if it may be called"
    refused(words, tmp_path / "other.pt", folder / "test")
    allowed = ["--model", f"{__name__}:Elsewhere"]
    refused("does not fit --model train.test", tmp_path / "other.pt", folder / "test", *allowed)
    truncate_one = write_folder(tmp_path / "data", train=1, test=3, ending="jpg") / "test"
    truncate(min((truncate_one / "Bag").iterdir()))
    arguments = [finished / "best.pt", truncate_one, "--workers", "0"]
    refused("cannot be read as an image: .*truncated", *arguments)
    assert len(predicted(capsys, *arguments, "--skip-broken", "1")) == 8
