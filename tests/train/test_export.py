"""What `export` writes, used in a process that has no scatterpar."""

from __future__ import annotations

import importlib
import json
import runpy
import sys

import numpy as np
import pytest
import torch
from harness.pictures import CLASSES, write_folder
from harness.runs import write_run
from PIL import Image
from torch import nn

from scatterpar.__main__ import main as command
from scatterpar.train import export as export_module
from scatterpar.train.libraries import library
from scatterpar.train.models import load_model
from scatterpar.train.pictures import read_picture

pytestmark = pytest.mark.draws


class Varying(nn.Module):
    """Adds another number in each call."""

    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, num_classes)
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        return self.layer(images.flatten(1)) + self.calls


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", CLASSES)


@pytest.fixture(scope="module")
def exported_run(tmp_path_factory):
    """The folder of a run, and the one of what was exported of it."""
    run = write_run(tmp_path_factory.mktemp("runs") / "run", CLASSES)
    out = run.with_name("exported")
    with torch.random.fork_rng():
        assert command(["export", str(run / "best.pt"), "--out", str(out)]) == 0
    return run, out


def test_exported_file_takes_any_number_of_rows(exported_run):
    run, out = exported_run
    exported = torch.export.load(out / "model.pt2").module()
    model, _ = load_model(run)
    for rows in (1, 2, 7, 64):
        images = torch.randint(256, (rows, 3, 32, 32), dtype=torch.uint8)
        torch.testing.assert_close(exported(images), model(images))


@pytest.mark.pictures
def test_script_classifies_without_scatterpar(
    exported_run, tmp_path, monkeypatch, capsys
):
    """In this process, where each import of it fails; test_training_page.py calls it
    in a new one.
    """
    run, out = exported_run
    pictures = write_folder(tmp_path / "new", train=1, test=1, size=(60, 45)) / "val"
    files = [str(path) for path in sorted(pictures.rglob("*.png"))]
    model, about = load_model(run)
    monkeypatch.setattr(sys, "argv", [str(out / "classify.py"), *files])
    with monkeypatch.context() as patch:
        for name in list(sys.modules):
            if name.partition(".")[0] == "scatterpar":
                patch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError):
            importlib.import_module("scatterpar.train.pictures")
        capsys.readouterr()
        runpy.run_path(sys.argv[0], run_name="__main__")
    expected = []
    for file in files:
        score, label = model(read_picture(file, 32)[None]).detach().softmax(1).max(1)
        expected.append(f"{file}: {about['class_names'][label]} {float(score):.4f}")
    assert capsys.readouterr().out.splitlines() == expected
    assert json.loads((out / "model.json").read_text())["class_names"] == list(CLASSES)


def test_files_are_written_into_the_runs_folder(run, monkeypatch):
    """By default. The export itself is tested above."""
    monkeypatch.setattr(export_module, "_exported", lambda model, images: None)
    monkeypatch.setattr(torch.export, "save", lambda program, file: file.write(b"."))
    assert command(["export", str(run)]) == 0
    for name in ("model.pt2", "model.json", "classify.py"):
        assert (run / name).stat().st_size


def test_model_that_varies_is_refused(run, capsys):
    name = f"{__name__}:Varying"
    state = torch.load(run / "best.pt")
    state["about"]["model"] = name
    state["model"] = Varying(3).state_dict()
    torch.save(state, run / "best.pt")
    assert command(["export", str(run), "--model", name]) == 2
    assert "has other scores than the model" in capsys.readouterr().err
    assert not (run / "model.pt2").exists()


@pytest.mark.pictures
def test_pixels_of_script_are_torchvisions(exported_run, tmp_path):
    """Of pictures of any size, in the file that needs torch and Pillow only."""
    v2 = library("torchvision.transforms.v2")
    script = runpy.run_path(str(exported_run[1] / "classify.py"))
    generator = np.random.default_rng(0)
    for width, height in ((60, 45), (301, 200), (33, 500), (224, 224), (1, 9)):
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        file = tmp_path / f"{width}.png"
        Image.fromarray(pixels).save(file)
        for size, side in ((32, 32), (100, 100), (128, 146), (224, 256)):
            transform = v2.Compose(
                [v2.Resize(side), v2.CenterCrop(size), v2.PILToTensor()]
            )
            expected = transform(Image.open(file))
            assert torch.equal(script["read_picture"](file, size), expected)
