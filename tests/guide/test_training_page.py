"""The commands of docs/training-tool.md run, in their order, on a few pictures."""

from __future__ import annotations

import shlex

import pytest
import torch
from faults.processes import run as run_process
from harness.pages import blocks, read
from harness.pictures import write_folder

from scatterpar.__main__ import main as command

pytestmark = [pytest.mark.pictures, pytest.mark.draws, pytest.mark.slow]
PAGE = read("docs/training-tool.md")
# What makes a run of the page small enough for a test.
SMALL = ["--epochs", "1", "--image-size", "32", "--workers", "0"]
SMALL += ["--devices", "cpu:0,cpu:1"]
# A smaller network, whose weights are not fetched.
OTHER = {"timm:resnet18": "timm:test_resnet"}
PLACES = {"runs/RUN": "runs/photos", "PICTURES": "photos/Bag"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder with photos/CLASS, and the runs of the page's first commands."""
    folder = tmp_path_factory.mktemp("page")
    (write_folder(folder / "set", train=20, test=1) / "train").rename(folder / "photos")
    picture = min((folder / "photos" / "Bag").iterdir())
    (folder / "new.jpg").write_bytes(picture.read_bytes())
    return folder


def commands():
    lines = "\n".join(blocks(PAGE, "sh")).splitlines()
    return [line for line in lines if line.startswith("python ")]


@pytest.fixture
def run(photos, monkeypatch):
    """Run a command of the page in the folder, as small as a test needs it."""
    monkeypatch.chdir(photos)

    def run_line(line):
        line = line.replace("--pretrained ", "")
        _, *words = [PLACES.get(word, OTHER.get(word, word)) for word in line.split()]
        if words[0] != "-m":
            ended = run_process(*words)
            assert ended.code == 0, ended.err
            return ended.out
        _, _, name, *options = words
        if name == "train":
            options += SMALL
            if "--val" not in options:
                options += ["--val", "0.2"]
        with torch.random.fork_rng():
            assert command([name, *options]) == 0, shlex.join(options)
        return ""

    return run_line


def test_commands_of_the_page_run_in_order(run, photos):
    names = [line.split()[3] for line in commands() if "-m scatterpar" in line]
    assert {"train", "export", "predict"} <= set(names)
    for line in commands():
        printed = run(line)
        if "classify.py" in line:
            name, label, score = printed.split()
            assert name == "new.jpg:"
            assert label in ("Bag", "Sandal", "Trouser")
            assert 0 < float(score) <= 1
    assert (photos / "classes.csv").read_text().startswith("file,class,score,error\n")
    # The page's four lines, from a file to the name of a class.
    (snippet,) = [text for text in blocks(PAGE, "python") if "load_model" in text]
    exec(snippet.replace("runs/RUN", "runs/photos"), {})
