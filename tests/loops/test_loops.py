"""The rows of a library's batch, and the modules of a loop."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from scatterpar.batch.markers import Rows
from scatterpar.loops.modules import Modules
from scatterpar.loops.rows import as_rows, num_rows

IMAGES = torch.zeros(3, 5)
BOXES = [{"boxes": torch.zeros(n, 4)} for n in (2, 0, 3)]
TEXTS = ["a", "b", "c"]


@pytest.mark.parametrize(
    "entries",
    [TEXTS, tuple(TEXTS), [1, 2, 3], BOXES],
    ids=["texts", "a tuple", "numbers", "dicts"],
)
def test_list_with_entry_per_row_is_marked(entries):
    batch = as_rows({"images": IMAGES, "more": [entries, IMAGES]})
    assert isinstance(batch["more"][0], Rows)
    assert batch["more"][0].entries == list(entries)
    assert batch["images"] is batch["more"][1] is IMAGES


@dataclasses.dataclass
class Documents:
    number: int
    texts: list
    parts: dict


def test_rows_in_a_dataclass():
    batch = as_rows(Documents(7, TEXTS, {"images": IMAGES, "boxes": BOXES}))
    assert isinstance(batch.texts, Rows)
    assert isinstance(batch.parts["boxes"], Rows)
    assert batch.number == 7
    assert num_rows(batch) == 3


@pytest.mark.parametrize(
    "batch",
    [
        # a loader's batch of two rows has two columns
        [torch.zeros(2, 5), torch.zeros(2)],
        [torch.zeros(2, 5), ["a", "b"]],
        [{"x": torch.zeros(2)}, {"x": torch.zeros(2)}],  # two views
        [["a", "b"], ["c", "d"]],
    ],
    ids=["tensors", "a tensor and texts", "dicts", "texts"],
)
def test_list_of_columns_is_not_rows(batch):
    assert isinstance(as_rows(batch), list)


def test_modules_keep_their_order_whatever_their_names():
    """A Trainer may have two networks of a class, also of one like ``nn.Module``'s."""
    names = ["Net", "double", "Net"]
    parts = [torch.nn.Identity() for _ in names]
    modules = Modules(zip(names, parts, strict=True))
    assert [*modules.children()] == parts
    assert [name for name, _ in modules.named_children()] == [
        *("Net", "double_", "Net_"),
    ]
    assert modules[1] is parts[1]
