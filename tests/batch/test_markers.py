"""Batches that are not tensors with rows: what is replicated, entries of lists, several
batches.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from harness.agree import Case, agree
from harness.batches import LABELS, OF_ROWS, TEXTS, Reader, pad
from harness.models import CLASSES, FEATURES
from harness.oracle import assert_step, build, randn
from harness.pairwise import few_of
from pair.common import Pair
from torch import nn

from scatterpar import Replicated, Rows, ScatterOnceParallel
from scatterpar.batch.markers import Marker

ROWS = randn(7, FEATURES)
LOSS = nn.CrossEntropyLoss()


def test_micro_batches_collated_singly(devices):
    seen = []

    def collate(texts):
        seen.append(len(texts))
        return pad(texts)

    # A look collates rows of its own.
    with ScatterOnceParallel(build(Reader), 2, devices(3), verify=False) as engine:
        assert_step(
            engine, Rows(TEXTS, collate), LABELS, LOSS, plain=(pad(TEXTS), LABELS)
        )
        cuts = [
            cut for share in engine.last_step.plan.shares for cut in share.micro_batches
        ]
    assert sorted(seen) == sorted(stop - start for start, stop in cuts)


def test_pair_refuses_windows_and_long_rows(devices):
    pair = Pair(build(Reader), LOSS, devices(2))
    with pytest.raises(ValueError, match="with the pair, make one call per batch"):
        pair.model(Rows.from_batches([TEXTS[1][None], TEXTS[5][None]]))
    words = Rows([torch.arange(n) for n in (3, 2, 4)], torch.cat)
    pair = Pair(build(lambda: nn.Embedding(9, CLASSES)), LOSS, devices(2))
    with pytest.raises(ValueError, match="rows"):
        pair.loss(words, words)


def test_markers_print_and_pickle():
    assert repr(Replicated(ROWS)) == "Replicated(Tensor of shape (7, 5))"
    assert repr(Replicated({"a": 1})) == "Replicated(dict)"
    assert repr(Rows(TEXTS, pad)) == "Rows(11 x Tensor, collate=pad)"
    assert repr(Rows.from_batches([ROWS, ROWS])) == "Rows.from_batches(2 batches)"
    for marker in (Replicated(ROWS), Rows(TEXTS, pad), Rows.from_batches([ROWS])):
        assert repr(pickle.loads(pickle.dumps(marker))) == repr(marker)


class Jagged(Marker):
    """A third marker: words of all texts in one tensor, and the number of words of
    each.
    """

    def __init__(self, texts):
        self.contents = {"words": torch.cat(texts), "sizes": [*map(len, texts)]}

    @property
    def num_rows(self):
        return len(self.contents["sizes"])

    def split(self):
        return self.contents["words"].split(self.contents["sizes"])

    def select(self, rows):
        return Jagged([self.split()[row] for row in rows])

    def join(self, others):
        return Jagged([text for one in (self, *others) for text in one.split()])

    def unwrap(self, *, copy):
        return pad(self.split())  # new memory


@pytest.mark.parametrize("runner", few_of(OF_ROWS, ["engine", "inference"]))
def test_custom_marker_is_exact(runner):
    batch = Jagged(TEXTS), LABELS
    agree(Case(Reader, batch, plain=(pad(TEXTS), LABELS)), runner, "mixed")
