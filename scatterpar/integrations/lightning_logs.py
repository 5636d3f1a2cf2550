"""What calls of a step function have logged and returned, as of one call."""

from __future__ import annotations

import contextlib
import copy
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from scatterpar.batch import nested
from scatterpar.batch.joining import join_rows
from scatterpar.devices.copies import to_device
from scatterpar.errors import Told, warn
from scatterpar.integrations.lightning_metrics import MetricPlace
from scatterpar.loops.modules import overridden, values_on_device
from scatterpar.verify.dropped_records import is_look

_REDUCTIONS: dict[Any, Any] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}


_CLOSE = 1e-2  # of logged values: rounding in half precision is smaller


class StepCall:
    """What one call of a step function left, without graphs.

    It is no dataclass, so that the engine takes it for one value.

    Attributes:
        first_row: the number of its first row.
        num_rows: the number of rows of its micro-batch.
        weight: the number of terms of its loss.
        output: what it returned, without the loss.
        logged: what it logged, with the options that Lightning made of those of
            ``self.log``, by the name and by how often the name had been logged before.
        places: where the metrics are that it updates, by their ``id``.
        metrics: the metrics that it has updated.
    """

    output: Any
    places: dict[int, MetricPlace]
    metrics: dict[MetricPlace, Metric]

    def __init__(self, first_row: int, num_rows: int) -> None:
        self.first_row = first_row
        self.num_rows = num_rows
        self.weight: float | Tensor = num_rows
        self.logged: dict[tuple[str, int], tuple[Any, dict[str, Any]]] = {}

    def note(self, name: str, value: Any, options: dict[str, Any]) -> None:
        """Note a value that the call logs, as the Trainer's results would get it."""
        if isinstance(value, Metric):
            value = self.places.get(id(value), value)
        # A step may log a name more than once: each time is a value of its own.
        times = sum(name == other for other, _ in self.logged)
        self.logged[name, times] = value, options


class _Log(NamedTuple):
    """The arguments with which a call has logged a value."""

    call: StepCall
    function: str
    name: str
    value: Any
    options: dict[str, Any]


# Dictionaries of the Trainer's, to which a read of metrics adds what it finds.
_WRITTEN_BY_READS = "_callback_metrics", "_logged_metrics", "_progress_bar_metrics"


class CallResults:
    """The results of the Trainer, as the calls of a step find them.

    ``self.log`` writes here. A call that reads the results, such as by
    ``trainer.callback_metrics``, finds what gradient accumulation would leave::

        call 0    self.log("loss", …)                  noted
        call 1    trainer.callback_metrics["loss"]     that of call 0
                  self.log("loss", …)                  noted
                  trainer.callback_metrics["loss"]     that of call 1

    The Trainer's own results get one value for the batch when the step has ended. A
    copy of them gets the values of the calls, when it is read and not before: values
    are on the devices of their replicas, which would wait for each other.

    Args:
        results: those of the Trainer, which stay as they are.
    """

    def __init__(self, results: Any) -> None:
        self._of_trainer = results
        self._copied: Any = None
        self._logs: list[_Log] = []  # that the copy does not have yet
        self._is_reset = False

    @contextlib.contextmanager
    def of_call(
        self, trainer: Any, call: StepCall, device: torch.device
    ) -> Iterator[None]:
        """In the body, ``call`` logs and reads here, on ``device``."""
        self._call = call
        self._device = device
        loop = trainer.fit_loop.epoch_loop
        connector = trainer._logger_connector
        values: dict[str, Any] = {"_current_fx": connector._current_fx}
        if is_look():  # reads write here, too
            for name in _WRITTEN_BY_READS:
                values[name] = dict(getattr(connector, name))
        with overridden(loop, _results=self), overridden(connector, **values):
            yield

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Note a value, in the place of ``log`` of the Trainer's results."""
        self._call.note(name, value, options)
        self._logs.append(_Log(self._call, fx, name, value, options))

    def reset(self, **options: Any) -> None:
        """Reset the copy, which the first call of an epoch does for its function.

        Later calls of its step do, too: they do not see the first one's.
        """
        if not self._is_reset:
            self._is_reset = True
            self._read().reset(**options)

    def _read(self) -> Any:
        """The copy, with all that calls have logged, on the present call's device."""
        if self._copied is None:
            self._copied = _copy_of(self._of_trainer)
        results = self._copied
        for log in self._logs:
            # Else the rows of the whole batch, which the Trainer has counted.
            results.batch_size = log.call.num_rows
            value = log.value
            if isinstance(value, Tensor):
                value = to_device(value, self._device)
            results.log(log.function, log.name, value, **log.options)
        self._logs.clear()
        for result in results.values():
            _move(result, self._device)
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read(), name)

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return repr(self._read())


def _copy_of(results: Any) -> Any:
    """A copy of the Trainer's results, to be written with other values."""
    copied = copy.copy(results)
    for key, result in results.items():
        copied[key] = copy.copy(result)
        # To move it to a device would move the user's metric.
        if not result.is_tensor:
            metric = copy.copy(result.value)
            for name in ("_buffers", "_defaults"):
                vars(metric)[name] = dict(vars(metric)[name])
            copied[key].value = metric
    return copied


def _move(result: Any, device: torch.device) -> None:
    """Move to ``device`` what a step function may read of a result."""
    if result.is_tensor:
        if result.value.device != device:
            result.to(device)
    elif isinstance(result._forward_cache, Tensor):
        result._forward_cache = to_device(result._forward_cache, device)


class _UnjoinedNumber:
    """A number that is not averaged, such as of right rows.

    Joined, it is an entry of a list: calls that return equal numbers by chance must not
    look like one call.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


def marked(atom: Any) -> Any:
    """An atom of a call's output, and marked if it is a number.

    A tensor of floats is averaged, and not marked.
    """
    is_tensor = isinstance(atom, Tensor)
    if is_tensor and not atom.ndim and not atom.is_floating_point():
        return _UnjoinedNumber(atom)
    return _UnjoinedNumber(atom) if isinstance(atom, Number) else atom


def unmarked(atom: Any) -> Any:
    """An atom without its mark."""
    return atom.value if isinstance(atom, _UnjoinedNumber) else atom


def _two_sets() -> tuple[set[Any], set[Any]]:
    return set(), set()


class _Logged(NamedTuple):
    """A value that a call has logged, with its options."""

    call: StepCall
    value: Any
    options: dict[str, Any]


class LoggedValues:
    """Logs the values of all calls of a step, once for the batch."""

    def __init__(self) -> None:
        # By the name of a logged value: numbers of rows, and batch_size=. Calls of
        # looks count too: they have other numbers of rows.
        self._seen: defaultdict[str, tuple[set[int], set[Any]]]
        self._seen = defaultdict(_two_sets)
        # Of a look: the call for all its rows, and those for parts of them.
        self._whole: StepCall | None = None
        self._parts: list[StepCall] = []
        self._told = Told()
        self._warnings: list[str] = []  # of a look, in which warnings are not shown

    def log(
        self,
        module: LightningModule,
        calls: Sequence[StepCall],
        metrics: Mapping[MetricPlace, Metric],
    ) -> None:
        """Log what calls have logged: metrics, and one value for all rows.

        Warns of values that a look has found to be no means.
        """
        for text in self._warnings:
            warn(text)
        self._warnings = []
        trainer: Any = module.trainer
        connector = trainer._logger_connector
        # Not by ``self.log`` of the user's module: it was called already.
        function = module._current_fx_name
        for (name, _), entries in _logged_by(calls).items():
            value = entries[-1].value
            options = dict(entries[-1].options)
            if isinstance(value, MetricPlace):
                options["metric_attribute"] = value.path
                value = metrics[value]
            elif isinstance(value, Tensor):
                # A single call's value is that of the batch, with the user's options.
                if len(entries) > 1:
                    value, options["batch_size"] = self._value_of(name, entries)
                value = to_device(value, module.device)
            if connector.should_reset_tensors(function):
                trainer._results.reset(metrics=False, fx=function)
            trainer._results.log(function, name, value, **options)
            connector._current_fx = function

    def note_sizes(self, call: StepCall) -> None:
        """Note ``batch_size=`` of what a call has logged, also of a look's call."""
        for (name, _), (_, options) in call.logged.items():
            rows, sizes = self._seen[name]
            rows.add(call.num_rows)
            sizes.add(options.get("batch_size"))

    def look(self, call: StepCall, *, is_whole: bool) -> None:
        """Note values of all rows of a look that those of its parts do not make."""
        if is_whole:
            self._whole = call
            self._parts = []
            return
        # A look may go on with other parts, of a part of the rows.
        self._parts.append(call)
        num_rows = sum(part.num_rows for part in self._parts)
        if self._whole is None or num_rows < self._whole.num_rows:
            return
        if num_rows == self._whole.num_rows:
            self._compare(self._whole, self._parts)
        self._whole = None

    def _compare(self, whole: StepCall, parts: Sequence[StepCall]) -> None:
        for key, entries in _logged_by(parts).items():
            name, _ = key
            expected, _ = whole.logged.get(key, (None, None))
            if not isinstance(expected, Tensor):
                continue
            value, _ = self._value_of(name, entries)
            expected = expected.to(value)
            is_mean = torch.isclose(value, expected, _CLOSE, _CLOSE, equal_nan=True)
            if is_mean or not self._told.mark(name):
                continue
            self._warnings.append(
                f"training_step logs {name!r} = {expected:.4g} for {whole.num_rows} "
                f"rows, and its calls for parts of them combine to {value:.4g}: it is "
                "no mean over rows. training_step is called once per micro-batch, and "
                "the Trainer logs the mean. To log the value of the batch, pass "
                'reduce_fx="sum" for a sum, or update a metric of torchmetrics'
            )

    def _value_of(
        self, name: str, entries: Sequence[_Logged]
    ) -> tuple[Tensor, int | None]:
        """The value for the whole batch of what calls logged, and the batch size."""
        last = entries[-1]
        device = last.value.device
        values = [entry.value.to(device) for entry in entries]
        size, weights = self._size_of(name, entries)
        reduction = last.options.get("reduce_fx")
        # torch.sum, "sum" and Python's sum mean the same
        reduce = _REDUCTIONS.get(getattr(reduction, "__name__", reduction))
        # A mean, or a function of the user's, of which a mean is expected.
        if reduce is None:
            return join_rows(values, 0, weights), size
        return reduce(torch.stack(values)), size

    def _size_of(
        self, name: str, entries: Sequence[_Logged]
    ) -> tuple[int | None, list[float]]:
        """The batch size of a value that calls have logged, and each call's weight.

        ``None`` if Lightning finds out itself. Else the calls tell what ``batch_size=``
        means::

            rows of the calls    2  2  2  4
            batch_size=          2  2  2  4    the call's terms: they are added
            batch_size=         12 12 12 12    a constant: that of the whole batch
        """
        rows: list[int] = []
        weights: list[float] = []
        sizes: list[Any] = []
        for entry in entries:
            rows.append(entry.call.num_rows)
            weights.append(float(entry.call.weight))
            sizes.append(entry.options.get("batch_size"))
        if None in sizes:
            return None, weights
        rows_seen, sizes_seen = self._seen[name]
        # Without calls of other sizes to compare with, a size that is the number of
        # rows is taken for len(batch).
        are_rows = sizes == rows and len(rows_seen) == 1
        if len(sizes_seen) == 1 and not are_rows:
            return sizes[0], weights
        return sum(sizes), list(map(float, sizes))


def _logged_by(calls: Sequence[StepCall]) -> dict[tuple[str, int], list[_Logged]]:
    """What calls have logged, by the name and by how often it had been logged."""
    logged: dict[tuple[str, int], list[_Logged]] = defaultdict(list)
    for call in calls:
        for key, (value, options) in call.logged.items():
            logged[key].append(_Logged(call, value, options))
    return logged


def joined_outputs(calls: Sequence[StepCall], home: torch.device) -> Any:
    """What calls returned beside their losses, with their rows joined."""
    outputs = []
    for call in calls:
        output = values_on_device(call.output, home)
        outputs.append(nested.map_atoms(marked, output))
    # Averages of outputs are weighted like the loss.
    weights = [float(call.weight) for call in calls]
    rows = [call.num_rows for call in calls]

    def joined(entries: list[Any]) -> Any:
        try:
            return join_rows(entries, 0, weights, rows, lists="if clear")
        except ValueError:  # such as tensors without rows
            return entries

    return {
        name: nested.map_atoms(unmarked, joined([output[name] for output in outputs]))
        for name in outputs[0]
    }


class Silent:
    """A logger of the Trainer, or an object of one, in a look: its methods do nothing.

    Methods that return something, by their name, and attributes are the logger's.
    """

    def __init__(self, target: Any) -> None:
        self._target = target

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance(self.logger, TensorBoardLogger)
        return type(self._target)

    def __call__(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if callable(value) and name.startswith(("get", "is_", "has_")):
            return value
        if value is None or isinstance(value, (bool, int, float, str, os.PathLike)):
            return value
        return Silent(value)
