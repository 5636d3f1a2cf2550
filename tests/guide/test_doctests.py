"""The examples in the docstrings run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
from harness.optional import needed
from tqdm import tqdm

import scatterpar

tqdm.monitor_interval = 0  # transformers' progress bars would start a thread that stays

PACKAGE = Path(scatterpar.__file__).parent
MODULES = []
for path in sorted(PACKAGE.rglob("*.py")):
    if ">>> " in path.read_text(encoding="utf-8"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        MODULES.append(".".join(parts).removesuffix(".__init__"))


@pytest.mark.draws
@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    if "sentence_transformers" in name:
        pytest.importorskip("sentence_transformers")
    if name.endswith(".fastai"):
        needed("fastai", "'.[fastai]'")
    if name.endswith((".lightning", ".metrics")):
        needed("lightning", "'.[lightning]'")
    failed, _ = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS
    )
    assert not failed
