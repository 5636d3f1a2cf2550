"""The table of docs/trainer.md comes out, and its recipes run."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import assert_close, build, randint, randn
from helpers.stock_parallel import gradient
from helpers.trainers import (
    language_model,
    padded,
    sentences,
    sequence_classifier,
    token_classifier,
)
from torch import nn

PAGE = (Path(__file__).parent.parent / "docs" / "trainer.md").read_text(encoding="utf-8")
TABLE = re.findall(
    r"^\| ([a-z ]+) \| (\d+) \| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M
)

MODELS = {
    "causal language model": (language_model, padded),
    "sequence classifier": (sequence_classifier, partial(padded, kind="classes")),
    "token classifier": (token_classifier, partial(padded, kind="tokens")),
}


@pytest.mark.draws
@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(row[:3]))
def test_the_table(tmp_path, row):
    name, rows, k, *figures = row
    factory, collate = MODELS[name]
    first = partial(
        gradient, folder=tmp_path, model=factory(), data=sentences(int(rows)), collate=collate
    )
    single = first("stock", size=int(rows), k=1)
    for kind, parts, shown in zip(
        ("stock", "data parallel", "scatterpar"), (1, 4, 4), figures, strict=True
    ):
        off = (first(kind, size=8, k=int(k), parts=parts) - single).norm() / single.norm()
        assert float(off) == pytest.approx(float(shown), rel=0.03, abs=1e-12), kind


def test_the_table_is_found():
    assert len(TABLE) == 12


def recipe(name):
    found = {
        section.partition("\n")[0]: re.search(r"^```python\n(.*?)^```$", section, re.M | re.S)
        for section in re.split(r"^## ", PAGE, flags=re.M)[1:]
    }
    return found[name][1]


def follow(code, relative):
    """Runs it, and a plain loop beside it."""
    model = build(mlp).float()
    twin = copy.deepcopy(model)
    loader = [(randn(9, FEATURES, seed=n).float(), randint(CLASSES, 9, seed=n)) for n in range(3)]
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2),
        "loader": loader,
        "criterion": criterion,
        "device_ids": ["cpu:0", "cpu:1"],
    }
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(plain, 0.5, 2)
    clips, schedules = "clip_grad_norm_" in code, "scheduler.step()" in code
    if not schedules:
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, targets in loader:
        plain.zero_grad()
        criterion(twin(inputs), targets).backward()
        if clips:
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        plain.step()
        if schedules:
            schedule.step()
    exec(code, names)
    names["engine"].close()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(parameter.detach(), other.detach(), "parameter", relative)


def test_the_recipe_for_accelerate():
    pytest.importorskip("accelerate")
    follow(recipe("accelerate"), 1e-6)


def test_the_recipe_for_fabric():
    pytest.importorskip("lightning_fabric")
    follow(recipe("Fabric"), 2e-3)
