"""Checkpoints are whole or the one before; records are lines of JSON."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import threading
import types

import numpy as np
import pytest
import torch
from faults.processes import finish, run_forked, start_forked
from PIL import Image
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.train import records
from scatterpar.train.command_line import UsageError
from scatterpar.train.records import (
    FILE,
    Metrics,
    Progress,
    Tally,
    accuracies_in_words,
    accuracy_per_class,
    load,
    locked,
    save,
)

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


@pytest.mark.parametrize("earlier", [5, 6])
def test_earlier_run_is_read_but_not_resumed(tmp_path, earlier):
    """Its --val held out other pictures, on which it would now be tested."""
    path = tmp_path / FILE
    torch.save({"format": earlier, "step": 3}, path)
    assert load(path)["step"] == 3
    with pytest.raises(UsageError, match=r"new run .*held out other pictures"):
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


# --- what a test counts ---


@pytest.mark.draws
@pytest.mark.parametrize("classes", [2, 10])
def test_tally_counts_batches_as_one(classes):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(50, classes, generator=generator)
    labels = torch.randint(classes, (50,), generator=generator)
    tally = Tally(classes, "test")
    for rows in torch.arange(50).split(17):
        tally.add(scores[rows], labels[rows], rows[:, None])
    chosen = scores.argmax(1)
    assert tally.loss == pytest.approx(float(nn.CrossEntropyLoss()(scores, labels)))
    assert tally.accuracy == pytest.approx(float((chosen == labels).float().mean()))
    top5 = (scores.topk(min(5, classes)).indices == labels[:, None]).any(1)
    assert tally.accuracy_top5 == pytest.approx(float(top5.float().mean()))
    for label in range(classes):
        for choice in range(classes):
            number = int(((labels == label) & (chosen == choice)).sum())
            assert tally.confusion[label, choice] == number
    wrong = (chosen != labels).nonzero().flatten().tolist()
    confidence = scores.softmax(1).amax(1)
    wrong.sort(key=lambda row: -confidence[row])
    assert [int(mistake.image) for mistake in tally.mistakes] == wrong[:24]
    assert tally.mistakes[0].predicted == chosen[wrong[0]]
    assert Tally(1001, "test").confusion is None


def test_lowest_class_accuracies_first():
    confusion = torch.tensor([[3, 1, 0], [0, 0, 0], [2, 0, 0]])
    measured = accuracy_per_class(confusion, ["a", "without images", "c"])
    assert list(measured.items()) == [("c", 0.0), ("a", 0.75), ("without images", None)]
    said = "accuracy per class: c 0.0%, a 75.0%, without images -"
    assert accuracies_in_words(measured) == said
    many = {str(number): number / 100 for number in range(50)}
    assert accuracies_in_words(many).startswith(
        "lowest accuracies of 50 classes: 0 0.0%"
    )
    assert accuracies_in_words(many).endswith("19 19.0%")


# --- figures ---


@pytest.fixture
def drawn(monkeypatch):
    """The axes of each figure that is drawn; it is also written."""
    kept = []

    def save_figure(figure, path):
        kept.append(figure.axes)
        real(figure, path)

    real = records._save_figure
    monkeypatch.setattr(records, "_save_figure", save_figure)
    return kept


def shown(path):
    return np.asarray(Image.open(path).convert("RGB"))


@pytest.mark.parametrize("epochs", [3, pytest.param(90, marks=pytest.mark.slow)])
def test_curves_have_whole_epochs(tmp_path, drawn, epochs):
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        for step in range(1, 2 * epochs + 1):
            metrics.write(
                "step", step=step, images=50, loss=float("nan") if step == 1 else 1
            )
        for epoch in range(1, epochs + 1):
            values = {"val_loss": 1.0, "val_accuracy": 0.5}
            metrics.write("epoch", step=2 * epoch, epoch=epoch, **values)
    path = tmp_path / "curves.png"
    records.draw_curves(metrics, path, images=100, tested="val")
    loss, accuracy = drawn[0]
    for axes in (loss, accuracy):
        ticks = [tick for tick in axes.get_xticks() if 0 <= tick <= epochs]
        assert ticks == [round(tick) for tick in ticks]
        assert axes.get_xlim()[0] == 0
    assert loss.lines[0].get_xdata()[-1] == epochs  # of the last step
    names = [line.get_label() for line in (*loss.lines, *accuracy.lines)]
    assert names == ["training loss", "val loss", "val accuracy"]
    assert shown(path).shape[2] == 3


@pytest.mark.parametrize(
    "names",
    [
        ["猫", "$5 or $6"],
        pytest.param([str(i) for i in range(300)], marks=pytest.mark.slow),
    ],
)
def test_confusion_matrix_takes_any_names(tmp_path, drawn, names, recwarn):
    confusion = torch.eye(len(names), dtype=torch.int64) * 7
    records.draw_confusion(confusion, names, "title", tmp_path / "confusion.png")
    axes = drawn[0][0]
    if len(names) == 2:
        assert [text.get_text() for text in axes.texts] == ["7", "7"]
        assert [label.get_text() for label in axes.get_xticklabels()] == names
    assert shown(tmp_path / "confusion.png").any()
    assert not recwarn.list


@pytest.mark.parametrize(("channels", "number"), [(1, 60), (3, 5), (3, 1)])
def test_first_batch_shows_image_and_class(tmp_path, drawn, channels, number):
    images = torch.full((number, channels, 8, 8), 200, dtype=torch.uint8)
    labels = torch.arange(number) % 2
    names = ["cat", "a name of $ many letters"]
    records.draw_first_batch(images, labels, names, tmp_path / "x.png")
    (axes,) = drawn[0]
    assert len(axes.images) == len(axes.texts) == min(number, 48)
    assert axes.texts[0].get_text() == "cat"
    pixel = axes.images[0].get_array().tolist()[0][0]
    assert pixel == (200 if channels == 1 else [200] * 3)
    if number > 1:
        assert axes.texts[1].get_text() == "a name of $ many"
    picture = shown(tmp_path / "x.png")
    assert (picture == 200).any()
    # Each image has its place, and none is over another.
    places = {tuple(image.get_extent()) for image in axes.images}
    assert len(places) == min(number, 48)


def test_picture_without_mistakes_is_empty(tmp_path):
    records.draw_mistakes([], ["a", "b"], tmp_path / "x.png")
    assert (shown(tmp_path / "x.png") == 255).all()


# --- the bar ---


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
    with os.fdopen(end, "w") as terminal, os.fdopen(screen, "rb", 0) as read_end:
        monkeypatch.setattr("sys.stderr", terminal)
        with Progress(100, file=terminal):
            assert b"0/100 " in read_end.read(1000)


class Closed(io.StringIO):
    def write(self, _):
        raise BrokenPipeError


def test_closed_pipe_leaves_the_bar_to_other_threads(monkeypatch):
    """A run whose output nobody read any more waited for ever, in its next step."""
    monkeypatch.setattr(records, "_LINE_SECONDS", 0.0)
    file = Closed()
    file.flush = lambda: file.write("")
    with Progress(100, file=file) as progress:
        thread = threading.Thread(target=progress.report, args=(25,))
        thread.start()
        thread.join()
        assert progress.get_lock().acquire(blocking=False)
        progress.get_lock().release()


def test_lines_without_a_terminal(monkeypatch):
    monkeypatch.setattr(records, "_LINE_SECONDS", 0.0)
    file = io.StringIO()
    with Progress(100, file=file) as progress:
        progress.describe("epoch 1/2", loss="0.5")
        progress.report(25)
        progress.mininterval = 1000.0
        progress.report(50)
    _, line = file.getvalue().splitlines()
    assert re.fullmatch(r"epoch 1/2: 25%, .* images/s, [\d:?]+ left, loss=0.5", line)
