"""Metrics of torchmetrics: each call updates empty copies, whose states are merged in
row order.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from scatterpar.batch import nested
from scatterpar.loops.evaluation import brought_home
from scatterpar.loops.modules import overridden


class MetricPlace(NamedTuple):
    """Where a single metric is: the place of the outermost one, and the path in it."""

    outer: str
    inner: str

    @property
    def path(self) -> str:
        """The path of the metric in the LightningModule."""
        return f"{self.outer}.{self.inner}".removesuffix(".")


_METRICS = (Metric, MetricCollection)


def metrics_of(module: nn.Module) -> dict[str, Any]:
    """The outermost metrics and collections of metrics in ``module``, by their path,
    such as ``"head.accuracy"``.
    """
    metrics: dict[str, Any] = {}
    prefixes: tuple[str, ...] = ()
    # A module comes before the modules in it. A metric with two names has two paths,
    # and a stand-in has to be at both.
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, _METRICS) and not path.startswith(prefixes):
            metrics[path] = part
            prefixes += (f"{path}.",)
    return metrics


def single_metrics(metrics: Mapping[Any, Any]) -> dict[MetricPlace, Metric]:
    """All single metrics, including those in collections and in other metrics."""
    single = {}
    for outer, metric in metrics.items():
        for inner, part in metric.named_modules():
            if isinstance(part, Metric):
                single[MetricPlace(outer, inner)] = part
    return single


@contextlib.contextmanager
def placed(module: nn.Module, metrics: Mapping[str, Any]) -> Iterator[None]:
    """In the body, ``module`` has ``metrics`` at their paths.

    Afterwards it has what was there before.
    """
    before = {}
    for path, metric in metrics.items():
        before[path] = module.get_submodule(path)
        module.set_submodule(path, metric)
    try:
        yield
    finally:
        for path, metric in before.items():
            module.set_submodule(path, metric)


@contextlib.contextmanager
def updated_at_home(
    metrics: Mapping[Any, Any], device: torch.device, home: torch.device
) -> Iterator[None]:
    """In the body, metrics on ``home`` are updated with values of ``device``."""
    with contextlib.ExitStack() as stack:
        for metric in single_metrics(metrics).values():
            # Their states stay, because lists of what they have seen may be long.
            update = partial(called_at_home, metric.update, device, home)
            stack.enter_context(overridden(metric, update=update))
        yield


def called_at_home(
    function: Callable[..., None],
    device: torch.device,
    home: torch.device,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Call ``function`` with the values of ``device`` on ``home``."""
    arguments, options = brought_home((args, kwargs), device, home)
    function(*arguments, **options)


def emptied(metric: Any) -> Any:
    """A copy of ``metric`` without state, which may be large and is not copied."""
    # What deepcopy takes for the copy of an object, by the object's id.
    memo: dict[int, Any] = {}
    for single in single_metrics({"": metric}).values():
        for name in single._defaults:
            state = getattr(single, name)
            if isinstance(state, list):  # such as all predictions so far
                memo[id(state)] = []
        # values of the last batch and of all
        memo[id(single._forward_cache)] = None
        memo[id(single._computed)] = None
    # A reset sets the defaults, which deepcopy has copied.
    copied = copy.deepcopy(metric, memo)
    copied.reset()
    return copied


def all_emptied(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of ``metrics`` without states."""
    return {place: emptied(metric) for place, metric in metrics.items()}


def updated(metrics: Mapping[Any, Any]) -> dict[MetricPlace, Metric]:
    """The single metrics that were updated, by their places."""
    for part in nn.ModuleList(metrics.values()).modules():
        # gives all members of a group the shared state
        if isinstance(part, MetricCollection):
            part.values(copy_state=False)
    single = single_metrics(metrics)
    return {place: metric for place, metric in single.items() if metric._update_count}


def merge(metric: Metric, copies: Sequence[Metric], device: torch.device) -> None:
    """Merge states of ``copies`` into ``metric``, in their order.

    Raises:
        ValueError: torchmetrics cannot merge a state.
    """
    # For the value of the step: with the copies' states alone.
    of_step = emptied(metric)
    for copied in copies:
        _check_states(metric, copied)
        # A state's graph leads to the replica's activations.
        states = nested.map_tensors(
            lambda tensor: tensor.detach().to(device), copied.metric_state
        )
        for target in (metric, of_step):
            before = target.metric_state
            for name, value in states.items():
                setattr(target, name, value)
            target._update_count += copied._update_count
            # the earlier state comes first, then the copy's
            target._reduce_states(before)
            target._computed = None
    if any(copied._forward_cache is not None for copied in copies):
        metric._forward_cache = of_step.compute()


def _check_states(metric: Metric, copied: Metric) -> None:
    """Raise ``ValueError`` if a state of ``copied`` cannot be merged into another."""
    for name, value in copied.metric_state.items():
        if metric._reductions[name] is None and isinstance(value, Tensor):
            raise ValueError(
                f"the state {name!r} of {type(metric).__name__} cannot be merged with "
                "another; return predictions and targets, and update it in "
                "on_train_batch_end"
            )
