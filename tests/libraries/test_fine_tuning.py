"""Pretrained weights, of a library or a file: found, fine-tuned, not needed to resume."""

from __future__ import annotations

import re

import pytest
import torch
from harness.pictures import CLASSES, write_folder
from harness.runs import steps, stop_after

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


def test_cached_weights_are_fine_tuned(cache, folder, tmp_path, capsys):
    """The head starts from zero; all layers learn."""
    weights = cache()
    out = tmp_path / "run"
    assert train(folder, out, "--pretrained", "--epochs", "1") == 0
    printed = capsys.readouterr().out
    assert "timm:test_resnet starts from its library's weights" in printed
    assert "AdamW with a learning rate of" in printed
    assert "help most" not in printed
    first = steps(out)[0]["loss"]
    assert first == pytest.approx(torch.tensor(len(CLASSES)).log().item(), rel=1e-4)
    learned = torch.load(out / "best.pt")["model"]
    for name in ("conv1.0.weight", "bn1.running_mean"):
        assert not torch.equal(learned[name], weights[name])
    moved = learned["conv1.0.weight"] - weights["conv1.0.weight"]
    assert moved.norm() < 0.5 * weights["conv1.0.weight"].norm()


def test_file_of_weights_is_fine_tuned_as_the_librarys(cache, folder, tmp_path, capsys):
    """The same run, without a hub; a function that loads a file got the rate for random
    weights.
    """
    weights = cache()
    assert train(folder, tmp_path / "one", "--pretrained", "--epochs", "1") == 0
    file = tmp_path / "mine.pth"
    torch.save(weights, file)
    (tmp_path / "cache").rename(tmp_path / "no cache")
    out = tmp_path / "other"
    assert train(folder, out, "--weights", str(file), "--epochs", "1") == 0
    printed = capsys.readouterr().out
    assert f"starts from the weights in {file}, except fc.weight, fc.bias" in printed
    one, other = (
        torch.load(tmp_path / run / "best.pt")["model"] for run in ("one", "other")
    )
    assert all(torch.equal(other[name], value) for name, value in one.items())
    # A run's own best.pt has the head, too.
    again = ["--weights", str(out / "best.pt"), "--epochs", "1"]
    assert train(folder, tmp_path / "again", *again) == 0
    assert steps(tmp_path / "again")[0]["loss"] < steps(out)[0]["loss"]


@pytest.mark.parametrize("start", ["--pretrained", "--weights"])
def test_resumed_run_needs_no_initial_weights(
    cache, folder, tmp_path, monkeypatch, start
):
    weights = cache()
    file = tmp_path / "mine.pth"
    torch.save(weights, file)
    words = ["--epochs", "2", start]
    if start == "--weights":
        words.append(str(file))
    assert train(folder, tmp_path / "run", *words) == 0
    whole = torch.load(tmp_path / "run" / "checkpoint.pt")["model"]
    other = tmp_path / "other"
    with stop_after(monkeypatch, 3):
        train(folder, other, *words)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no"))
    file.unlink()
    assert command(["train", "--resume", str(other)]) == 0
    resumed = torch.load(other / "checkpoint.pt")["model"]
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        ([], 0, r"with few images \(36\) pretrained weights help most"),
        ([], 0, "SGD with a learning rate"),
        (["--pretrained"], 2, "--model timm:test_resnet: "),
    ],
)
def test_without_weights_the_run_says_so(
    cache, folder, tmp_path, capsys, more, code, words
):
    assert train(folder, tmp_path / "run", "--epochs", "1", *more) == code
    assert re.search(words, "".join(capsys.readouterr()))


def test_hub_is_offline_if_nothing_answers(monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(libraries.urllib.request, "getproxies", dict)

    def refuse(address, seconds):
        raise OSError

    monkeypatch.setattr(libraries.socket, "create_connection", refuse)
    libraries.stay_offline_without_network()
    assert constants.HF_HUB_OFFLINE
