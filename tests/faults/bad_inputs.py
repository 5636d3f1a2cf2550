"""What is refused, with the error's type and key words: the lines of
``bad_inputs.txt``.

A line is an expression, a type, and words of its text, with `` | `` between them.
Without words the text is torch's own, or the user's. In an expression ``model`` is
``nn.Linear(4, 2)``, ``engine`` has two replicas on the CPU. ``x`` holds 6 rows of 4
features, ``y`` 6 classes. The other names are in ``world``, or the package's.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from pathlib import Path
from typing import Any

import torch
from harness.models import Of
from harness.oracle import seeded
from torch import nn

import scatterpar
from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    ScatterOnceParallel,
    recipe,
)

_FILE = Path(__file__).with_suffix(".txt")


def world(expression: str) -> dict[str, Any]:
    """The names that an expression of the table may use."""
    with seeded():
        model = nn.Linear(4, 2)
        inputs = torch.randn(6, 4)
        labels = torch.randint(2, (6,))
    model.weight.grad = torch.ones(2, 4)
    two = ["cpu"] * 2
    makers = {
        "pair": lambda: DataParallelModel(model, two),
        "outputs": lambda: DataParallelModel(model, two)(inputs),
        "judge": lambda: DataParallelCriterion(nn.CrossEntropyLoss(), two),
        "engine": lambda: ScatterOnceParallel(model, 2, two),
    }
    # An expression has one or two of them, and some take as long as a step.
    made = {}
    for name, make in makers.items():
        if re.search(rf"\b{name}\b", expression):
            made[name] = make()
    public = {name: getattr(scatterpar, name) for name in scatterpar.__all__}
    return (
        public
        | made
        | {
            "model": model,
            "Pair": DataParallelModel,
            "Judge": DataParallelCriterion,
            "x": inputs,
            "y": labels,
            "loss": nn.CrossEntropyLoss(),
            "none_loss": nn.CrossEntropyLoss(reduction="none"),
            "nn": nn,
            "torch": torch,
            "DataLoader": torch.utils.data.DataLoader,
            "Engine": ScatterOnceParallel,
            "Of": Of,
            "Sharded": scatterpar.ShardedOptimizer,
            "SGD": lambda lr: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr),
            "recipe": recipe,
            "schedules": torch.optim.lr_scheduler,
            "dataclass": dataclasses.make_dataclass,
            "namedtuple": collections.namedtuple,
        }
    )


def bad_inputs() -> list[list[str]]:
    """Each expression, the name of the type of its error, and words of the error's
    text.
    """
    return [
        line.split(" | ") for line in _FILE.read_text(encoding="utf-8").splitlines()
    ]


def attempt(expression: str) -> tuple[str, str, dict[str, Any]]:
    """The name of the error's type, its text, and the names that the
    expression used.
    """
    names = world(expression)
    try:
        return "nothing", repr(eval(expression, names)), names
    except Exception as error:
        return type(error).__name__, str(error), names
