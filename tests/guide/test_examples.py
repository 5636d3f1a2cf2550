"""The scripts in examples/: the original's lines and the engine's give
the same curves.
"""

from __future__ import annotations

import re
from itertools import islice

import pytest
import torch
from harness.pages import ROOT, example
from harness.pairwise import few_of

SHORT = {  # rows that are not divided evenly, and lines of which some are short
    "mnist": ["--epochs", "2"],
    "word_language_model": [
        "--rows",
        "7",
        "--size",
        "8",
        "--length",
        "9",
        "--epochs",
        "2",
    ],
    "char_gpt": ["--rows", "7", "--size", "8", "--longest", "30"],
}


@pytest.mark.draws
@pytest.mark.parametrize("name", few_of(SHORT, ["char_gpt"]))
def test_scripts_run_and_print_the_same(name, capsys, one_thread_an_operation):
    script = example(name)
    train, printed, curves = script.train, [], []

    def recorded(*args):
        for loss in train(*args):
            curves[-1].append(loss)
            yield loss

    script.train = recorded
    if name == "mnist":
        loader, _ = script.loaders(5, torch.float64)
        batches = list(islice(loader, 2))
        script.loaders = lambda _, dtype: (batches, batches)
    for more in (["--stock"], ["--devices", "cpu:0", "cpu:1", "--accum", "2"]):
        curves.append([])
        script.main([*SHORT[name], "--steps", "4", "--double", "--dropout", "0", *more])
        printed.append(capsys.readouterr().out)
    assert len(set(curves[0])) == len(curves[0]) > 3
    assert curves[1] == pytest.approx(curves[0], rel=1e-12)
    assert "loss" in printed[0]
    assert printed[0] == printed[1]


PUBLIC = [*ROOT.glob("examples/*.py"), *ROOT.glob("notebooks/*.ipynb")]


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.stem)
def test_scripts_import_public_names_only(path):
    source = path.read_text(encoding="utf-8")
    modules = re.findall(
        r'^[\s"]*(?:from|import) (scatterpar[\w.]*)', source, re.MULTILINE
    )
    assert modules
    for module in modules:
        assert re.fullmatch(r"scatterpar(\.recipe|\.integrations\.\w+)?", module), (
            module
        )
