"""Pretrained weights: found, kept while layers are frozen, and used by a new user."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
import torch
from harness.pages import read
from harness.pictures import CLASSES, write_folder
from harness.runs import records, steps

from scatterpar.__main__ import main as command
from scatterpar.train import libraries
from scatterpar.train.libraries import library

pytestmark = [pytest.mark.pictures, pytest.mark.draws]
REPOSITORY = "models--timm--test_resnet.r160_in1k"
QUICK = ["--model", "timm:test_resnet", "--image-size", "32", "--augment", "none"]
QUICK += ["--workers", "0", "--devices", "cpu", "--batch", "18"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the hub's, empty so far. Returns a function that fills it."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def fill():
        network = library("timm.models").create_model("test_resnet")
        state = {name: value.clone() for name, value in network.state_dict().items()}
        commit = "0" * 40
        folder = tmp_path / "cache" / REPOSITORY
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(commit)
        (folder / "snapshots" / commit).mkdir(parents=True)
        file = folder / "snapshots" / commit / "model.safetensors"
        library("safetensors.torch").save_file(state, file)
        return state

    return fill


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "photos", train=12, test=4)


def train(folder, out, *more):
    words = ["--data", str(folder), "--out", str(out), *QUICK, *more]
    return command(["train", *words])


def test_frozen_layers_keep_cached_weights(cache, folder, tmp_path, capsys):
    """Running statistics, too; the head starts from zero. Then all layers learn."""
    weights = cache()
    out = tmp_path / "run"
    assert train(folder, out, "--freeze", "1", "--epochs", "1") == 0
    printed = capsys.readouterr().out
    assert "timm:test_resnet starts from pretrained weights" in printed
    assert "AdamW with a learning rate of" in printed
    learned = torch.load(out / "best.pt")["model"]
    changed = {
        name for name in learned if not torch.equal(learned[name], weights[name])
    }
    assert changed == {"fc.weight", "fc.bias"}
    first = steps(out)[0]["loss"]
    assert first == pytest.approx(torch.tensor(len(CLASSES)).log().item(), rel=1e-4)
    other = tmp_path / "other"
    assert train(folder, other, "--freeze", "1", "--epochs", "2") == 0
    last = torch.load(other / "checkpoint.pt")["model"]
    assert not torch.equal(last["conv1.0.weight"], weights["conv1.0.weight"])
    assert not torch.equal(last["bn1.running_mean"], weights["bn1.running_mean"])


def test_resumed_run_needs_no_cached_weights(cache, folder, tmp_path, monkeypatch):
    cache()
    out = tmp_path / "run"
    assert train(folder, out, "--epochs", "2", "--patience", "9") == 0
    whole = torch.load(out / "checkpoint.pt")["model"]
    # As if it had been stopped after the first epoch.
    other = tmp_path / "other"
    monkeypatch.setattr("scatterpar.train.tool_run.Run._check", _stop_after_first_epoch)
    assert train(folder, other, "--epochs", "2", "--patience", "9") == 130
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no"))
    folder.rename(tmp_path / "moved")
    again = ["train", "--out", str(other), "--resume"]
    assert command(again) == 2
    assert command([*again, "--data", str(tmp_path / "moved")]) == 0
    resumed = torch.load(other / "checkpoint.pt")["model"]
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def _stop_after_first_epoch(run):
    if run.training.step == 3:
        run.signals.append(2)
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (
            [],
            0,
            "test_resnet starts from random weights, as its pretrained ones are not",
        ),
        ([], 0, r"with few images \(36\) pretrained weights help most"),
        (["--from-scratch"], 0, "SGD with a learning rate"),
        (["--pretrained"], 2, "--model timm:test_resnet: "),
        (["--freeze", "1"], 2, "--freeze 1: timm:test_resnet starts from random"),
        (["--pretrained", "--from-scratch"], 2, "exclude each other"),
    ],
)
def test_without_weights_the_run_says_so(
    cache, folder, tmp_path, capsys, more, code, words
):
    assert train(folder, tmp_path / "run", "--epochs", "1", *more) == code
    printed = "".join(capsys.readouterr())
    assert re.search(words, printed)
    assert ("help most" in printed) == (more == [])


def test_patience_ends_a_run_that_gets_no_better(folder, tmp_path, capsys):
    out = tmp_path / "run"
    more = ["--from-scratch", "--base-lr", "1e-9", "--epochs", "9", "--patience", "2"]
    assert train(folder, out, *more) == 0
    accuracies = [epoch["test_accuracy"] for epoch in records(out, "epoch")]
    assert len(accuracies) < 9
    assert max(accuracies[-2:]) <= max(accuracies[:-2])
    assert "no better accuracy in 2 epochs (--patience)" in capsys.readouterr().out
    assert records(out, "summary")[0]["ending"] == "finished"


def test_hub_is_offline_if_nothing_answers(monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(libraries.urllib.request, "getproxies", dict)

    def refuse(address, seconds):
        raise OSError

    monkeypatch.setattr(libraries.socket, "create_connection", refuse)
    libraries.stay_offline_without_network()
    assert constants.HF_HUB_OFFLINE


def test_three_commands_of_the_readme_classify(tmp_path):
    """300 photographs, and a new one, in an empty folder."""
    pictures = write_folder(tmp_path / "all", train=100, test=1, size=(60, 45))
    (pictures / "train").rename(tmp_path / "photos")
    new = min((pictures / "test" / "Bag").iterdir())
    new.rename(tmp_path / "new.jpg")
    lines = re.findall(r"^python (?!-m venv).*(?:photos).*$", read("README.md"), re.M)
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line.replace("timm:resnet18", "timm:test_resnet"))
        if "train" in words:  # on a small machine
            words += ["--epochs", "2", "--image-size", "32", "--workers", "0"]
        done = subprocess.run(
            [sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"new\.jpg: (Bag|Sandal|Trouser) 0\.\d{4}\n", done.stdout)
