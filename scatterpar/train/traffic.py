"""What crossed devices, beside what `nn.DataParallel` would have moved for the same gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from scatterpar.plan import Plan

PHASES = ("scatter", "replicate", "compute", "reduce")
_HEADS = ("scatter", "replicate", "outputs", "reduce", "total")
Bytes = dict[str, int]


def data_parallel_bytes(plan: Plan, model: nn.Module, batch_bytes: int, row_bytes: int) -> Bytes:
    """Compute what `nn.DataParallel`, called once for each sub-step, moves in one step.

    Arithmetic on its protocol: each call broadcasts parameters and buffers to every other
    device, gathers the outputs to the master, scatters their gradients back, and reduces the
    parameters' gradients. The batch itself crosses once over all calls together. Devices whose
    memory is the master's receive nothing.

    Args:
        plan: shares and sub-steps of the step.
        model: the master.
        batch_bytes: size of the inputs and targets that had to cross.
        row_bytes: size of the model's output for one row.

    >>> import torch
    >>> from scatterpar.plan import make_plan
    >>> plan = make_plan(8, [torch.device("cpu:0"), torch.device("cpu:1")], accum=4)
    >>> data_parallel_bytes(plan, nn.Linear(2, 1), batch_bytes=96, row_bytes=4)
    {'scatter': 96, 'replicate': 48, 'compute': 32, 'reduce': 48}
    """
    away = [share for share in plan.shares if share.device != plan.shares[0].device]
    copies = calls_of(plan) * len({share.device for share in away})
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return {
        "scatter": batch_bytes,
        "replicate": copies * _size([*model.parameters(), *model.buffers()]),
        "compute": 2 * row_bytes * sum(share.stop - share.start for share in away),
        "reduce": copies * _size(trained),
    }


def calls_of(plan: Plan) -> int:
    """Return the number of calls of `nn.DataParallel` that a step is compared with."""
    return max(len(share.micro_batches) for share in plan.shares)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step of a plan: the engine's as counted, `nn.DataParallel`'s as computed."""

    plan: Plan
    counted: Bytes
    computed: Bytes

    @classmethod
    def of(cls, plan: Plan, counted: Bytes, model: nn.Module, row_bytes: int) -> Traffic:
        """Compare what a step moved."""
        computed = data_parallel_bytes(plan, model, counted["scatter"], row_bytes)
        return cls(plan, counted, computed)

    def __str__(self) -> str:
        moved, theirs = sum(self.counted.values()), sum(self.computed.values())
        if not moved:
            return "all replicas share one memory: nothing had to cross between devices"
        calls = f"nn.DataParallel, computed for {calls_of(self.plan):>4} calls"
        return (
            f"{'crossed devices in a step, in MB:':43}{''.join(f'{h:>11}' for h in _HEADS)}\n"
            f"  {'this run, counted':41}{_row(self.counted)}\n"
            f"  {calls:41}{_row(self.computed)}\n"
            f"  nn.DataParallel would have moved {theirs / moved:.1f} times as much"
        )


def _row(moved: Bytes) -> str:
    return "".join(f"{size / 1e6:>11.3f}" for size in (*moved.values(), sum(moved.values())))


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
