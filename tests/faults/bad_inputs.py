"""What is refused, and in which words: the table in ``tests/bad_inputs.md``.

``python -m faults.bad_inputs`` (from ``tests/``) tries its first column and writes the others anew.
"""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.oracle import seeded
from torch import nn

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    Replicated,
    Rows,
    ScatterOnceParallel,
    ShardedOptimizer,
    count_labels,
    gather,
    recipe,
)

PAGE = Path(__file__).parent.parent / "bad_inputs.md"
PASSED_ON = "(torch's own words)"
HEAD = """# Bad inputs

What was tried, and what it says. `model` is `nn.Linear(4, 2)`, `engine` has two replicas on the
CPU, `by_cost` too, with `micro_batch_cost=8`. `x` holds 6 rows of 4 features, `y` 6 classes,
`loss` is `nn.CrossEntropyLoss()`. `pair` is `Pair(model)` (`DataParallelModel`) on the same
replicas, `judge` is `Judge(loss)` (`DataParallelCriterion`), `outputs` is `pair(x)`, `Sharded` is
`ShardedOptimizer`, `SGD(lr)` is an optimizer of its own. After each of them the model is bit for
bit what it was, and the engine's next step is exact.

A test tries every row of this page and fails when one says anything else.

| tried | raises | says |
|---|---|---|
"""


def world() -> dict[str, Any]:
    """The names that the rows of the table use."""
    generator = torch.Generator().manual_seed(0)
    with seeded():
        model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 4, generator=generator))
        model.bias.zero_()
    model.weight.grad = torch.ones(2, 4)
    inputs = torch.randn(6, 4, generator=generator)
    pair = DataParallelModel(model, ["cpu"] * 2)
    return {
        "model": model,
        "pair": pair,
        "outputs": pair(inputs),
        "judge": DataParallelCriterion(nn.CrossEntropyLoss(), ["cpu"] * 2),
        "Pair": DataParallelModel,
        "Judge": DataParallelCriterion,
        "engine": ScatterOnceParallel(model, 2, ["cpu"] * 2),
        "by_cost": ScatterOnceParallel(model, device_ids=["cpu"] * 2, micro_batch_cost=8),
        "x": inputs,
        "y": torch.randint(2, (6,), generator=generator),
        "loss": nn.CrossEntropyLoss(),
        "none_loss": nn.CrossEntropyLoss(reduction="none"),
        "nn": nn,
        "torch": torch,
        "DataLoader": torch.utils.data.DataLoader,
        "Engine": ScatterOnceParallel,
        "Rows": Rows,
        "Replicated": Replicated,
        "Sharded": ShardedOptimizer,
        "SGD": lambda lr: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr),
        "recipe": recipe,
        "schedules": torch.optim.lr_scheduler,
        "gather": gather,
        "count_labels": count_labels,
        "namedtuple": collections.namedtuple,
    }


def tried() -> dict[str, bool]:
    """What the page tries, and whether it leaves the words to torch or to the user's own code.

    Those arrive as they are, and other versions may word them in another way.
    """
    rows = re.findall(r"^\| `(.+?)` \| .* \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {code: said == PASSED_ON for code, said in rows}


@dataclass(frozen=True)
class Row:
    """One row of the table, and the world after it was tried."""

    tried: str
    kind: str
    said: str
    names: dict[str, Any]
    passed_on: bool

    def __str__(self) -> str:
        return f"| `{self.tried}` | {self.kind} | {PASSED_ON if self.passed_on else self.said} |"


def attempt(tried: str, passed_on: bool = False) -> Row:
    names = world()
    try:
        kind, said = "nothing", repr(eval(tried, names))
    except Exception as error:
        kind, said = type(error).__name__, str(error)
    return Row(tried, kind, " ".join(said.split()).replace("|", "\\|"), names, passed_on)


def page(rows: list[Row]) -> str:
    return HEAD + "\n".join(map(str, rows)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page([attempt(*row) for row in tried().items()]))
