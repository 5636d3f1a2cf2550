"""buffers="batch": running statistics of batch normalisation are updated once per step.

With sub-steps they would be updated at each sub-step, from few rows. Here they are
updated from all rows of the step. Replicas record the statistics of each call and leave
the running ones unchanged; at the end of the step the records are pooled. Only the
first computation of a call is recorded, not its recomputation in a backward pass
(activation checkpointing). After torchgpipe's DeferredBatchNorm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scatterpar.devices.coalescing import iter_copies
from scatterpar.devices.copies import to_numbers
from scatterpar.devices.transfers import Transfers
from scatterpar.replicas.buffers import BufferValue
from scatterpar.replicas.shared_buffers import BufferDict
from scatterpar.torch_private.autograd import current_graph_task

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Moments(NamedTuple):
    """Of each channel.

    Attributes:
        values: the number of values.
        packed: their mean, and the sum of their squared deviations from the mean, as
            two rows, at least in float32. They are copied together.
    """

    values: int
    packed: Tensor


# The moments of each call in a step, by number of the layer among the modules.
Records = dict[int, list[Moments]]
# The user's batch normalisation, and its moments in a step, of no values if
# nobody called it.
Layer = tuple[Any, Moments]


class StepStatistics(NamedTuple):
    """The statistics of a step, of each layer that is updated once per step."""

    layers: Sequence[Layer]

    def values(self) -> list[BufferValue]:
        """The running statistics that torch would compute in one call with all rows."""
        values: list[BufferValue] = []
        for layer, moments in self.layers:
            if moments.values:
                values += running_stats_after(layer, moments)
        return values

    def to_pool(self) -> list[Tensor]:
        """The tensors to which ranks add a dimension, with one entry per rank.

        One tensor of counts, then one per layer; empty without layers.
        """
        if not self.layers:
            return []
        # All layers take part on all ranks, also those that this rank did not call.
        counts = [moments.values for _, moments in self.layers]
        tensors = [moments.packed for _, moments in self.layers]
        return [torch.tensor(counts, device=tensors[0].device), *tensors]

    def pooled(self, by_rank: Sequence[Sequence[Tensor]]) -> StepStatistics:
        """The statistics of all ranks.

        For each tensor of ``to_pool``, ``by_rank`` has those of all ranks.
        """
        by_layer: list[list[Moments]] = [[] for _ in self.layers]
        for counts, *tensors in zip(*by_rank, strict=True):  # of one rank
            of_rank = zip(by_layer, to_numbers(counts), tensors, strict=True)
            for moments, count, packed in of_rank:
                moments.append(Moments(count, packed))
        layers: list[Layer] = []
        for (layer, _), moments in zip(self.layers, by_layer, strict=True):
            layers.append((layer, pooled(moments)))
        return StepStatistics(layers)


def no_moments(like: Tensor) -> Moments:
    """The moments of no values, of a layer with such running statistics."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return Moments(0, like.new_zeros((2, *like.shape), dtype=dtype))


def record(modules: Iterable[nn.Module]) -> Records:
    """Install hooks that record the moments of each call. Returns the records."""
    records: Records = {}
    for number, module in enumerate(modules):
        if isinstance(module, _KINDS):
            records[number] = []
            # One per layer: several layers may be within calls at the same time.
            recorder = _MomentsRecorder(number, records)
            module.register_forward_pre_hook(recorder.begin)
            # A layer may get its input by keyword.
            module.register_forward_hook(recorder.end, with_kwargs=True)
    return records


def moments_on(
    device: torch.device, records: Records, source: torch.device, transfers: Transfers
) -> dict[int, Moments]:
    """The moments that a replica on ``source`` recorded, on ``device``.

    The keys are those of ``records``, without layers that were not called.
    """
    recorded: dict[int, Moments] = {}
    for number, calls in records.items():
        if calls:
            recorded[number] = pooled(calls)
    if source == device:
        return recorded
    tensors = {number: moments.packed for number, moments in recorded.items()}
    # The moments of all layers, in few messages.
    for message in iter_copies(tensors, device, transfers, "reduce"):
        for number, packed in message.items():
            recorded[number] = recorded[number]._replace(packed=packed)
    return recorded


class _MomentsRecorder:
    """Hooks around the calls of one batch normalisation, of any class.

    In a call the running statistics are zero and the momentum is 1. So the kernel
    writes the statistics of the batch to them, which it computes anyway.
    """

    def __init__(self, number: int, records: Records) -> None:
        self._number = number
        self._records = records
        # During a call that is recorded: the layer's running statistics and momentum.
        self._running: tuple[Tensor, Tensor, float | None] | None = None

    def begin(self, module: Any, _: object) -> None:
        buffers = module._buffers
        mean = buffers.get("running_mean")
        variance = buffers.get("running_var")
        self._running = None
        if module.training and module.track_running_stats and mean is not None:
            self._running = mean, variance, module.momentum
            # With momentum 1 the kernel replaces them by the statistics of this call.
            buffers["running_mean"] = torch.zeros_like(mean)
            buffers["running_var"] = torch.zeros_like(variance)
            vars(module)["momentum"] = 1.0

    def end(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: object
    ) -> None:
        if self._running is None:
            return
        buffers = module._buffers
        mean = buffers["running_mean"]
        variance = buffers["running_var"]
        buffers["running_mean"], buffers["running_var"], momentum = self._running
        vars(module)["momentum"] = momentum
        # Inside of a backward pass, checkpointing recomputes a call that was recorded.
        if current_graph_task() != -1:
            return
        layer_input = args[0] if args else next(iter(kwargs.values()))
        # Per channel: all dimensions but the second.
        values = layer_input.numel() // layer_input.size(1)
        # At least float32: half precision loses differences between means.
        dtype = torch.promote_types(mean.dtype, torch.float32)
        squares = variance.to(dtype) * (values - 1)
        packed = torch.stack([mean.to(dtype), squares])
        self._records[self._number].append(Moments(values, packed))


def pooled(recorded: Sequence[Moments]) -> Moments:
    """The moments of all values together.

    After Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for
    Computing Sample Variances".
    """
    if len(recorded) == 1:
        return recorded[0]
    counts = [moments.values for moments in recorded]
    means = [moments.packed[0] for moments in recorded]
    within = [moments.packed[1] for moments in recorded]
    total = sum(counts)
    # Replicas whose layers exchange statistics may have no values.
    fractions = [count / max(1, total) for count in counts]
    # Not products with tensors of factors, which would be copied from the host.
    mean = _sum(torch._foreach_mul(means, fractions))
    deviations = torch._foreach_sub(means, [mean] * len(means))
    squares = torch._foreach_mul(deviations, deviations)
    # Of the calls' means from the mean of all.
    between = torch._foreach_mul(squares, [float(count) for count in counts])
    return Moments(total, torch.stack([mean, _sum(between) + _sum(within)]))


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


@torch.no_grad()
def running_stats_after(
    layer: Any, moments: Moments
) -> list[tuple[BufferDict, str, Tensor]]:
    """The running statistics that torch would compute in one call with all rows."""
    values: dict[str, Tensor] = {}
    # Counted once per step, as torch would in one call.
    tracked = layer.num_batches_tracked
    if tracked is not None:
        values["num_batches_tracked"] = tracked + 1
    factor = layer.momentum
    if factor is None:  # the mean of all batches; without a count torch uses 0
        factor = 0.0 if tracked is None else 1.0 / (to_numbers(tracked) + 1)
    mean, squares = moments.packed
    # Unbiased, as torch's running variance is.
    variance = squares / max(1, moments.values - 1)
    for name, new in (("running_mean", mean), ("running_var", variance)):
        old = getattr(layer, name)
        values[name] = (old.to(new.dtype) * (1 - factor) + new * factor).to(old.dtype)
    return [(layer._buffers, name, value) for name, value in values.items()]
