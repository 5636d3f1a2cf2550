"""A library's tests in a folder, as they are and with replicas."""

import pytest
from harness.optional import needed

from tests.peers import __main__ as peers

needed("lightning", "the extra lightning")
pytestmark = [pytest.mark.loops, pytest.mark.slow]  # two processes of pytest

TESTS = """
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

OPTIONS = dict(accelerator="cpu", devices=1, max_epochs=1, logger=False,
               enable_checkpointing=False, enable_progress_bar=False,
               enable_model_summary=False)

def fit(module):
    pl.Trainer(**OPTIONS).fit(module, DataLoader(RandomDataset(32, 16), 4))

class Counts(BoringModel):
    calls = 0
    def training_step(self, batch, batch_idx):
        self.calls += 1
        return super().training_step(batch, batch_idx)

class Manual(BoringModel):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

def test_fits(): fit(BoringModel())
def test_counts_calls():
    module = Counts()
    fit(module)
    assert module.calls == 4
def test_refused(): fit(Manual())
def test_stock_fails(): assert fit(BoringModel())
def test_trains_nothing(): pl.Trainer(**OPTIONS)
"""


def test_kinds_of_a_library_s_tests(tmp_path, monkeypatch, capsys):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --unknown-option\n")
    (tmp_path / "test_of_library.py").write_text(TESTS)
    monkeypatch.setattr(
        "sys.argv", ["peers", "lightning", str(tmp_path), "test_of_library.py"]
    )
    monkeypatch.setattr(peers, "RECORD", tmp_path / "record")
    peers.main()
    *failures, total = capsys.readouterr().out.splitlines()
    counts_calls, refused = failures
    assert counts_calls.startswith("failed: ")
    assert "test_counts_calls: assert " in counts_calls
    assert refused.startswith("refused: ")
    assert "manual optimization" in refused
    assert total == (
        "3 tests train on one device; with replicas: 1 failed, 1 passed, 1 refused"
    )
