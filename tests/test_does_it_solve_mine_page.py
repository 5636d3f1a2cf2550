"""Each answer of docs/does-it-solve-mine.md runs, and is exact."""

from __future__ import annotations

import pytest
import torch
from helpers.oracle import (
    assert_gradients,
    build,
    gradients,
    randint,
    randn,
)
from helpers.pages import assert_whole_batch, blocks, namespace, read, run
from torch import nn
from torch.nn.functional import normalize

from scatterpar import ScatterOnceParallel

ANSWERS = blocks(read("docs/does-it-solve-mine.md"), "python")
ROWS = 40


class TwoColumns(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, one, other):
        return normalize(self.body(one), dim=1), normalize(self.body(other), dim=1)


class Clip(TwoColumns):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, one, other):
        return *super().forward(one, other), self.scale


def answered(number, **names):
    names = namespace() | {"ScatterOnceParallel": ScatterOnceParallel} | names
    run(ANSWERS[number], names)
    return names


@pytest.mark.parametrize("number", [0, 1, 5])
def test_loops_with_one_process(number, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    names = answered(number)
    plain = namespace()
    plain["criterion"](plain["model"](plain["images"]), plain["labels"]).backward()
    assert_gradients(names["model"], gradients(plain["model"]))
    if number == 0:
        assert names["engine"].last_step.messages["reduce"] == 1
        assert "'replicate': " in capsys.readouterr().out
    elif number == 1:
        assert torch.load("model.pt").keys() == plain["model"].state_dict().keys()


def test_tokens():
    model, words = (
        build(lambda: nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))),
        randint(7, 9, 6),
    )
    padded = words.masked_fill(torch.arange(6) >= torch.arange(1, 10)[:, None], -100)
    names = answered(2, language_model=model, words=words, padded=padded)
    assert_whole_batch(names, model, words, padded, names["token_loss"])


@pytest.mark.parametrize(
    ("number", "made", "name", "loss"),
    [
        (3, TwoColumns, "two_columns", "in_batch_negatives"),
        (4, Clip, "clip", "clip_loss"),
    ],
)
def test_contrastive_losses(number, made, name, loss):
    model, columns = build(made), (randn(ROWS, 4), randn(ROWS, 4, seed=2))
    names = answered(number, anchors=columns[0], positives=columns[1], **{name: model})
    assert_whole_batch(names, model, columns, None, names[loss])


def test_no_answer_goes_untested():
    assert len(ANSWERS) == 6
