"""The snippets of docs/debug-a-step.md run, and say what the page says."""

from __future__ import annotations

import pytest
import torch
from helpers.oracle import build, randint, randn
from helpers.pages import blocks, run, sections
from torch import nn
from torch.nn.functional import cross_entropy

from scatterpar import ScatterOnceParallel

PAGE = sections("docs/debug-a-step.md")
TITLES = list(PAGE)


def names():
    images, labels = randn(64, 8), randint(3, 64)
    model = build(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    return {
        "torch": torch,
        "ScatterOnceParallel": ScatterOnceParallel,
        "model": model,
        "images": images,
        "labels": labels,
        "criterion": lambda scores, labels: cross_entropy(scores, labels),
    }


def follow(number, own):
    for code in blocks(PAGE[TITLES[number]], "python"):
        run(code, own)


def test_the_error_and_its_notes_are_those_of_the_page():
    own = names()
    with pytest.raises(IndexError) as caught:
        follow(0, own)
    (shown,) = blocks(PAGE[TITLES[0]], "text")
    said = [f"IndexError: {caught.value}", *caught.value.__notes__]
    assert "\n".join(said) == shown.strip()


def test_a_replay_after_a_step_that_did_not_fail():
    own = names()
    own["engine"] = ScatterOnceParallel(own["model"], 4, ["cpu"] * 2)
    follow(1, own)
    assert torch.equal(own["output"], own["model"](own["images"][40:48]).detach())
    assert list(own["engine"].plan(64).rows_of(1, 1)) == [*range(40, 48)]


def test_the_row_whose_loss_is_nan(capsys):
    own = names()
    own["images"][19, 3] = torch.nan
    follow(2, own)
    assert "sub-step 2; nothing was changed" in capsys.readouterr().out
    assert own["bad"] == [19]


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_anomaly_detection_and_the_check(capsys):
    own = names()
    own["engine"] = ScatterOnceParallel(own["model"], 4, ["cpu"] * 2)
    follow(3, own)
    own["engine"] = ScatterOnceParallel(own["model"], 4, ["cpu"] * 2)
    follow(4, own)
    assert "only rounding differs" in capsys.readouterr().out
