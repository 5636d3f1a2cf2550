"""What `export` writes, used in a process that has no scatterpar."""

from __future__ import annotations

import json
import runpy

import numpy as np
import pytest
import torch
from faults.processes import run_forked
from harness.pictures import CLASSES, write_folder
from harness.runs import write_run
from PIL import Image
from torch import nn

from scatterpar.__main__ import main as command
from scatterpar.train.libraries import library
from scatterpar.train.models import load_model
from scatterpar.train.pictures import read_picture

pytestmark = pytest.mark.draws
# The import of scatterpar fails; the script classifies two files.
SCRIPT = """
import runpy, sys
sys.modules["scatterpar"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


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


def test_exported_file_takes_any_number_of_rows(run, tmp_path):
    assert command(["export", str(run / "best.pt"), "--out", str(tmp_path / "a")]) == 0
    exported = torch.export.load(tmp_path / "a" / "model.pt2").module()
    model, _ = load_model(run)
    for rows in (1, 2, 7, 64):
        images = torch.randint(256, (rows, 3, 32, 32), dtype=torch.uint8)
        torch.testing.assert_close(exported(images), model(images))


@pytest.mark.pictures
def test_script_classifies_without_scatterpar(run, tmp_path):
    pictures = write_folder(tmp_path / "new", train=1, test=1, size=(60, 45)) / "val"
    files = [str(path) for path in sorted(pictures.rglob("*.png"))]
    assert command(["export", str(run)]) == 0
    done = run_forked("-c", SCRIPT, str(run / "classify.py"), *files)
    assert done.code == 0, done.err
    model, about = load_model(run)
    expected = []
    for file in files:
        score, label = model(read_picture(file, 32)[None]).detach().softmax(1).max(1)
        expected.append(f"{file}: {about['class_names'][label]} {float(score):.4f}")
    assert done.out.splitlines() == expected
    assert json.loads((run / "model.json").read_text())["class_names"] == list(CLASSES)


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
def test_pixels_of_script_are_torchvisions(run, tmp_path):
    """Of pictures of any size, in the file that needs torch and Pillow only."""
    v2 = library("torchvision.transforms.v2")
    assert command(["export", str(run)]) == 0
    script = runpy.run_path(str(run / "classify.py"))
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
