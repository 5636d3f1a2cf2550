"""docs/contrastive.md does what it says, with losses of other libraries as they are."""

from __future__ import annotations

import pytest
import torch
from helpers.oracle import assert_close, assert_step, build, randint, randn
from helpers.pages import assert_whole_batch, blocks, read
from torch import nn

from scatterpar import ScatterOnceParallel

BLOCKS = blocks(read("docs/contrastive.md"), "python")


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, one, other):
        return self.body(one), self.body(other)


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, tokens):
        return self.embedding(tokens).mean(1)


def namespace(dtype):
    """What the page takes for granted."""
    encoder, model, texts = build(Views), build(lambda: nn.Linear(5, 4)), build(Texts)
    one, other, labels = randn(24, 5, seed=1), randn(24, 5, seed=2), randint(3, 24)
    return {
        "encoder": encoder,
        "loader": [((one, other), labels)],
        "optimizer": torch.optim.SGD(encoder.parameters(), 0.0),
        "engine": ScatterOnceParallel(model.to(dtype), 3, ["cpu"] * 2),
        "pairs": ScatterOnceParallel(encoder, 3, ["cpu"] * 2),
        "texts": ScatterOnceParallel(texts, 2, ["cpu"] * 2),
        "spread": lambda embeddings, _: (embeddings @ embeddings.T).logsumexp(1).mean(),
        "batches": iter([randint(9, 6, length, seed=length) for length in (3, 5, 4, 7)]),
        "images": randn(24, 5).to(dtype),
        "labels": labels,
        "one": one,
        "other": other,
    }


def run(*parts, dtype=torch.float64):
    """The blocks that have these words, and their names."""
    names = namespace(dtype)
    for part in parts:
        (block,) = [block for block in BLOCKS if part in block]
        exec(block, names)
    return names


def test_the_first_example():
    names = run("def nt_xent", "for (one, other), labels in loader")
    names["engine"].close()
    views = names["one"], names["other"]
    assert_whole_batch(names, names["encoder"], views, None, names["nt_xent"])


def test_texts_of_other_lengths():
    names = run("Rows.from_batches")
    module = names["texts"].module
    expected = names["spread"](torch.cat([module(tokens) for tokens in names["window"]]), None)
    assert_close(names["loss"], expected.detach(), "loss")


@pytest.mark.draws
def test_pytorch_metric_learning():
    pytest.importorskip("pytorch_metric_learning")
    names = run("pytorch_metric_learning", dtype=torch.float32)  # as its own proxies
    engine, batch = names["engine"], (names["images"], names["labels"])
    for criterion in (names["criterion"], names["batch_hard"]):
        assert_step(engine, *batch, criterion, whole_batch=True, relative=1e-4)
    assert names["proxies"].proxies.grad is not None


def test_info_nce():
    pytest.importorskip("info_nce")
    names = run("InfoNCE")
    views = names["one"], names["other"]
    loss = lambda outputs, _: names["info_nce"](*outputs)  # noqa: E731
    assert_whole_batch(names, names["encoder"], views, None, loss)
