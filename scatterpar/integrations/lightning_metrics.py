"""Metrics of torchmetrics in the calls of a step function.

::

    a metric that calls update         each call updates an empty copy; their states are
                                       merged in row order
    another, such as one that calls    the user's own, on the device of the call; the
    compute or reset                   next call finds what this one has left

Copies let devices compute without waiting for each other. A look shows which metrics
calls only update.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, SumMetric
from torchmetrics.utilities import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_min,
    dim_zero_sum,
)

from scatterpar.batch import nested
from scatterpar.batch.nested import MAX_ENTRIES, PLAIN
from scatterpar.devices.write_counters import version
from scatterpar.loops.evaluation import brought_home
from scatterpar.loops.modules import overridden
from scatterpar.objects.references import is_array
from scatterpar.verify.dropped_records import is_look


class MetricPlace(NamedTuple):
    """Where a single metric is: the place of the outermost one, and the path in it."""

    outer: str
    inner: str

    @property
    def path(self) -> str:
        """The path of the metric in the LightningModule."""
        return f"{self.outer}.{self.inner}".removesuffix(".")


_METRICS = (Metric, MetricCollection)
# Of two states. A mean needs the number of updates of both.
_MERGED = {None, dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum}
# In the place of a metric, in the module that is replicated.
NO_METRIC = nn.Identity()
_METHODS = ("update", "forward", "compute", "reset")
_DEPTH = 3  # of containers in attributes; an item of a dict is one
# Attributes of any metric, which are no values of the user's.
_OF_ALL_METRICS = frozenset(vars(SumMetric())).union(_METHODS)


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

    Afterwards it has what was there before, unless the body has replaced or deleted it.
    """
    metrics = dict(metrics)  # which a call may change
    before = {path: _part_at(path, module) for path in metrics}
    for path, metric in metrics.items():
        module.set_submodule(path, metric)
    try:
        yield
    finally:
        for path, metric in before.items():
            if _part_at(path, module) is metrics[path]:
                module.set_submodule(path, metric)


def _part_at(path: str, module: nn.Module) -> Any:
    """The module at ``path``, if there is one."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


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
        # Of the last batch and of all. A plain number may be an attribute, too.
        for value in (single._forward_cache, single._computed):
            if type(value) not in PLAIN:
                memo[id(value)] = None
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
    """Merge states of ``copies`` into ``metric``, in their order."""
    if not copies:
        return
    # For the value of the step: with the copies' states alone.
    of_step = emptied(metric)
    for copied in copies:
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


def is_mergeable(metric: Any) -> bool:
    """Whether states of copies that are updated apart make those of ``metric``."""
    for single in single_metrics({"": metric}).values():
        # Else an update reads the state, or the class does not say.
        if single.full_state_update is not False:
            return False
        for name, reduction in single._reductions.items():
            default = single._defaults[name]
            is_list = isinstance(default, list)
            if reduction not in _MERGED or (reduction is None and not is_list):
                return False
            # Each copy begins with it.
            if reduction is dim_zero_sum and not is_list and default.any():
                return False
    return True


class CallMetrics:
    """The metrics that a call finds.

    Attributes:
        copies: those that the call may only update, by the path of the outermost one.
        single: the single ones, by their places.
        places: where these are, by their ``id``.
        updated: the copies that the call has updated, afterwards.
    """

    updated: dict[MetricPlace, Metric]

    def __init__(self, copies: dict[str, Any]) -> None:
        self.copies = copies
        self.single = single_metrics(copies)
        self.places = {id(metric): place for place, metric in self.single.items()}
        self._is_in_forward = False
        # Before the call: what attributes hold, and the values, whose ``id`` no other
        # value may get.
        self._before: dict[MetricPlace, dict[str, Any]] = {}
        self._values: list[Any] = []
        for place, metric in self.single.items():
            self._before[place] = _attributes_beside_states(metric)
            self._values += [*vars(metric).values(), *metric._buffers.values()]

    def changed_attributes(self, place: MetricPlace) -> list[str]:
        """The names of attributes that are no states and that the call has changed."""
        before = self._before[place]
        present = _attributes_beside_states(self.single[place])
        return [
            name
            for name, contents in present.items()
            if name not in before or before[name] != contents
        ]

    @contextlib.contextmanager
    def watched(self, take_over: Callable[[str], None]) -> Iterator[None]:
        """In the body, ``take_over`` is called with the path of each copy of which the
        call asks more than an update, or the value of one.
        """
        with contextlib.ExitStack() as stack:
            for place, metric in self.single.items():
                methods = {"forward": partial(self._forward, metric.forward)}
                for name in ("compute", "reset"):
                    method = getattr(metric, name)
                    methods[name] = partial(self._ask, take_over, place, metric, method)
                stack.enter_context(overridden(metric, **methods))
            yield
            for place in self.single:
                is_copy = place.outer in self.copies
                if is_copy and self.changed_attributes(place):
                    take_over(place.outer)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` of a copy, which computes and resets by itself."""
        before = self._is_in_forward
        self._is_in_forward = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._is_in_forward = before

    def _ask(
        self,
        take_over: Callable[[str], None],
        place: MetricPlace,
        metric: Metric,
        method: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a method of a copy, or of the user's metric that takes over."""
        if not self._is_in_forward and place.outer in self.copies:
            take_over(place.outer)
        if place.outer not in self.copies:
            method = vars(metric)[method.__name__]
        return method(*args, **kwargs)


class StepMetrics:
    """The metrics of a module, of which the calls of a step get copies.

    Attributes:
        metrics: the outermost ones of the user's, by path.
    """

    def __init__(self) -> None:
        self.metrics: Mapping[str, Any] = {}
        self._empty: dict[str, Any] = {}  # copies without states, to be copied
        # By ``id``: those of which calls ask more than to update them.
        self._asked: set[int] = set()
        # By ``id``: metrics, and whether states of copies make theirs.
        self._mergeable: dict[int, tuple[Any, bool]] = {}
        # The copies that calls of the step have updated, in order.
        self._updated: list[dict[MetricPlace, Metric]] = []

    def begin_step(self, metrics: Mapping[str, Any], home: torch.device) -> None:
        """The next calls are those of a step; the user's metrics are on ``home``."""
        self.metrics = metrics
        self._home = home
        self._empty = all_emptied(metrics)
        for metric in metrics.values():
            if id(metric) not in self._mergeable:
                self._mergeable[id(metric)] = metric, is_mergeable(metric)

    def end_step(self) -> None:
        """Drop the copies, which have states on all devices."""
        self._updated.clear()

    def _of_user(self) -> dict[str, Any]:
        """The metrics that calls of the step get themselves, by path."""
        metrics: dict[str, Any] = {}
        for path, metric in self.metrics.items():
            _, has_copies = self._mergeable[id(metric)]
            if id(metric) in self._asked or not has_copies:
                metrics[path] = metric
        return metrics

    @contextlib.contextmanager
    def of_call(
        self, module: nn.Module, device: torch.device, *, is_first: bool
    ) -> Iterator[CallMetrics]:
        """In the body a call on ``device`` finds metrics in ``module``."""
        # A look leaves the user's as they are.
        of_user = {} if is_look() else self._of_user()
        copies = {}
        for path in self._empty.keys() - of_user.keys():
            copies[path] = emptied(self._empty[path]).to(device)
        # An earlier call may have replaced some.
        for placed_metrics in (of_user, copies):
            for path in [*placed_metrics]:
                if _part_at(path, module) is not NO_METRIC:
                    del placed_metrics[path]
        call = CallMetrics(copies)
        if is_first:  # of a step, or of another try at it
            self._updated.clear()
        with contextlib.ExitStack() as stack:
            self._place(of_user, module, device, stack)

            def take_over(path: str) -> None:
                self._asked.add(id(self.metrics[path]))
                if not is_look():
                    metric = self._take_over(path, call)
                    self._place({path: metric}, module, device, stack)
                    # Lightning finds the names of metrics by their ``id``.
                    vars(module)["_metric_attributes"] = None

            stack.enter_context(placed(module, copies))
            stack.enter_context(call.watched(take_over))
            yield call
        # Not in a finally: what a failed call has measured is dropped.
        call.updated = updated(call.copies)
        for metric in call.updated.values():
            _detach(metric)
        if not is_look():
            self._updated.append(call.updated)

    def _place(
        self,
        metrics: Mapping[str, Any],
        module: nn.Module,
        device: torch.device,
        stack: contextlib.ExitStack,
    ) -> None:
        """Until ``stack`` ends, ``module`` has the user's metrics, on ``device``."""
        stack.enter_context(placed(module, metrics))
        if device == self._home:
            return
        for metric in metrics.values():
            stack.callback(metric.to, self._home)
            metric.to(device)

    def _take_over(self, path: str, call: CallMetrics) -> Any:
        """Merge what calls so far have measured into the user's metric, which the
        methods of the present call's copy are from now on. Returns the metric.
        """
        metric = self.metrics[path]
        copied = call.copies.pop(path)
        of_calls = [*self._updated, updated({path: copied})]
        for place, single in single_metrics({path: metric}).items():
            states = [of_call.pop(place) for of_call in of_calls if place in of_call]
            merge(single, states, self._home)
            copied_single = call.single[place]
            # Not all attributes: one may be a method of the copy's.
            for name in call.changed_attributes(place):
                setattr(single, name, getattr(copied_single, name))
            for name in _METHODS:
                vars(copied_single)[name] = getattr(single, name)
        return metric


def _detach(metric: Metric) -> None:
    """Drop the graphs of states, which lead to a replica's activations."""
    for name, value in metric.metric_state.items():
        setattr(metric, name, nested.map_tensors(Tensor.detach, value))
    metric._forward_cache = nested.map_tensors(Tensor.detach, metric._forward_cache)


def _attributes_beside_states(metric: Metric) -> dict[str, Any]:
    """What attributes and buffers that are no states hold."""
    contents: dict[str, Any] = {}
    for name, value in [*vars(metric).items(), *metric._buffers.items()]:
        if name not in _OF_ALL_METRICS and name not in metric._defaults:
            contents[name] = _contents_of(value, _DEPTH)
    return contents


def _contents_of(value: Any, depth: int) -> Any:
    """What is equal as long as nobody has replaced or written ``value``."""
    kind: Any = type(value)
    if isinstance(value, Tensor):
        return id(value), version(value)
    if is_array(kind):
        return id(value), value.tobytes()
    if kind in PLAIN:
        return value
    entries: Any = value.items() if isinstance(value, dict) else value
    is_container = isinstance(value, (dict, list, tuple, set, deque))
    # Longer ones are data.
    if not (is_container and depth and len(value) <= MAX_ENTRIES):
        return id(value)
    return [_contents_of(entry, depth - 1) for entry in entries]
