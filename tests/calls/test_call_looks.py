"""Looks at calls: rows that meet are told, rules of losses are found."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from harness.oracle import build, randint, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

from calls.programs import Own, mlp
from scatterpar import ScatterOnceParallel

ROWS, LABELS = randn(12, 6), randint(3, 12)


def engine_of(forward, layout=("cpu", "cpu"), **options):
    net = build(lambda: Own(forward, net=mlp()))
    return ScatterOnceParallel(net, device_ids=list(layout), **options)


def test_right_call_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with engine_of(lambda self, rows: self.net(rows)) as engine:
            for _ in range(4):
                engine(ROWS).sum().backward()


def test_rows_that_meet_are_told():
    with (
        engine_of(lambda self, rows: self.net(rows).softmax(0)) as engine,
        pytest.warns(UserWarning, match="other outputs for a few rows"),
    ):
        engine(ROWS)


def test_loss_that_is_no_mean_is_refused_in_words():
    def forward(self, rows, labels):
        return F.cross_entropy(self.net(rows), labels).sqrt()

    with engine_of(forward) as engine:
        with pytest.raises(ValueError, match="the loss that the module returns"):
            engine(ROWS, LABELS)
        assert engine.module.net[0].weight.grad is None


def test_mean_over_rows_is_taken_without_a_look():
    def forward(self, rows):
        return self.net(rows).sum()

    with engine_of(forward, verify=False) as engine:
        found = engine(ROWS)
        torch.testing.assert_close(found, engine.module(ROWS) / 2)


def test_hooks_of_parameters_see_no_look():
    seen = []
    with engine_of(lambda self, rows: self.net(rows)) as engine:
        engine.module.net[0].weight.register_hook(seen.append)
        engine(ROWS)
    assert not seen


class Checkpointed(nn.Module):
    """A language model whose norm computes in float32, such as Llama's, under a
    checkpoint. It is new: the losses of all words are nearly the same.
    """

    def __init__(self, scale):
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)
        with torch.no_grad():
            self.head.weight.mul_(scale)

    def forward(self, words, labels):
        hidden = checkpoint(self.normed, self.words(words), use_reentrant=False)
        logits = self.head(self.layer(hidden))
        labels = labels[:, 1:].flatten()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels)

    def normed(self, hidden):
        wide = hidden.to(torch.float32)
        return (wide * wide.square().mean(-1, keepdim=True).rsqrt()).to(hidden.dtype)


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_checkpoint_keeps_rules_apart(scale):
    """In double precision a checkpoint computes other formats again, which is no answer.

    The gradient was that of a mean over rows: off by a fifth.
    """
    net = build(lambda: Checkpointed(scale)).float()
    plain = copy.deepcopy(net)
    words = randint(50, 8, 24)
    labels = words.clone()
    for row, number in enumerate([5, 4, 6, 8, 8, 6, 10, 11]):
        labels[row, : 24 - number] = -100
    with ScatterOnceParallel(net, device_ids=["cpu:0", "cpu:1"]) as engine:
        for _ in range(2):
            engine(words, labels).backward()
            plain(words, labels).backward()
    for parameter, expected in zip(net.parameters(), plain.parameters(), strict=True):
        error = (parameter.grad - expected.grad).norm() / expected.grad.norm()
        assert float(error) < 1e-4
