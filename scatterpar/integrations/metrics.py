"""Metrics of torchmetrics in a module that is replicated.

Each call of a step function updates empty copies of the metrics. Afterwards the states of the
copies are merged into the module's own metrics, in the order of the rows.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from scatterpar.batch import nested

ABSENT = nn.Identity()  # takes the place of each metric while the module is replicated


def metrics_of(module: nn.Module) -> dict[str, Any]:
    """The outermost metrics and collections of metrics in ``module``, by path."""
    by_path: dict[str, Any] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        is_inside = any(path.startswith(f"{outer}.") for outer in by_path)
        if isinstance(child, (Metric, MetricCollection)) and not is_inside:
            by_path[path] = child
    return by_path


def single(metrics: Mapping[str, Any]) -> dict[str, Metric]:
    """All single metrics by path, including those in collections and in other metrics."""
    return {
        path: metric
        for prefix, one in metrics.items()
        for path, metric in one.named_modules(prefix=prefix)
        if isinstance(metric, Metric)
    }


@contextlib.contextmanager
def placed(module: nn.Module, metrics: Mapping[str, Any]) -> Iterator[None]:
    """In the body, ``module`` has ``metrics`` at their paths, instead of what is there."""
    before = {path: module.get_submodule(path) for path in metrics}
    for path, metric in metrics.items():
        module.set_submodule(path, metric)
    try:
        yield
    finally:
        for path, metric in before.items():
            module.set_submodule(path, metric)


def emptied(metric: Any) -> Any:
    """A copy of ``metric`` without state, which may be large and is not copied."""
    memo: dict[int, Any] = {}
    for one in single({"": metric}).values():
        states = [getattr(one, name) for name in one._defaults]
        memo |= {id(value): [] for value in states if isinstance(value, list)}
        memo |= {id(value): None for value in (one._forward_cache, one._computed)}
    copied = copy.deepcopy(metric, memo)
    copied.reset()
    return copied


def updated(metrics: Mapping[str, Any]) -> dict[str, Metric]:
    """The single metrics that were updated, by path."""
    for one in metrics.values():
        for part in one.modules():
            if isinstance(part, MetricCollection):  # gives all members of a group the shared state
                part.values(copy_state=False)
    return {path: metric for path, metric in single(metrics).items() if metric._update_count}


def merge(metric: Metric, copies: Sequence[Metric], device: torch.device) -> None:
    """Merge the states of ``copies`` into ``metric``, and set its value for the step from them.

    Raises:
        ValueError: a state that torchmetrics cannot merge.
    """
    step = emptied(metric)
    for copied in copies:
        for name, value in copied.metric_state.items():
            if metric._reductions[name] is None and isinstance(value, Tensor):
                raise ValueError(
                    f"the state {name!r} of {type(metric).__name__} cannot be merged with another; "
                    f"return predictions and targets, and update it in on_train_batch_end"
                )
        states = nested.map_tensors(lambda t: t.detach().to(device), copied.metric_state)
        for target in (metric, step):
            before = target.metric_state
            for name, value in states.items():
                setattr(target, name, value)
            target._update_count += copied._update_count
            target._reduce_states(before)  # the earlier state comes first, then the copy's
            target._computed = None
    if any(copied._forward_cache is not None for copied in copies):
        metric._forward_cache = step.compute()
