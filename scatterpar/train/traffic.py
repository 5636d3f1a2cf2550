"""What crossed devices, beside what `nn.DataParallel` would have moved for the same gradients."""

from __future__ import annotations

from collections.abc import Iterable

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


class Traffic:
    """Bytes of whole steps: the engine's as counted, `nn.DataParallel`'s as computed.

    A step right after a test is no whole one: the test has sent the parameters for it.
    """

    def __init__(self, model: nn.Module, row_bytes: int) -> None:
        self.model = model
        self.row_bytes = row_bytes
        self.steps = self.calls = 0
        self.counted = dict.fromkeys(PHASES, 0)
        self.computed = dict.fromkeys(PHASES, 0)

    def add(self, plan: Plan, counted: Bytes) -> None:
        """Add a step."""
        self.steps += 1
        self.calls += calls_of(plan)
        computed = data_parallel_bytes(plan, self.model, counted["scatter"], self.row_bytes)
        for phase in PHASES:
            self.counted[phase] += counted[phase]
            self.computed[phase] += computed[phase]

    def __str__(self) -> str:
        counted, computed = sum(self.counted.values()), sum(self.computed.values())
        if not self.steps:
            return "no whole step was counted"
        if not counted:
            return "all replicas share one memory: nothing had to cross between devices"
        calls = f"nn.DataParallel, computed for {self.calls / self.steps:>4.4g} calls"
        return (
            f"{'crossed devices per step, in MB:':43}{''.join(f'{h:>11}' for h in _HEADS)}\n"
            f"  {'this run, counted':41}{self._row(self.counted)}\n"
            f"  {calls:41}{self._row(self.computed)}\n"
            f"  nn.DataParallel would have moved {computed / counted:.1f} times as much"
        )

    def _row(self, moved: Bytes) -> str:
        sizes = [*moved.values(), sum(moved.values())]
        return "".join(f"{size / self.steps / 1e6:>11.3f}" for size in sizes)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
