"""The notebooks run from top to bottom in a fresh kernel, and are kept with their outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NEEDS = {"3-two-gpus": "bitsandbytes"}
# PyPI's torchvision, which transformers imports, fails beside torch's CPU build without this.
STARTUP = f"""
import sys
sys.path.append({str(Path(__file__).parents[1])!r})
from harness.optional import import_torchvision_first
import_torchvision_first()
del sys, import_torchvision_first
"""
# What is shorter here, and as it stands: this notebook trains for minutes.
SHORTER = {"2-contrastive": ("64, 1024, 80, 0.1", "64, 1024, 10, 0.1")}
SECONDS = 600  # each takes at most two and a half minutes on one idle core


def code_cells(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, id=path.stem, marks=[pytest.mark.loops] * (path.stem in NEEDS)
        )
        for path in NOTEBOOKS
    ],
)
def test_notebook_runs(path, tmp_path, monkeypatch):
    if needed := NEEDS.get(path.stem):
        if find_spec(needed) is None:
            pytest.skip(f"needs {needed}, see docs/loops.md")
        startup = tmp_path / "profile_default" / "startup" / "first.py"
        startup.parent.mkdir(parents=True)
        startup.write_text(STARTUP, encoding="utf-8")
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    text = path.read_text(encoding="utf-8")
    if path.stem in SHORTER:
        long, short = SHORTER[path.stem]
        assert long in text
        text = text.replace(long, short)
    copied = tmp_path / path.name
    copied.write_text(text, encoding="utf-8")
    command = [sys.executable, FOLDER / "refresh.py", copied]
    found = subprocess.run(command, timeout=SECONDS, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert [kinds(cell) for cell in code_cells(copied)] == [
        kinds(c) for c in code_cells(path)
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_outputs_of_one_run(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    shown = {kind for cell in cells for kind in kinds(cell)}
    assert "error" not in shown
    assert {"stdout", "image/png"} & shown


def kinds(cell):
    """What a cell put out: names of streams, and the richest type of everything shown."""
    found = []
    for output in cell["outputs"]:
        if "font cache" in "".join(output.get("text", "")):
            continue  # matplotlib's, where it has to make one and that takes it five seconds
        kind = output.get("name") or next(iter(sorted(output.get("data", {}))), "error")
        if (
            not found or found[-1] != kind
        ):  # a stream comes in as many pieces as it likes
            found.append(kind)
    return found
