"""Whose gradient is which multiple of the whole batch's? Computes the guide's table.

``python -m benchmarks.averaging`` prints it: a row per loss and batch, a column per way
to compute the gradient. ``nn.DataParallel``'s schedule runs on two CPU memories,
DistributedDataParallel in two gloo processes, the engine on two replicas with two
sub-steps each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import joined_gradient
from benchmarks.per_call import PerCall
from benchmarks.ranks import Ranks
from benchmarks.tables import Table
from scatterpar import ScatterOnceParallel

IGNORED = -100
# The criterion's reduction, the rows, and how many of them have an ignored label.
CASES = {
    "mean, 8 rows as 4 + 4": ("mean", 8, 0),
    "sum, 8 rows as 4 + 4": ("sum", 8, 0),
    "mean, 9 rows as 5 + 4": ("mean", 9, 0),
    "mean, 8 rows, 3 of them `ignore_index`": ("mean", 8, 3),
}
COLUMNS = (
    "loss and batch",
    "`nn.DataParallel`",
    "plain loop",
    "DDP, 2 processes",
    "scatterpar",
)


def problem(case: str) -> tuple[nn.Module, Tensor, Tensor, nn.Module]:
    """The model, inputs, targets and criterion of a case; the same in every process."""
    reduction, rows, num_ignored = CASES[case]
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(6, 3, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    inputs = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (rows,), generator=generator)
    targets[:num_ignored] = IGNORED
    criterion = nn.CrossEntropyLoss(reduction=reduction, ignore_index=IGNORED)
    return model, inputs, targets, criterion


def whole_batch(case: str) -> Tensor:
    """The gradient of the whole batch's loss."""
    model, inputs, targets, criterion = problem(case)
    criterion(model(inputs), targets).backward()
    return joined_gradient(model)


def data_parallel(case: str) -> Tensor:
    """Outputs of both replicas gathered on the master, and one loss of them."""
    model, inputs, targets, criterion = problem(case)
    parallel = PerCall(model, (torch.device("cpu:0"), torch.device("cpu:1")))
    criterion(parallel(inputs), targets).backward()
    return joined_gradient(model)


def plain_loop(case: str) -> Tensor:
    """Four micro-batches, as evenly as possible, each loss divided by four."""
    model, inputs, targets, criterion = problem(case)
    for x, y in zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True):
        (criterion(model(x), y) / 4).backward()
    return joined_gradient(model)


def engine(case: str) -> Tensor:
    """Nothing divided by hand."""
    model, inputs, targets, criterion = problem(case)
    with ScatterOnceParallel(model, accum=2, device_ids=["cpu:0", "cpu:1"]) as parallel:
        parallel.forward_backward(inputs, targets, criterion)
    return joined_gradient(model)


def ddp(rank: int, case: str) -> Tensor:
    """In one of two processes: a replica's rows. The gradient is the same in both."""
    model, inputs, targets, criterion = problem(case)
    parallel = DistributedDataParallel(model)
    rows = inputs.tensor_split(2)[rank]
    labels = targets.tensor_split(2)[rank]
    criterion(parallel(rows), labels).backward()
    return joined_gradient(model)


def compare(gradient: Tensor, whole: Tensor) -> str:
    """A multiple of the whole batch's gradient, or how far it is from any."""
    factor = (gradient @ whole / (whole @ whole)).item()
    if torch.allclose(gradient, factor * whole, rtol=1e-9, atol=1e-12):
        return "exact" if abs(factor - 1) < 1e-9 else f"{factor:.4g} times"
    distance = ((gradient - whole).norm() / whole.norm()).item()
    return f"off by {100 * distance:.0f} %"


def table() -> Table:
    """The guide's table."""
    rows = []
    with Ranks([torch.device("cpu")] * 2, seconds=1800) as ranks:
        for case in CASES:
            gradients = (
                data_parallel(case),
                plain_loop(case),
                ranks.ask(ddp, case)[0],
                engine(case),
            )
            whole = whole_batch(case)
            rows.append([case, *[compare(gradient, whole) for gradient in gradients]])
    return Table(COLUMNS, rows)


if __name__ == "__main__":
    print(table())
