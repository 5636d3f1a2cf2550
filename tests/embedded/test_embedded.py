"""The included images are those that were published."""

import hashlib
import re
from pathlib import Path

import torch

from scatterpar import embedded

FOLDER = Path(embedded.__file__).parent


def test_parts_have_all_images_and_classes():
    train, test = embedded.load()
    assert train.images.shape == (8192, 1, 28, 28)
    assert test.images.shape == (1808, 1, 28, 28)
    assert train.images.dtype == torch.uint8
    for part in (train, test):
        assert len(part.labels) == len(part.images)
        assert part.labels.unique().tolist() == list(range(len(embedded.CLASSES)))


def test_files_are_as_published():
    rows = re.findall(
        r"\| `(\S+)` \| (\d+) \| `(\w+)` \|", (FOLDER / "SOURCE.md").read_text("utf-8")
    )
    assert len(rows) == 2
    for name, size, digest in rows:
        content = (FOLDER / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (
            int(size),
            digest,
        )
