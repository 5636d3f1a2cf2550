"""Images of vision-language batches, divided among their rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from scatterpar.batch.markers import Rows
from scatterpar.integrations.images import images_by_row

IMAGE = 9
CONFIG = SimpleNamespace(image_token_id=IMAGE, video_token_id=8)


def texts(*placeholders, token=IMAGE):
    """Rows of 12 tokens with so many placeholders."""
    rows = [[token] * n + [1] * (12 - n) for n in placeholders]
    return torch.tensor(rows)


def numbers(marker):
    """The first number of each entry of each row."""
    assert isinstance(marker, Rows)
    return [[int(one.flatten()[0]) for one in entry] for entry in marker.entries]


def test_equal_images_follow_placeholders():
    pixels = torch.arange(4)[:, None, None, None].expand(4, 3, 2, 2)
    sizes = torch.arange(4)[:, None].expand(4, 2)
    batch = {"input_ids": texts(8, 4, 4), "pixel_values": pixels, "image_sizes": sizes}
    divided = images_by_row(batch, CONFIG)
    assert numbers(divided["pixel_values"]) == [[0, 1], [2], [3]]
    assert numbers(divided["image_sizes"]) == [[0, 1], [2], [3]]
    assert divided["input_ids"] is batch["input_ids"]


def test_patches_follow_their_grid():
    """Rows may have no image."""
    grid = torch.tensor([[1, 2, 4], [1, 4, 4], [1, 2, 2]])  # 8, 16 and 4 patches
    pixels = torch.arange(28)[:, None]
    batch = {
        "input_ids": texts(6, 0, 1),  # a token stands for four patches
        "pixel_values": pixels,
        "image_grid_thw": grid,
    }
    divided = images_by_row(batch, CONFIG)
    assert [len(entry) for entry in divided["pixel_values"].entries] == [24, 0, 4]
    assert [len(entry) for entry in divided["image_grid_thw"].entries] == [2, 0, 1]
    collate = divided["pixel_values"].collate
    assert torch.equal(collate(divided["pixel_values"].entries), pixels)
    assert collate(divided["pixel_values"].entries[1:2]) is None


def test_as_many_images_as_rows_follow_placeholders():
    """They were taken for one image per row."""
    pixels = torch.arange(3)[:, None, None, None].expand(3, 3, 2, 2)
    batch = {"input_ids": texts(0, 4, 8), "pixel_values": pixels}
    divided = images_by_row(batch, CONFIG)
    entries = divided["pixel_values"].entries
    assert [entry[:, 0, 0, 0].tolist() for entry in entries] == [[], [0], [1, 2]]


def test_videos_have_their_own_names():
    batch = {
        "input_ids": texts(4, 4, token=8),
        "pixel_values_videos": torch.arange(32)[:, None],
        "video_grid_thw": torch.tensor([[2, 2, 4], [1, 4, 4]]),
    }
    divided = images_by_row(batch, CONFIG)
    rows = divided["pixel_values_videos"].entries
    assert [int(entry[0]) for entry in rows] == [0, 16]


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": texts(1, 1), "pixel_values": torch.zeros(2, 3)},  # one per row
        {"input_ids": texts(5, 3), "pixel_values": torch.zeros(3, 3)},  # no whole ones
        {"input_ids": texts(0, 0), "pixel_values": torch.zeros(3, 3)},
        {"pixel_values": torch.zeros(3, 3)},
        {"input_ids": texts(1, 1)},
    ],
)
def test_unattributed_images_stay(batch):
    """Batches that do not show which row an image belongs to stay as they are."""
    divided = images_by_row(batch, CONFIG)
    assert all(divided[name] is value for name, value in batch.items())
    assert images_by_row(batch, None) == divided
