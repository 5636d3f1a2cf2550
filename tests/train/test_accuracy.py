"""`test` measures the model of a run on other pictures."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from harness.pictures import CLASSES, truncate, write_folder
from harness.runs import write_run

from scatterpar.__main__ import main as command
from scatterpar.train.models import load_model
from scatterpar.train.pictures import read_picture

pytestmark = [pytest.mark.pictures, pytest.mark.draws]
ALONE = ["--workers", "0", "--devices", "cpu"]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", sorted(CLASSES))


@pytest.fixture
def pictures(tmp_path):
    return write_folder(tmp_path / "new", train=1, test=6) / "test"


def measured(run, pictures, tmp_path, *more):
    file = tmp_path / "measured.json"
    words = ["test", str(run), str(pictures), "--json", str(file), *ALONE, *more]
    assert command(words) == 0
    return json.loads(file.read_text())


def test_numbers_are_those_of_the_model(run, pictures, tmp_path, capsys):
    found = measured(run, pictures, tmp_path)
    model, about = load_model(run)
    confusion = torch.zeros(3, 3, dtype=torch.int64)
    for label, name in enumerate(about["class_names"]):
        for file in (pictures / name).iterdir():
            scores = model(read_picture(file, 32)[None])
            confusion[label, scores.argmax()] += 1
    assert found["confusion"] == confusion.tolist()
    right = int(confusion.diagonal().sum())
    assert (found["images"], found["accuracy"]) == (18, right / 18)
    printed = capsys.readouterr().out
    assert f"accuracy: {right / 18:.2%}, loss {found['loss']:.4f}, 18 images" in printed
    counts = confusion[0].tolist()
    assert f"Bag{counts[0]:>24}{counts[1]:>8}{counts[2]:>9}" in printed


def test_folder_with_some_of_the_classes(run, pictures, tmp_path, capsys):
    """Others are counted, and so are files that cannot be read."""
    (pictures / "Bag").rename(pictures / "Hat")
    (pictures / "Sandal").rename(pictures / "SANDAL")
    truncate(min((pictures / "Trouser").iterdir()))
    found = measured(run, pictures, tmp_path)
    assert found["images"] == 11
    assert found["accuracy_per_class"]["Bag"] is None
    assert len(found["unreadable"]) == 1
    printed = capsys.readouterr()
    assert "Bag -" in printed.out
    assert "6 of classes that the training images lack (Hat)" in printed.out
    assert "cannot be read: " in printed.err


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (
            "new",
            r"no picture of the classes Bag, .* of classes .*\(test\), .*\(train\)",
        ),
        ("new/test/Bag", r"no picture of the classes Bag, .* 6 without a label"),
        ("absent", "is no folder; pass one with a folder for each class"),
    ],
)
def test_folder_of_no_class_refused(run, pictures, tmp_path, capsys, place, words):
    assert command(["test", str(run), str(tmp_path / place), *ALONE]) == 2
    printed = capsys.readouterr().err
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(printed)


def test_ctrl_c_writes_no_numbers(run, pictures, tmp_path, capsys, monkeypatch):
    def interrupted(tally, *_):
        tally._sums[0] += 8  # images
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("scatterpar.train.predict._ROWS", 8)
    monkeypatch.setattr("scatterpar.train.accuracy.Tally.add", interrupted)
    file = tmp_path / "none.json"
    words = ["test", str(run), str(pictures), *ALONE, "--json", str(file)]
    assert command(words) == 130
    assert "interrupted after 8 of 18 images" in capsys.readouterr().out
    assert not file.exists()
