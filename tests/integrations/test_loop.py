"""What every training loop's integration shares: which lists are rows, what a call adds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scatterpar.batch.markers import Rows
from scatterpar.integrations.loop import Additions, as_rows, copy_of, num_rows

IMAGES = torch.zeros(3, 5)
BOXES = [{"boxes": torch.zeros(n, 4)} for n in (2, 0, 3)]
TEXTS = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (IMAGES, 3),
        ((IMAGES, TEXTS), 3),
        ({"text": TEXTS, "n": 7}, 3),
        ([[torch.zeros(2, 1)], {"x": IMAGES}], 2),
        ([torch.tensor(1.0), {"x": IMAGES}], 3),
        ((Rows(TEXTS), torch.zeros(9)), 3),
        ([["a", "b"], ["c", "d"]], 2),
        ("text", 1),
    ],
)
def test_rows_are_those_of_the_outermost_tensor_else_of_the_longest_list(batch, rows):
    assert num_rows(batch) == rows


@pytest.mark.parametrize("entries", [TEXTS, tuple(TEXTS), [1, 2, 3], BOXES], ids=repr)
def test_a_list_with_an_entry_per_row_is_marked(entries):
    batch = as_rows({"images": IMAGES, "more": [entries, IMAGES]})
    assert isinstance(batch["more"][0], Rows)
    assert batch["more"][0].entries == list(entries)
    assert batch["images"] is batch["more"][1] is IMAGES


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(2, 5), torch.zeros(2)],  # a loader's batch of two rows has two columns
        [torch.zeros(2, 5), ["a", "b"]],
        [{"x": torch.zeros(2)}, {"x": torch.zeros(2)}],  # two views
        [["a", "b"], ["c", "d"]],
    ],
    ids=repr,
)
def test_a_list_of_columns_is_not_rows_even_if_there_are_as_many(batch):
    assert isinstance(as_rows(batch), list)


class Owner:
    def __init__(self):
        self.model = nn.Tanh()
        self.losses = {"a": self.model, "b": nn.ReLU()}
        self.seen, self.kept, self.replaced = 1, ["before"], []


def test_a_copy_refers_to_the_replicas_modules_and_brings_back_what_a_call_adds():
    owner, replica = Owner(), nn.Tanh()
    found = []
    for n in (2, 3):
        copied = copy_of(owner, {id(owner.model): replica}, shared=())
        assert copied.model is copied.losses["a"] is replica
        assert copied.losses["b"] is owner.losses["b"]
        additions = Additions(copied)
        copied.seen += n
        copied.kept.append(n)
        copied.replaced = [n]
        copied.fresh = n
        found.append(additions.end(copied))
    assert (owner.seen, owner.kept) == (1, ["before"])
    for one in found:
        one.add_to(owner)
    assert (owner.seen, owner.kept, owner.replaced) == (6, ["before", 2, 3], [])
    assert not hasattr(owner, "fresh")
