"""The images that are included."""

import hashlib
import re
from pathlib import Path

import pytest
import torch

import scatterpar.train
from scatterpar.train.data import Split, load, make_dataset

EMBEDDED = Path(scatterpar.train.__file__).parent / "embedded"


def test_the_embedded_files_are_the_published_bytes():
    source = (EMBEDDED / "SOURCE.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"`(t10k-\S+\.gz)` \| \d+ \| `([0-9a-f]{64})`", source))
    found = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in EMBEDDED.glob("*.gz")}
    assert found == listed
    assert len(found) == 2
    assert "MIT License" in source
    assert "https://github.com/zalandoresearch/fashion-mnist" in source


def test_the_embedded_data_are_split_and_standardised():
    data = load()
    assert (len(data.train), len(data.test), len(data.class_names)) == (8192, 1808, 10)
    images = data.standardise(data.train.images)
    assert images.shape == (8192, 1, 28, 28)
    assert images.dtype == torch.float32
    assert images.double().mean().item() == pytest.approx(0, abs=1e-5)
    assert images.double().std().item() == pytest.approx(1, abs=1e-5)


def test_statistics_are_those_of_each_channel():
    images = (torch.arange(7 * 3 * 5 * 4) ** 2 % 251).to(torch.uint8).view(7, 3, 5, 4)
    split = Split(images, torch.arange(7))
    data = make_dataset("colours", split, split, ())
    torch.testing.assert_close(data.mean, images.float().mean((0, 2, 3)))
    torch.testing.assert_close(data.std, images.float().std((0, 2, 3), correction=0))
