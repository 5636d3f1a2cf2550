"""A missing torchvision names the line that installs it; near names are suggested."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from scatterpar.train.command_line import UsageError
from scatterpar.train.libraries import library, suggestion


@pytest.mark.parametrize("build", [None, "12.8"])
def test_missing_torchvision_names_command(monkeypatch, build):
    """Beside torch's CPU build, PyPI's torchvision is not that line's."""
    monkeypatch.setitem(sys.modules, "torchvision.ops", None)
    monkeypatch.setattr(torch.version, "cuda", build)
    cpu = "" if build else "--extra-index-url https://download.pytorch.org/whl/cpu "
    words = f"needs torchvision, .*: pip install -c constraints.txt {cpu}-e "
    with pytest.raises(UsageError, match=words + r"'.\[images\]'") as caught:
        library("torchvision.datasets")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("resnet1", "; did you mean x:ResNet18?"),
        ("RESNET18", "; did you mean x:ResNet18?"),
        ("zebra", ""),
    ],
)
def test_similar_names_suggested_any_case(name, said):
    known = ["ResNet18", "vit", "a very long name"]
    assert re.sub(" +", " ", suggestion(name, known, "x:")) == said
