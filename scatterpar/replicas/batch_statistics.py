"""buffers="batch": running statistics of batch normalisation are updated once per step.

With sub-steps they would be updated at each sub-step, from few rows. Here they are
updated from all rows of the step. Replicas record the statistics of each call and leave
the running ones unchanged; at the end of the step the records are pooled. Only the
first computation of a call is recorded, not its recomputation in a backward pass
(activation checkpointing). After torchgpipe's DeferredBatchNorm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scatterpar.devices.coalescing import iter_copies
from scatterpar.devices.transfers import Transfers, to_numbers
from scatterpar.replicas.buffers import RUNNING, BufferValue
from scatterpar.replicas.replicas import Records, Replica, ReplicaSet
from scatterpar.torch_private import current_graph_task

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Moments(NamedTuple):
    """Per channel: the number of values, their mean, and their unbiased variance."""

    values: int
    mean: Tensor
    variance: Tensor


class StepStatistics(NamedTuple):
    """The statistics of a step: of each layer that is updated once per step, if it was
    called.
    """

    layers: Sequence[tuple[Any, Moments | None]]

    def values(self) -> list[BufferValue]:
        """The running statistics that torch would compute in one call with all rows."""
        called = [
            _running_stats_after(module, each) for module, each in self.layers if each
        ]
        return [*chain(*called)]

    def to_pool(self) -> list[Tensor]:
        """One tensor of counts, then each layer's mean and variance; empty without
        layers.
        """
        counts, both = list[int](), list[Tensor]()
        for module, moments in self.layers:
            like = module.running_mean
            nothing = torch.zeros_like(
                like, dtype=torch.promote_types(like.dtype, torch.float32)
            )
            values, *tensors = moments or Moments(0, nothing, nothing)
            counts.append(values)
            both += tensors
        return [torch.tensor(counts, device=both[0].device), *both] if both else []

    def pooled(self, rows: Sequence[Sequence[Tensor]]) -> StepStatistics:
        """The statistics of all ranks; ``rows`` has, for each tensor of ``to_pool``,
        all ranks'.
        """
        by_layer: list[list[Moments]] = [[] for _ in self.layers]
        for counts, *both in zip(*rows, strict=True):
            for k, count in enumerate(to_numbers(counts)):
                if count:
                    by_layer[k].append(Moments(count, *both[2 * k : 2 * k + 2]))
        pairs = zip(self.layers, by_layer, strict=True)
        return StepStatistics([(module, _pooled(each)) for (module, _), each in pairs])


def record(modules: Iterable[nn.Module]) -> Records:
    """Install hooks that record each call's moments, by number of the batch
    normalisation.
    """
    layers = {
        m: module for m, module in enumerate(modules) if isinstance(module, _KINDS)
    }
    records: Records = {m: [] for m in layers}
    for m, module in layers.items():
        call = _MomentsRecorder(m, records)
        module.register_forward_pre_hook(call.begin)
        module.register_forward_hook(call.end, with_kwargs=True)
    return records


def of_step(
    replica_sets: Sequence[ReplicaSet], active: int, transfers: Transfers
) -> StepStatistics:
    """The pooled statistics of the first ``active`` replicas, on the master."""
    layers = []
    for each in replica_sets:
        replicas = each.replicas[:active]
        recorded = [
            _moments_of(replica, replicas[0].device, transfers) for replica in replicas
        ]
        for m in replicas[0].records:
            module: Any = each.modules[m]
            if module.running_mean is not None:
                moments = [of_replica[m] for of_replica in recorded if m in of_replica]
                layers.append((module, _pooled(moments)))
    return StepStatistics(layers)


def _moments_of(
    replica: Replica, device: torch.device, transfers: Transfers
) -> dict[int, Moments]:
    """The statistics that one replica recorded, by number of the module,
    on ``device``.
    """
    recorded = {
        m: each for m, calls in replica.records.items() if (each := _pooled(calls))
    }
    if replica.device == device:
        return recorded
    tensors = {
        (m, i): t for m, moments in recorded.items() for i, t in enumerate(moments[1:])
    }
    moved = dict(
        chain(*map(dict.items, iter_copies(tensors, device, transfers, "reduce")))
    )
    return {
        m: Moments(moments.values, moved[m, 0], moved[m, 1])
        for m, moments in recorded.items()
    }


class _MomentsRecorder:
    """Hooks around the calls of one batch normalisation, of any class.

    In a call the running statistics are zero and the momentum is 1. So the kernel
    writes the statistics of the batch to them, which it computes anyway.
    """

    def __init__(self, number: int, records: Records) -> None:
        self._number, self._records = number, records
        self._running: tuple[Any, ...] | None = None

    def begin(self, module: Any, _: object) -> None:
        buffers = module._buffers
        saved = [buffers.get(name) for name in RUNNING[:2]]
        tracks = module.training and module.track_running_stats and saved[0] is not None
        self._running = (*saved, module.momentum) if tracks else None
        if tracks:
            buffers.update(zip(RUNNING, map(torch.zeros_like, saved), strict=False))
            vars(module)["momentum"] = 1.0

    def end(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: object
    ) -> None:
        if self._running is None:
            return
        buffers = module._buffers
        mean, variance = (buffers[name] for name in RUNNING[:2])
        buffers["running_mean"], buffers["running_var"], vars(module)["momentum"] = (
            self._running
        )
        # else a backward pass recomputes a recorded call
        if current_graph_task() == -1:
            (layer_input, *_) = (*args, *kwargs.values())
            values = layer_input.numel() // layer_input.size(1)
            self._records[self._number].append(Moments(values, mean, variance))


def _pooled(recorded: Sequence[Moments]) -> Moments | None:
    """The moments of all values together; ``None`` if there are none."""
    if not recorded:
        return None
    counts, means, variances = (list(each) for each in zip(*recorded, strict=True))
    dtype = torch.promote_types(means[0].dtype, torch.float32)
    means, variances = [t.to(dtype) for t in means], [t.to(dtype) for t in variances]
    if len(recorded) == 1:
        return Moments(counts[0], means[0], variances[0])
    total = sum(counts)
    mean = _sum(torch._foreach_mul(means, [count / total for count in counts]))
    deviations = torch._foreach_sub(means, [mean] * len(means))
    squares = torch._foreach_mul(deviations, deviations)
    between = torch._foreach_mul(squares, [float(count) for count in counts])
    within = torch._foreach_mul(variances, [count - 1.0 for count in counts])
    return Moments(total, mean, (_sum(between) + _sum(within)) / (total - 1))


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


@torch.no_grad()
def _running_stats_after(module: Any, moments: Moments) -> list[BufferValue]:
    """The running statistics that torch would compute in one call: container, name and
    value.
    """
    values, factor = {}, module.momentum
    tracked = module.num_batches_tracked
    if tracked is not None:
        values["num_batches_tracked"] = tracked + 1
    if factor is None:  # the mean of all batches; without a count torch uses 0
        factor = 0.0 if tracked is None else 1.0 / (to_numbers(tracked) + 1)
    for name, new in zip(RUNNING, moments[1:], strict=False):
        old = getattr(module, name)
        values[name] = (old.to(new.dtype) * (1 - factor) + new * factor).to(old.dtype)
    return [(module._buffers, name, value) for name, value in values.items()]
