"""`predict` writes the classes of pictures, with what a run has learned."""

import csv
import re
import shutil
import signal
from unittest import mock

import pytest
import torch
from harness.pictures import truncate, write_folder
from PIL import Image

from scatterpar.__main__ import main as command
from scatterpar.train import predict as predict_module
from scatterpar.train import records as record_module

pytestmark = [pytest.mark.pictures, pytest.mark.draws]
ALONE = ["--workers", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pictures"), train=40, test=8)


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """A run that has learned its three classes."""
    out = tmp_path_factory.mktemp("out") / "run"
    options = ["--data", str(folder), "--batch", "48", "--epochs", "6"]
    options += ["--base-lr", "0.1", "--devices", "cpu", "--micro-batch-size", "48"]
    options += [*ALONE, "--augment", "none", "--ema", "0.5"]
    figures = "draw_curves", "draw_confusion", "draw_mistakes", "draw_first_batch"
    undrawn = mock.patch.multiple(record_module, **dict.fromkeys(figures, mock.DEFAULT))
    with torch.random.fork_rng(), undrawn:
        assert command(["train", *options, "--out", str(out)]) == 0
    return out


def predicted(capsys, *arguments):
    capsys.readouterr()
    assert command(["predict", *map(str, arguments)]) == 0
    return list(csv.DictReader(capsys.readouterr().out.splitlines()))


def accuracy(found):
    return sum(row["file"].split("/")[0] == row["class"] for row in found) / len(found)


def test_predict_writes_classes_and_scores(folder, finished, capsys, tmp_path):
    found = predicted(
        capsys, finished / "best.pt", folder / "val", "--top", "2", *ALONE
    )
    assert [row["file"] for row in found] == sorted(row["file"] for row in found)
    assert len(found) == 24
    assert accuracy(found) == torch.load(finished / "best.pt")["accuracy"] > 0.8
    for row in found:
        assert 1 >= float(row["score"]) >= float(row["score_2"]) >= 0
    out = tmp_path / "found.csv"  # a folder of a run is its best.pt
    options = ["--devices", "cpu:0,cpu:1", "--micro-batch-size", "2", "--workers", "1"]
    options += ["--out"]
    assert predicted(capsys, finished, folder / "val", *options, out) == []
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [(r["file"], r["class"]) for r in rows] == [
        (r["file"], r["class"]) for r in found
    ]
    one = folder / "val" / found[5]["file"]
    (alone,) = predicted(capsys, finished, one, "--top", "2", *ALONE)
    assert alone["class"] == found[5]["class"]
    assert float(alone["score"]) == pytest.approx(float(found[5]["score"]), abs=1e-5)
    assert alone["file"] == one.name


def test_folders_of_classes_have_an_accuracy(folder, finished, tmp_path, capsys):
    """Of a new folder, too; files elsewhere have a line, and are not counted."""
    place = tmp_path / "new"
    shutil.copytree(folder / "val" / "Bag", place / "Bag")
    shutil.copytree(folder / "val" / "Sandal", place / "unknown")
    table = predicted(capsys, finished, place, "--out", tmp_path / "a.csv", *ALONE)
    assert table == []
    table = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    bags = [row["class"] == "Bag" for row in table if row["file"].startswith("Bag/")]
    assert (len(table), len(bags)) == (16, 8)
    capsys.readouterr()
    assert command(["predict", str(finished), str(place), *ALONE]) == 0
    said = capsys.readouterr().err
    share = sum(bags) / 8
    assert f"accuracy: {share:.2%} of 8 pictures in folders of classes" in said
    assert f"Bag {share:.1%}" in said
    assert command(["predict", str(finished), str(place / "unknown"), *ALONE]) == 0
    assert "accuracy" not in capsys.readouterr().err


def test_several_pictures_keep_their_paths(folder, finished, capsys):
    files = sorted((folder / "val" / "Bag").iterdir())[:2]
    table = predicted(capsys, finished, *files, *ALONE)
    assert [row["file"] for row in table] == [str(file) for file in files]


def test_checkpoint_of_two_weights_refused(folder, finished, capsys):
    """The ones after --ema are those that were tested, and best.pt has them alone."""
    words = ["predict", str(finished / "checkpoint.pt"), str(folder / "val"), *ALONE]
    assert command(words) == 2
    assert "name the run's folder, whose best.pt has those" in capsys.readouterr().err


@pytest.mark.slow
def test_predict_reads_grey_images(folder, tmp_path, capsys):
    """The default run's model, of MNIST-family data, takes one channel."""
    options = ["--epochs", "1", "--devices", "cpu", "--base-lr", "0.05"]
    options += ["--batch", "512"]
    assert command(["train", *options, "--out", str(tmp_path)]) == 0
    found = predicted(capsys, tmp_path, folder / "train", *ALONE)
    assert accuracy(found) > 2 / 3


def test_lines_stay_and_resume_adds_the_others(folder, finished, tmp_path, capsys):
    """A file that was broken off keeps its whole lines."""
    whole, out = tmp_path / "whole.csv", tmp_path / "part.csv"
    (tmp_path / "note.txt").touch()
    words = ["predict", str(finished), str(folder / "val"), *ALONE, "--out"]
    assert command([*words, str(whole)]) == 0
    lines = whole.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:9]) + lines[9][:7])
    assert command([*words, str(out), "--resume"]) == 0
    assert out.read_text() == whole.read_text()
    assert command([*words, str(out), "--resume"]) == 0  # there are no others
    assert out.read_text() == whole.read_text()
    assert command([*words, str(out), "--resume", "--top", "2"]) == 2
    assert "part.csv has the columns file, class, score, err" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_written(folder, finished, tmp_path, capsys, monkeypatch):
    out = tmp_path / "part.csv"
    monkeypatch.setattr("scatterpar.train.predict._ROWS", 8)
    write = predict_module._write

    def interrupted(file, lines):
        write(file, lines)
        if out.read_text().count("\n") == 1 + 16:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("scatterpar.train.predict._write", interrupted)
    words = ["predict", str(finished), str(folder / "val"), *ALONE, "--out", str(out)]
    assert command(words) == 130
    assert len(out.read_text().splitlines()) == 1 + 16
    said = capsys.readouterr().err
    assert (
        f"16 of 24 files have a line in {out}; the same command with --resume" in said
    )
    assert command([*words, "--resume"]) == 0
    assert len(out.read_text().splitlines()) == 1 + 24


def test_wrong_arguments_told_in_words(folder, finished, tmp_path, capsys):
    best, other, name = (
        finished / "best.pt",
        tmp_path / "other.pt",
        "harness.runs:Small",
    )
    state = torch.load(best)
    state["about"]["model"] = name
    torch.save(state, other)
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"<html>")
    for words, *arguments in (
        ("empty is not here, or empty", best, tmp_path / "empty"),
        ("absent.png is not here", best, tmp_path / "absent.png"),
        ("there is no .*absent.pt; name the folder", folder / "absent.pt", folder),
        (
            f"code from elsewhere: give --model {name} if it may be called",
            other,
            folder,
        ),
        (f"does not fit {name}", other, folder / "val", "--model", name),
        ("no picture can be read: cannot identify", best, broken, *ALONE),
    ):
        assert command(["predict", *map(str, arguments)]) == 2
        printed = capsys.readouterr().err
        assert re.search(words, printed)
        assert re.fullmatch("scatterpar predict: error: .*\n", printed)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_one_line_per_file_with_its_error(folder, finished, tmp_path, capsys, workers):
    """Pictures of other kinds are read as in training."""
    place = write_folder(tmp_path, train=1, test=3, ending="jpg") / "val"
    first = min((place / "Bag").iterdir())
    with Image.open(first) as picture:
        bright = picture.convert("I").point(lambda value: value * 257)
        bright.convert("I;16").save(place / "Bag" / "deep.png")
    truncate(first)
    (place / "a note.txt").touch()
    (place / ".DS_Store").touch()
    Image.new("F", (28, 28), 1000).save(place / "float.TIF")
    capsys.readouterr()
    assert command(["predict", str(finished), str(place), "--workers", workers]) == 0
    printed = capsys.readouterr()
    rows = list(csv.DictReader(printed.out.splitlines()))
    files = [path for path in place.rglob("*.*") if path.name != ".DS_Store"]
    listed = sorted(path.relative_to(place).as_posix() for path in files)
    assert sorted(row["file"] for row in rows) == listed
    errors = {row["file"]: row["error"] for row in rows if row["error"]}
    assert errors.keys() == {"a note.txt", "float.TIF", f"Bag/{first.name}"}
    assert "truncated" in errors[f"Bag/{first.name}"]
    assert "floats from 1000 to 1000" in errors["float.TIF"]
    assert "cannot identify image file" in errors["a note.txt"]
    assert {bool(row["class"]) == bool(row["score"]) for row in rows} == {True}
    assert [row["file"] for row in rows if not row["class"]] == sorted(errors)
    assert "3 of 12 files have no class; the column error says why" in printed.err
