"""Whose gradient is which multiple of the whole batch's? Computes the guide's table.

``python -m benchmarks.averaging`` prints it. DistributedDataParallel runs in two
processes of its own (gloo), ``nn.DataParallel``'s schedule on two CPU memories, the
engine on two replicas with two sub-steps each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.per_call import PerCall
from benchmarks.ranks import Ranks
from scatterpar import ScatterOnceParallel

IGNORED = -100
CASES = {
    "mean, 8 rows as 4 + 4": ("mean", 8, 0),
    "sum, 8 rows as 4 + 4": ("sum", 8, 0),
    "mean, 9 rows as 5 + 4": ("mean", 9, 0),
    "mean, 8 rows, 3 of them `ignore_index`": ("mean", 8, 3),
}
WHO = (
    "`nn.DataParallel`",
    "plain loop, divided by 4",
    "DDP, 2 processes",
    "scatterpar",
)


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor, nn.Module]:
    """The model, inputs, targets and criterion of a case; the same in every process."""
    reduction, rows, ignored = CASES[name]
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(6, 3, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    inputs = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (rows,), generator=generator)
    targets[:ignored] = IGNORED
    return (
        model,
        inputs,
        targets,
        nn.CrossEntropyLoss(reduction=reduction, ignore_index=IGNORED),
    )


def data_parallel(
    model: nn.Module, inputs: Tensor, targets: Tensor, criterion: nn.Module
) -> None:
    """Outputs of both replicas gathered on the master, and one loss of them."""
    devices = (torch.device("cpu:0"), torch.device("cpu:1"))
    criterion(PerCall(model, devices)(inputs), targets).backward()


def plain_loop(
    model: nn.Module, inputs: Tensor, targets: Tensor, criterion: nn.Module
) -> None:
    """Four micro-batches, as evenly as possible, each loss divided by four."""
    for x, y in zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True):
        (criterion(model(x), y) / 4).backward()


def engine(
    model: nn.Module, inputs: Tensor, targets: Tensor, criterion: nn.Module
) -> None:
    """Nothing divided by hand."""
    with ScatterOnceParallel(model, accum=2, device_ids=["cpu:0", "cpu:1"]) as parallel:
        parallel.forward_backward(inputs, targets, criterion)


def ddp() -> dict[str, Tensor]:
    """Every case's gradient, from two processes with the rows of one replica each."""
    with Ranks([torch.device("cpu")] * 2, seconds=1800) as ranks:
        gradients: dict[str, Tensor] = ranks.ask(ddp_rank)[0]
        return gradients


def ddp_rank(rank: int) -> dict[str, Tensor]:
    """The gradients that one of the processes computes. They are the same in both."""
    gradients = {}
    for name in CASES:
        model, inputs, targets, criterion = problem(name)
        parallel = DistributedDataParallel(model)
        criterion(
            parallel(inputs.tensor_split(2)[rank]), targets.tensor_split(2)[rank]
        ).backward()
        gradients[name] = _gradient(model)
    return gradients


def compare(gradient: Tensor, whole: Tensor) -> str:
    """A multiple of the whole batch's gradient, or how far it is from any."""
    factor = (gradient @ whole / (whole @ whole)).item()
    if torch.allclose(gradient, factor * whole, rtol=1e-9, atol=1e-12):
        return "exact" if abs(factor - 1) < 1e-9 else f"{factor:.4g} times"
    return f"off by {100 * ((gradient - whole).norm() / whole.norm()).item():.0f} %"


def table() -> str:
    """The table, in Markdown."""
    local: list[Callable[..., None]] = [data_parallel, plain_loop, engine]
    rows = []
    distributed = ddp()
    for name in CASES:
        model, inputs, targets, criterion = problem(name)
        criterion(model(inputs), targets).backward()
        whole = _gradient(model)
        found = []
        for contender in local:
            model, inputs, targets, criterion = problem(name)
            contender(model, inputs, targets, criterion)
            found.append(compare(_gradient(model), whole))
        found.insert(2, compare(distributed[name], whole))
        rows.append([name, *found])
    lines = [["loss and batch", *WHO], ["---"] * (len(WHO) + 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat(
        [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    )


if __name__ == "__main__":
    print(table())
