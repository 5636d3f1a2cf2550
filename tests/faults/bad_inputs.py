"""What is refused, and in which words: the table in ``tests/bad_inputs.md``.

``python -m faults.bad_inputs`` (from ``tests/``) writes it anew.
"""

from __future__ import annotations

import collections
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
)

PAGE = Path(__file__).parent.parent / "bad_inputs.md"
HEAD = """# Bad inputs

What was tried, and what it says. `model` is `nn.Linear(4, 2)`, `engine` has two replicas on the
CPU, `x` holds 6 rows of 4 features, `y` 6 classes, `loss` is `nn.CrossEntropyLoss()`. `pair` is
`Pair(model)` (`DataParallelModel`) on the same replicas, `judge` is `Judge(loss)`
(`DataParallelCriterion`), `outputs` is `pair(x)`. After each of them the model is bit for bit what
it was, and the engine's next step is exact.

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
        "namedtuple": collections.namedtuple,
    }


TRIED = [
    # what makes an engine
    "Engine('resnet')",
    "Engine(nn.Linear)",
    "Engine(nn.DataParallel(model))",
    "Engine(engine)",
    "Engine(model, accum=0)",
    "Engine(model, accum=-3)",
    "Engine(model, accum=2.0)",
    "Engine(model, accum=True)",
    "Engine(model, accum=None)",
    "Engine(model, accum='automatic')",
    "Engine(model, micro_batch_size=0)",
    "Engine(model, micro_batch_size=2.0)",
    "Engine(model, accum=2, micro_batch_size=8)",
    "Engine(model, accum='auto', micro_batch_size=8)",
    "Engine(model, dim='rows')",
    "Engine(model, dim=0.0)",
    "Engine(model, buffers='average')",
    "Engine(model, device_ids=[])",
    "Engine(model, device_ids=2)",
    "Engine(model, device_ids='cpu')",
    "Engine(model, device_ids=['cpu', None])",
    "Engine(model, device_ids=['cpu', 1.5])",
    "Engine(model, device_ids=[True])",
    "Engine(model.to('meta'), device_ids=['cpu'])",
    "Engine(model, device_ids=['cpu'], measure_noise=True)",
    "Engine(model, accumulate_dtype='float32')",
    "Engine(model, accumulate_dtype=torch.int64)",
    "Engine(model, accumulate_dtype=torch.complex64)",
    "Engine(model, compile='yes')",
    "Engine(model, compile={'options': {'triton.cudagraphs': True}})",
    "Engine(model, graphs='yes')",
    "Engine(model, graphs=True, compile=True)",
    "Engine(model, graphs=True, buffers='batch')",
    "Engine(model, process_group='gloo')",
    "Engine(model, device_ids=['cpu'] * 2, shares=[1])",
    "Engine(model, device_ids=['cpu'] * 2, shares=[1, 0])",
    "Engine(model, device_ids=['cpu'] * 2, shares=[1, float('inf')])",
    "Engine(model, device_ids=['cpu'] * 2, shares=[1, '2'])",
    "Engine(model, device_ids=['cpu'] * 2, shares=[1, True])",
    "Engine(model, device_ids=['cpu'] * 2, shares='even')",
    "Engine(model, device_ids=['cpu'] * 2, shares=3)",
    "Engine(model, micro_batch_cost=0)",
    "Engine(model, micro_batch_cost=float('nan'))",
    "Engine(model, micro_batch_cost='8')",
    "Engine(model, accum=2, micro_batch_cost=8)",
    "Engine(model, accum='auto', micro_batch_cost=8)",
    "Engine(model, micro_batch_size=2, micro_batch_cost=8)",
    "Engine(model, graphs=True, micro_batch_cost=8)",
    # what is planned
    "engine.plan(0)",
    "engine.plan(-1)",
    "engine.plan(2.5)",
    "engine.plan('3')",
    "engine.plan(None)",
    "engine.plan(True)",
    "engine.plan(torch.tensor(3))",
    "engine.plan([5, 0])",
    "engine.plan(4, [1] * 4)",
    # what a step is given
    "engine.forward_backward(x[:0], y[:0], loss)",
    "engine.forward_backward(x, y[:5], loss)",
    "Engine(model, 2, ['cpu'] * 2, dim=1).forward_backward(x, y, loss)",
    "engine.forward_backward((x, x[:3]), y, loss)",
    "engine.forward_backward({'input': x, 'other': y[:2]}, y, loss)",
    "engine.forward_backward([], None, loss)",
    "engine.forward_backward('text', 3, loss)",
    "engine.forward_backward(torch.tensor(1.0), None, loss)",
    "engine.forward_backward(x.clone().requires_grad_(), y, loss)",
    "engine.forward_backward(x, model(x), nn.MSELoss())",
    "engine.forward_backward(x, y)",
    "engine.forward_backward(x)",
    "engine.forward_backward(x, y, 'mse')",
    "engine.forward_backward(x, loss, y)",
    "engine.forward_backward(x, loss)",
    "engine.forward_backward(x, None, y)",
    "engine.forward_backward(x, y, nn.CrossEntropyLoss)",
    "engine.forward_backward(x.numpy(), y.numpy(), loss)",
    "engine.forward_backward(x, y.numpy(), loss)",
    "engine.forward_backward(DataLoader(x), None, loss)",
    "engine.forward_backward(x, y, loss, reduction='none')",
    "engine.forward_backward(x, y, loss, reduction='avg')",
    "engine.forward_backward(x, y, none_loss)",
    "engine.forward_backward(x, y, lambda o, t: (o * o).sum(1))",
    "engine.forward_backward(x, y, lambda o, t: loss(o, t) * (1 + 1j))",
    "engine.forward_backward(x, y, lambda o, t: 0.5)",
    "engine.forward_backward(x, y, lambda o, t: None)",
    "engine.forward_backward(x, y, lambda o, t: (loss(o, t), o))",
    "engine.forward_backward(x, None, lambda o, t: {'box': o.sum(), 'class': o.mean()})",
    "engine.forward_backward(x, y, loss, count=lambda i, t: -1)",
    "engine.forward_backward(x, y, loss, count=lambda i, t: float('inf'))",
    "engine.forward_backward(x, y, loss, count=lambda i, t: '3')",
    "engine.forward_backward(x, y, loss, count=lambda i, t: float('nan'))",
    "engine.forward_backward(x, y, loss, count=lambda i, t: None)",
    "engine.forward_backward(x, y, loss, count=lambda i, t: t)",
    "engine.forward_backward(x, y, loss, count=7)",
    "engine.forward_backward(x, y, loss, scaler=128.0)",
    "engine.forward_backward(x, y, lambda o, t: loss(o, t) * len(t))",
    "engine.forward_backward(x, y, loss, reduction='sum')",
    "engine.forward_backward(x, {'y': y}, loss)",
    "engine.forward_backward(x, y, loss, return_outputs=3)",
    "engine.forward_backward(x, y, loss, costs=[1] * 6)",
    "engine.forward_backward(x, y, loss, whole_batch=True, reduction='mean')",
    "engine.forward_backward(x, y, loss, whole_batch=True, count=lambda i, t: 1)",
    "engine.forward_backward(x, whole_batch=True)",
    "Engine(model, graphs=True).forward_backward(x, y, loss, whole_batch=True)",
    # what is marked
    "Rows('text')",
    "Rows({'a': 1})",
    "Rows(iter([]))",
    "Rows([1], collate=3)",
    "Rows.from_batches(x)",
    "Rows.from_batches({'a': x})",
    "Rows.from_batches([])",
    "Replicated([Rows([1])])",
    "engine.forward_backward(Rows.from_batches(x.split([3, 3])), y[:5], loss)",
    "engine.forward_backward(Rows.from_batches([x[:2], x[2:]]), Rows.from_batches([y]), loss)",
    "engine.eval()(Rows.from_batches([x, x]))",
    # how the engine is used otherwise
    "engine(x)",
    "engine.eval()(x[:0])",
    "engine.eval()(x.numpy())",
    "engine.eval()(x, costs=[1] * 6)",
    "engine.eval()()",
    "engine.close() or engine.forward_backward(x, y, loss)",
    "engine.close() or engine.eval()(x)",
    "engine.close() or engine.replicas",
    # the pair
    "Pair(lambda x: x)",
    "Pair(engine)",
    "Pair(pair)",
    "Engine(pair)",
    "Pair(model, 'cpu')",
    "Pair(nn.Sequential(model, nn.Linear(2, 2, device='meta')), ['cpu'])",
    "pair(x[:0])",
    "pair(x, mask=y[:4])",
    "pair()",
    "pair(torch.tensor(1.0))",
    "Judge('mse')",
    "Judge(nn.MSELoss)",
    "Judge(loss, [])",
    "judge(outputs[:1], y)",
    "judge(outputs, y[:1])",
    "judge((), y)",
    "Judge(loss)((), y)",
    "judge(outputs, torch.zeros(8).long())",
    "Judge(loss)(outputs, torch.zeros(8).long())",
    "judge(Pair(model, ['cpu'] * 2)(x[:5])[::-1], y[:5])",
    "judge(outputs, (y, y[:5]))",
    "judge(outputs, y[:0])",
    "judge(torch.cat(outputs), y)",
    "judge({'a': outputs}, y)",
    "judge(None, y)",
    "judge((outputs[0], 'text'), y)",
    "judge(tuple(o.to('meta') for o in outputs), y)",
    "Judge(none_loss)(outputs, y)",
    "Judge(lambda o, t: o)(outputs, y)",
    "Judge(lambda o, t: o.mean() * 1j)(outputs, y)",
    "Judge(lambda o, t: 1.0)(outputs, y)",
    "judge(outputs, y, reduction='median')",
    "judge(outputs, y, count=lambda o, t: 'many')",
    "judge(outputs, y, count=lambda o, t: -1)",
    "judge(outputs, y, count=3)",
]


# What torch says, or the user's own code: it arrives as it is, and other versions may word it
# in another way.
PASSED_ON = [
    "engine.forward_backward(None, y, loss)",
    "engine.forward_backward(x[:, :3], y, loss)",
    "engine.forward_backward(x, y + 7, loss)",
    "engine.forward_backward({'inputs': x}, y, loss)",
    "engine.forward_backward(x.double(), y, loss)",
    "engine.forward_backward((x, x), y, loss)",
    "engine.forward_backward(x.to('meta'), y, loss)",
    "engine.forward_backward(x, y, lambda o, t: o.detach().sum())",
    "engine.forward_backward(x, y, lambda o, t: o.argmax())",
    "engine.load_state_dict({'weight': x})",
]


@dataclass(frozen=True)
class Row:
    """One row of the table, and the world after it was tried."""

    tried: str
    kind: str
    said: str
    names: dict[str, Any]

    def __str__(self) -> str:
        said = "(torch's own words)" if self.tried in PASSED_ON else self.said
        return f"| `{self.tried}` | {self.kind} | {said} |"


def attempt(tried: str) -> Row:
    """Try it in a world of its own."""
    names = world()
    try:
        kind, said = "nothing", repr(eval(tried, names))
    except Exception as error:
        kind, said = type(error).__name__, str(error)
    return Row(tried, kind, " ".join(said.split()).replace("|", "\\|"), names)


def page(rows: list[Row]) -> str:
    """The whole page."""
    return HEAD + "\n".join(map(str, rows)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page([attempt(tried) for tried in TRIED + PASSED_ON]))
