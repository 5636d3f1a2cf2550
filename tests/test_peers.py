"""A library's tests in a folder, as they are and with replicas."""

import pytest
from harness.optional import needed

from tests.peers import __main__ as peers

needed("lightning", "the extra lightning")
needed("fastai", "the extra fastai")
nbformat = needed("nbformat", "the extra notebooks")
pytestmark = [pytest.mark.loops, pytest.mark.slow]  # two processes of pytest

TESTS = """
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

OPTIONS = dict(accelerator="cpu", devices=1, max_epochs=1, logger=False,
               enable_checkpointing=False, enable_progress_bar=False,
               enable_model_summary=False)

def fit(module, **options):
    trainer = pl.Trainer(**OPTIONS, **options)
    trainer.fit(module, DataLoader(RandomDataset(32, 16), 4))

def test_fits(): fit(BoringModel())
def test_counts_rows():
    module = BoringModel()
    rows = []
    module.layer.register_forward_hook(lambda m, i, output: rows.append(len(output)))
    fit(module)
    assert rows.count(4) == 4  # of training; a row each of validation
def test_refused(): fit(BoringModel(), sync_batchnorm=True)
def test_stock_fails(): assert fit(BoringModel())
def test_trains_nothing(): pl.Trainer(**OPTIONS)
"""


CELLS = [
    "#|default_exp learner",
    "#|export\nraise RuntimeError('the source of the library')",
    "before = 1",
    "#| eval: false\nraise RuntimeError",
    """
from fastai.callback import progress  # which gives learners no_bar
learn = synth_learner(n_trn=2)
rows = []
hook = learn.model.register_forward_hook(lambda m, i, o: rows.append(len(o)))
with learn.no_bar(), learn.no_logging():
    learn.fit(before)
""",
    "assert len(learn.recorder.losses) == 2",
    "assert rows[:2] == [16, 16]",
    "%matplotlib inline",
    "assert learn.unknown",
]


def test_cells_of_a_notebook(tmp_path, monkeypatch, capsys):
    """They run in order, and cells of the library's source are left out."""
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbformat.write(notebook, tmp_path / "13_learner.ipynb")
    monkeypatch.setattr("sys.argv", ["peers", "fastai", str(tmp_path)])
    monkeypatch.setattr(peers, "RECORD", tmp_path / "record")
    peers.main()
    *failures, total = capsys.readouterr().out.splitlines()
    assert [failure.split(": ")[:2] for failure in failures] == [
        ["failed", "13_learner.ipynb::cell 6"]
    ]
    assert total == (
        "4 tests pass as they are, of which 3 train on one device; with replicas: "
        "1 failed, 2 passed"
    )


def test_kinds_of_a_library_s_tests(tmp_path, monkeypatch, capsys):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --unknown-option\n")
    (tmp_path / "test_of_library.py").write_text(TESTS)
    monkeypatch.setattr(
        "sys.argv", ["peers", "lightning", str(tmp_path), "test_of_library.py"]
    )
    monkeypatch.setattr(peers, "RECORD", tmp_path / "record")
    peers.main()
    *failures, total = capsys.readouterr().out.splitlines()
    counts_rows, refused = failures
    assert counts_rows.startswith("failed: ")
    assert "test_counts_rows: assert " in counts_rows
    assert refused.startswith("refused: ")
    assert "sync_batchnorm=True" in refused
    assert total == (
        "4 tests pass as they are, of which 3 train on one device; with replicas: "
        "1 failed, 1 passed, 1 refused"
    )
