"""The values of buffers after a step, and running statistics of batch normalisation.

With sub-steps, running statistics would be updated at each sub-step, from few rows. With
``buffers="batch"`` they are updated once per step, from all rows. Replicas record the statistics of
each call and leave the running ones unchanged; at the end of the step the records are pooled. Only
the first computation of a call is recorded, not its recomputation in a backward pass (activation
checkpointing). After torchgpipe's DeferredBatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scatterpar.devices.coalescing import copy_lists, grouped, is_unexpanded
from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.transfers import to_numbers
from scatterpar.torch_private import current_graph_task

Buffers = MutableMapping[str, "Tensor | None"]
BufferValue = tuple[Buffers, str, "Tensor | None"]  # where it is, its name, its value

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
RUNNING = ("running_mean", "running_var", "num_batches_tracked")


class ModuleBuffers(NamedTuple):
    """The buffers of a module, and the names of its non-persistent buffers."""

    buffers: Buffers
    non_persistent: set[str]


def buffers_of(module: nn.Module) -> ModuleBuffers:
    """The containers in which ``module`` registers buffers: to read and to write."""
    return ModuleBuffers(module._buffers, module._non_persistent_buffers_set)


def values_after(
    modules: Sequence[ModuleBuffers], copies: Sequence[ModuleBuffers], copy_of: Callable[[Any], Any]
) -> Iterator[tuple[int, Buffers, str, Tensor | None]]:
    """Yield (module's number, its buffers, name, value in the copy) for each buffer.

    ``copy_of`` returns the copy of a tensor before the forward pass. Raises ``ValueError`` if a
    forward pass registered or deleted buffers.
    """
    yielded: set[int] = set()  # one tensor may be a buffer under several names
    for m, (module, copy) in enumerate(zip(modules, copies, strict=True)):
        names = module.buffers.keys() ^ copy.buffers.keys()
        names |= module.non_persistent ^ copy.non_persistent
        if names:
            raise ValueError(
                f"the forward pass registers or deletes buffers ({', '.join(sorted(names))}), on "
                f"each replica separately: nothing was changed; register them in __init__, or call "
                f"the module once on one micro-batch before the first step"
            )
        for name, value in copy.buffers.items():
            before = module.buffers[name]
            if value is None or value is not copy_of(before):
                yield m, module.buffers, name, value
            elif id(before) not in yielded:
                yielded.add(id(before))
                yield m, module.buffers, name, value


class BufferWriter:
    """Prepared writes of buffers, in place if possible.

    The constructor allocates, so that the call need not. Buffers that cannot be written in place,
    such as sparse ones, are replaced if they have changed.
    """

    def __init__(self, buffers: Iterable[BufferValue]) -> None:
        self.buffers = list(buffers)
        into: dict[int, tuple[Tensor, Tensor]] = {}
        self.replacements: list[BufferValue] = []
        for place, name, value in self.buffers:
            target = place.get(name)
            if value is target is None:
                continue
            if value is None or target is None or not _fits(target, value):
                self.replacements.append((place, name, value if value is None else value.detach()))
                continue
            # One tensor under two names that got two values.
            if into.get(id(target), (target, value))[1] is not value:
                self.replacements.append((place, name, value.detach()))
            elif _can_be_written(target):
                into[id(target)] = target, value
            elif not same_bits(target, value):
                self.replacements.append((place, name, value.detach().clone()))
        self._pairs = grouped(
            [target for target, _ in into.values()], [v for _, v in into.values()]
        )

    def __call__(self) -> None:
        """Write the buffers."""
        with torch.no_grad():
            copy_lists(self._pairs)
        for place, name, value in self.replacements:
            place[name] = value


@dataclass(frozen=True)
class BufferPolicy:
    """How the replicas' buffers become the master's: the engine's ``buffers=``.

    Attributes:
        name: the value that the user passed.
        combine: combines the replicas' values of a floating-point buffer, given the replicas'
            weights. ``None``: buffers are those of replica 0.
        pools_batch_norms: running statistics of batch normalisation are updated once per step.
    """

    name: str
    combine: Callable[[Sequence[Tensor], Sequence[float]], Tensor] | None = None
    pools_batch_norms: bool = False

    @classmethod
    def named(cls, name: Any) -> BufferPolicy:
        """The policy that ``buffers=name`` asks for. Raises ``ValueError`` if there is none."""
        policies = cls("master"), cls("mean", combine=mean_of), cls("batch", pools_batch_norms=True)
        for policy in policies:
            if policy.name == name:
                return policy
        raise ValueError(f'buffers must be "master", "mean" or "batch", got {name!r}')


def _can_be_written(tensor: Tensor) -> bool:
    """Whether a tensor is dense, not expanded, and was not made in inference mode."""
    if tensor.layout != torch.strided:
        return False
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return False
    return is_unexpanded(tensor)


def _fits(target: Tensor, value: Tensor) -> bool:
    return (target.shape, target.dtype, target.layout) == (value.shape, value.dtype, value.layout)


def mean_of(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean: exactly the common value if all are equal, also if it is infinite."""
    first, mean = values[0], values[0].clone()
    for value, weight in zip(values[1:], weights[1:], strict=True):
        mean += torch.where(value == first, 0, value - first) * weight
    return mean


class Moments(NamedTuple):
    """Per channel: the number of values, their mean, and their unbiased variance."""

    values: int
    mean: Tensor
    variance: Tensor


RecordedMoments = dict[int, list[Moments]]  # of each call of a module, by its number


class BatchNormUpdate(NamedTuple):
    """A batch normalisation of the user's module, and its statistics of a step, if called."""

    buffers: Buffers
    momentum: float | None
    moments: Moments | None


def batch_norms(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """The batch normalisations among the modules, by number."""
    return {m: module for m, module in enumerate(modules) if isinstance(module, _KINDS)}


def record_moments(copies: Mapping[int, Any]) -> RecordedMoments:
    """Install hooks on batch normalisations; they add the moments of each call to the result."""
    seen: RecordedMoments = {m: [] for m in copies}
    for m, module in copies.items():
        call = _MomentsRecorder(m, seen)
        module.register_forward_pre_hook(call.begin)
        module.register_forward_hook(call.end, with_kwargs=True)
    return seen


class _MomentsRecorder:
    """Hooks around the calls of one batch normalisation, of any class.

    In a call the running statistics are zero and the momentum is 1. So the kernel writes the
    statistics of the batch to them, which it computes anyway.
    """

    def __init__(self, number: int, seen: RecordedMoments) -> None:
        self._number, self._seen = number, seen
        self._running: tuple[Any, ...] | None = None

    def begin(self, module: Any, _: object) -> None:
        buffers = module._buffers
        saved = [buffers.get(name) for name in RUNNING[:2]]
        tracks = module.training and module.track_running_stats and saved[0] is not None
        self._running = (*saved, module.momentum) if tracks else None
        if tracks:
            buffers.update(zip(RUNNING, map(torch.zeros_like, saved), strict=False))
            vars(module)["momentum"] = 1.0

    def end(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: object) -> None:
        if self._running is None:
            return
        buffers = module._buffers
        mean, variance = (buffers[name] for name in RUNNING[:2])
        buffers["running_mean"], buffers["running_var"], vars(module)["momentum"] = self._running
        if current_graph_task() == -1:  # else a backward pass recomputes a recorded call
            (layer_input, *_) = (*args, *kwargs.values())
            values = layer_input.numel() // layer_input.size(1)
            self._seen[self._number].append(Moments(values, mean, variance))


def pooled(moments: Sequence[Moments | None]) -> Moments | None:
    """The moments of all values together; ``None`` if there are none."""
    recorded = [moment for moment in moments if moment is not None]
    if not recorded:
        return None
    dtype = torch.promote_types(recorded[0].mean.dtype, torch.float32)
    counts = [moment.values for moment in recorded]
    means = [moment.mean.to(dtype) for moment in recorded]
    variances = [moment.variance.to(dtype) for moment in recorded]
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
def running_stats_after(layer: BatchNormUpdate) -> list[tuple[Buffers, str, Tensor]]:
    """The running statistics that torch would compute in one call: container, name and value."""
    if layer.moments is None:
        return []
    values = {}
    factor: Any = layer.momentum
    tracked = layer.buffers.get("num_batches_tracked")
    if tracked is not None:
        values["num_batches_tracked"] = tracked + 1
    if factor is None:  # the mean of all batches; without a count torch uses 0
        factor = 0.0 if tracked is None else 1.0 / (to_numbers(tracked) + 1)
    for name, new in zip(RUNNING, layer.moments[1:], strict=False):
        old = layer.buffers[name]
        assert old is not None
        values[name] = (old.to(new.dtype) * (1 - factor) + new * factor).to(old.dtype)
    return [(layer.buffers, name, value) for name, value in values.items()]
