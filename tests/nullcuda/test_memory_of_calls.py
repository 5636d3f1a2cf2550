"""How much memory a loss over a large vocabulary takes, outside of the model and in it.

In L, the float32 logits of the rows of one card. The figures are on the page of loops
(docs/loops.md).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = [pytest.mark.nullcuda, pytest.mark.draws]

# L is a multiple of the 2 MiB to which torch rounds allocations of this size.
VOCABULARY, TOKENS, ROWS, FEATURES = 2**14, 64, 4, 16
L = ROWS * TOKENS * VOCABULARY * 4


class LanguageModel(nn.Module):
    def __init__(self, returns):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY)
        self.returns = returns

    def forward(self, words, labels=None):
        logits = self.head(self.embedding(words))
        if self.returns == "logits":
            return logits
        loss = loss_of(logits, labels)
        if self.returns == "loss":
            return loss
        return {"loss": loss, "logits": logits}


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def peaks(wrapped, module, count):
    """The most that each card holds during a step, except the module and its gradients,
    in L.
    """
    torch.manual_seed(0)
    words = torch.randint(VOCABULARY, (ROWS * count, TOKENS)).cuda(0)
    before = []
    # In the second step gradients are there already.
    for _ in range(2):
        before = list(map(torch.cuda.memory_allocated, range(count)))
        for card in range(count):
            torch.cuda.reset_peak_memory_stats(card)
        if module.returns == "logits":
            loss = loss_of(wrapped(words), words)
        else:
            output = wrapped(words, labels=words)
            loss = output if module.returns == "loss" else output["loss"]
            del output
        loss.backward()
        del loss
    most = map(torch.cuda.max_memory_allocated, range(count))
    return [(peak - start) / L for peak, start in zip(most, before, strict=True)]


def with_engine(module, count):
    return ScatterOnceParallel(module, device_ids=[*range(count)], verify=False)


def on_one_card(module, count):
    return module


# What the first card needs, in L, and at most each of the others.
OF_CARDS = {
    (on_one_card, "logits", 2): (6, 0),
    (on_one_card, "logits", 4): (12, 0),
    (with_engine, "logits", 2): (6, 2),
    (with_engine, "logits", 4): (12, 2),
    (with_engine, "loss and logits", 2): (3, 3),
    (with_engine, "loss and logits", 4): (3, 3),
    (with_engine, "loss", 2): (3, 3),
    (with_engine, "loss", 4): (3, 3),
}


@pytest.mark.parametrize(("wrap", "returns", "count"), OF_CARDS)
def test_memory_of_a_call(wrap, returns, count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} cards")
    module = LanguageModel(returns).cuda(0)
    first, *others = peaks(wrap(module, count), module, count)
    of_first, of_others = OF_CARDS[wrap, returns, count]
    assert first == pytest.approx(of_first, abs=0.1)
    assert max(others) < of_others + 0.1
