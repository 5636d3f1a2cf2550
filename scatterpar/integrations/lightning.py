"""Lightning's ``Trainer`` on all devices of one process.

``training_step`` runs for every micro-batch, on a replica of the LightningModule. The
Trainer gets the loss of the whole batch, whose backward pass adds the gradient of the
whole batch. The Trainer does everything else: order of the hooks, optimizers,
schedules, callbacks, checkpoints.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, partialmethod
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from scatterpar.batch import nested
from scatterpar.batch.joining import join_rows
from scatterpar.batch.markers import Rows
from scatterpar.devices.device_ids import DeviceLike, physical, resolve
from scatterpar.engine import ScatterOnceParallel
from scatterpar.errors import warn
from scatterpar.integrations import kept, loop
from scatterpar.integrations.changes import (
    Change,
    KeptState,
    apply_changes,
    names_of,
    standing_in,
)
from scatterpar.integrations.elsewhere import explained
from scatterpar.integrations.evaluation import RowLooks, rows_of
from scatterpar.integrations.steps import FIRST
from scatterpar.integrations.turns import Turns
from scatterpar.step.request import Accum, Reduction

__all__ = ["ScatterOnceStrategy"]

# Attributes of every LightningModule: they are no state of the user's.
_OF_LIGHTNING = {*vars(LightningModule()), "log"}
_ELSEWHERE = "make it an attribute of the LightningModule, such as a buffer"
# Attributes of every Trainer whose names do not begin with "_", in Lightning 2.6.
_OF_TRAINER = {
    "accumulate_grad_batches",
    "barebones",
    "callbacks",
    "check_val_every_n_epoch",
    "datamodule",
    "enable_autolog_hparams",
    "fast_dev_run",
    "fit_loop",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_predict_batches",
    "limit_test_batches",
    "limit_train_batches",
    "limit_val_batches",
    "log_every_n_steps",
    "num_sanity_val_steps",
    "overfit_batches",
    "predict_loop",
    "profiler",
    "reload_dataloaders_every_n_epochs",
    "should_stop",
    "state",
    "test_loop",
    "val_check_batch",
    "val_check_interval",
    "validate_loop",
}
_REMEDIES = (
    "In Lightning pass ScatterOnceStrategy(…, count=lambda batch: …), the number of "
    "terms that the mean averages over in a batch, such as lambda batch: "
    'batch[1].ne(-100).sum() for labels of which some are ignored, or reduction="sum" '
    "for a sum. If it compares rows with each other, or is a ratio of sums, train it "
    "on one device with a strategy of Lightning's, or in a loop of your own with "
    "engine.loss(inputs, targets, criterion, whole_batch=True). "
    "verify=False does not check."
)
_NO_METRIC = nn.Identity()  # in the place of a metric, in the module that is replicated
_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_REDUCTIONS: dict[Any, Any] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}


class ScatterOnceStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Trains a LightningModule on all devices of one process, with the gradient of one
    device.

    For the ``Trainer`` of ``lightning.pytorch``, whose ``world_size`` is then 1. Each
    batch of the loader is divided among the replicas. Validation, test and prediction
    run on all replicas, too. The LightningModule must use automatic optimization, and
    needs no change.

    Args:
        device_ids: as in ``ScatterOnceParallel``, like ``accum``. By default the
            devices that ``devices=`` of the ``Trainer`` names.
        count: ``count(batch)`` returns the number of terms that the mean loss of
            ``training_step`` averages over in ``batch``. By default the number of rows.
        reduction: ``"sum"`` if ``training_step`` returns the sum of its terms.
        options: further arguments of ``ScatterOnceParallel``, such as
            ``buffers="batch"``.

    Raises:
        TypeError: ``count`` takes other arguments.
        ValueError: ``graphs=True``; at ``fit``, what does not work with this strategy:
            manual optimization, sharded parameters, ``sync_batchnorm=True``,
            ``num_nodes`` above 1, ``dataloader_iter``.
    """

    strategy_name = "scatter_once"

    def __init__(
        self,
        device_ids: Sequence[DeviceLike] | None = None,
        accum: Accum = 1,
        *,
        count: Callable[[Any], float | Tensor] | None = None,
        reduction: Reduction | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        loop.refuse(
            "ScatterOnceStrategy",
            {"graphs=True": options.get("graphs")},
            "it replays kernels without Python, and so without self.log; leave "
            "graphs out",
        )
        loop.refuse_whole_batch("ScatterOnceStrategy", options)
        loop.check_count(count, ["batch"], "batch[1]")
        # The Trainer sets this to the devices that its devices= names.
        self.parallel_devices: list[torch.device] | None = None
        self._device_ids = device_ids
        self._options = {"accum": accum, **options}
        self._count = count
        self._turns = Turns()
        self._row_looks = RowLooks()
        self._checks_rows = options.get("verify", True)
        # Places that calls set to different values. A warning has told of each.
        self._told: set[str] = set()
        # By the step function and the name of a logged value. Calls of looks count too:
        # they have other numbers of rows.
        self._sizes: defaultdict[tuple[str, str], _Sizes] = defaultdict(_Sizes)
        # The LightningModule's attributes after the last step.
        self._state: KeptState | None = None
        # Names of attributes that were changed, in or between steps.
        self._changed: set[str] = set()
        # The changed names without those that lead to modules, and with the names of
        # attributes that share objects with them.
        self._written: set[str] = set()
        # During a step: the values of the written attributes.
        self._absent: dict[str, Any] = {}
        # How losses combine, as options of the engine.
        self._combination: dict[str, Any] = {"reduction": reduction}
        if count is not None:
            self._combination["count"] = lambda inputs, _: count(inputs["batch"])
        self._engine: Any = None
        self._until_teardown = contextlib.ExitStack()

    @property
    def root_device(self) -> torch.device:
        """The device of the LightningModule: that of the first replica."""
        device_ids = resolve(self._device_ids or self.parallel_devices or ["cpu"])
        return physical(device_ids[0])

    def setup(self, trainer: Trainer) -> None:
        """Do what ``SingleDeviceStrategy`` does, and make the engine."""
        module: Any = self.lightning_module
        if trainer.training:
            _refuse(trainer, module)
            if "buffers" not in self._options:
                loop.warn_of_batch_norm(module)
        super().setup(trainer)
        if module._compiler_ctx:
            self._until_teardown.enter_context(_replicas_compiled(module))
        engine = ScatterOnceParallel(
            loop.Modules([module]),
            device_ids=self._device_ids or self.parallel_devices,
            **self._options,
        )
        engine.loop.remedies = _REMEDIES
        self._engine = self._until_teardown.enter_context(engine)
        # Once: a large model has hundreds of modules, and each call looks at these.
        self._user_parts = _user_parts(module)

    def teardown(self) -> None:
        """Close the engine, and do what ``SingleDeviceStrategy`` does."""
        self._until_teardown.close()
        self._engine = None
        super().teardown()

    def batch_to_device(
        self, batch: Any, device: Any = None, dataloader_idx: int = 0
    ) -> Any:
        """Run the hooks on batch transfer, but leave the batch on the host.

        The engine copies the rows of each replica to its device.
        """
        return super().batch_to_device(batch, torch.device("cpu"), dataloader_idx)

    def training_step(self, batch: Any, *arguments: Any, **_: Any) -> Any:
        """Compute the whole batch's loss, with ``training_step`` on the replicas."""
        step = "training_step"
        precision = self.precision_plugin
        options = dict(self._combination)
        options["scaler"] = getattr(precision, "scaler", None)
        options["return_outputs"] = itemgetter("call")
        inputs_of_step = self._inputs(step, batch, arguments)
        with precision.train_step_context(), inputs_of_step as inputs:
            loss, calls = self._engine.loss(inputs, **options)
        outputs = self._finish(step, nested.atoms(calls))
        outputs["loss"] = loss
        return outputs

    def _evaluate(self, step: str, batch: Any, *arguments: Any, **_: Any) -> Any:
        """Compute a batch of validation, test or prediction on the replicas."""
        num_rows = loop.num_rows(batch)
        with self.precision_plugin.forward_context(), torch.no_grad():
            if self._checks_rows and self._row_looks.is_due(step, num_rows):
                module = self.lightning_module
                attributes = kept.kept_attributes(module, _OF_LIGHTNING)
                results = partial(self._results_of, step, batch, arguments)
                with loop.undone(module, attributes.values()):
                    self._row_looks.look(step, num_rows, results)
            parts = None
            if step in self._row_looks.undivided:
                parts = [range(num_rows)]
            calls = self._calls_of(step, batch, arguments, parts)
        return self._finish(step, calls)

    def _calls_of(
        self,
        step: str,
        batch: Any,
        arguments: Sequence[Any],
        parts: Sequence[Sequence[int]] | None = None,
    ) -> list[_Call]:
        """The calls of ``step`` for a batch, or one for each of these ``parts``."""
        with self._inputs(step, batch, arguments) as inputs:
            if parts is not None:
                num_rows = loop.num_rows(batch)
                batches = [rows_of(inputs["batch"], part, num_rows) for part in parts]
                inputs["batch"] = Rows(batches, FIRST)
                inputs["rows"] = Rows(parts, FIRST)
            outputs = self._engine(inputs.pop("work"), **inputs)
        return nested.atoms(outputs["call"])

    def _results_of(
        self,
        step: str,
        batch: Any,
        arguments: Sequence[Any],
        parts: Sequence[Sequence[int]],
    ) -> Any:
        """What calls for ``parts`` of a batch returned, logged and measured.

        It is joined, as after a step. Buffers are as before.
        """
        module = self.lightning_module
        buffers = {buffer: buffer.clone() for buffer in module.buffers()}
        calls = self._calls_of(step, batch, arguments, parts)
        # The engine commits the buffers of replica 0, as for any forward pass.
        for buffer, values in buffers.items():
            buffer.copy_(values)
        logged = []
        for (name, _), entries in _logged_by(calls).items():
            if isinstance(entries[0].value, _Place):
                continue  # a metric, whose states are compared
            value, _ = self._value_of(name, entries)
            logged.append(value)
        states: list[Any] = []
        for place, metric in _single(_metrics_of(module)).items():
            merged = _emptied(metric)
            _merge(merged, _copies_at(place, calls), self.root_device)
            states += map(_joined_state, merged.metric_state.values())
        return [self._joined(calls, _none), logged, states]

    validation_step = partialmethod(_evaluate, "validation_step")
    test_step = partialmethod(_evaluate, "test_step")
    predict_step = partialmethod(_evaluate, "predict_step")

    @contextlib.contextmanager
    def _inputs(
        self, step: str, batch: Any, arguments: Sequence[Any]
    ) -> Iterator[dict[str, Any]]:
        """Yields the engine's inputs for the method ``step``.

        In the body the module has no metrics, and no attributes that are written.
        """
        module = self.lightning_module
        _refuse_unequal_loaders(module.trainer, batch)
        metrics = _metrics_of(module)
        no_metrics = dict.fromkeys(metrics, _NO_METRIC)
        attributes = kept.kept_attributes(module, _OF_LIGHTNING)
        function = getattr(type(module), step)
        inputs = {"work": self._call, "step": step, "arguments": list(arguments)}
        inputs["measures"] = _Metrics(metrics)
        inputs["batch"] = loop.as_rows(batch)
        inputs["rows"] = Rows(range(loop.num_rows(batch)))
        with (
            _placed(module, no_metrics),
            self._turns.in_step(self._engine, module, attributes, function),
            self._without_written(module),
        ):
            yield inputs

    @contextlib.contextmanager
    def _without_written(self, module: LightningModule) -> Iterator[None]:
        """In the body ``module`` has none of the attributes that are written.

        Calls get copies of the originals. If the module had them, replicas would be
        made again after each step that appends to a list.
        """
        if self._state is not None:  # hooks between steps write, too
            self._note_written(module, [self._state.changes()])
        if not self._turns.is_hooked:  # hooks on modules may lead to the attributes
            for name, value in kept.kept_attributes(module, _OF_LIGHTNING).items():
                if name in self._written:
                    self._absent[name] = value
        with loop.overridden(module, **dict.fromkeys(self._absent)):
            try:
                yield
            finally:
                self._absent = {}

    def _note_written(
        self, module: LightningModule, changes: Sequence[Sequence[Change]]
    ) -> None:
        """Note the names of attributes that were changed."""
        names = names_of(changes)
        if not names <= self._changed:
            self._changed |= names
            attributes = kept.kept_attributes(module, _OF_LIGHTNING)
            self._written = kept.with_shared(attributes, self._changed)

    def _finish(self, step: str, calls: Sequence[_Call]) -> Any:
        """Transfer to the module what calls of ``step`` left on replicas.

        Returns what the calls returned, joined.
        """
        module = self.lightning_module
        metrics = _single(_metrics_of(module))
        for place, metric in metrics.items():
            _merge(metric, _copies_at(place, calls), self.root_device)
        self._apply_changes(step, calls)
        # After the changes of the step: the next one finds those of hooks in between.
        self._state = KeptState(module, _OF_LIGHTNING)
        for call in calls:
            call.trainer.replay(module.trainer, self.root_device)
        # Metrics have been merged: the Trainer computes those that are logged.
        for (name, _), entries in _logged_by(calls).items():
            self._log(name, entries, metrics)
        return self._joined(calls)

    def _apply_changes(self, step: str, calls: Sequence[_Call]) -> None:
        """Add what calls of ``step`` added to the module, the Trainer and callbacks."""
        module = self.lightning_module
        device = self.root_device
        tell = partial(self._tell, step)
        changes = [call.changes for call in calls]
        apply_changes(module, changes, device, tell)
        self._note_written(module, changes)
        for call in calls:
            for place in call.new_in_parts:  # they stay on the replica
                tell(place)
        trainer_changes = [call.trainer.changes for call in calls]
        apply_changes(module.trainer, trainer_changes, device, tell, "self.trainer")
        user_objects: dict[int, Any] = {}
        for call in calls:
            for user_object, _ in call.trainer.objects:
                user_objects[id(user_object)] = user_object
        for user_object in user_objects.values():
            object_changes = [call.trainer.changes_of(user_object) for call in calls]
            name = type(user_object).__name__
            apply_changes(user_object, object_changes, device, tell, name)

    def _joined(
        self, calls: Sequence[_Call], unjoined: Callable[[list[Any]], Any] = list
    ) -> Any:
        """What calls returned beside their losses, with their rows joined.

        ``unjoined`` gives the value of entries that have no rows.
        """
        outputs = [loop.moved(call.output, self.root_device) for call in calls]
        weights = [float(call.weight) for call in calls]
        rows = [call.rows for call in calls]

        def joined(entries: list[Any]) -> Any:
            try:
                return join_rows(entries, 0, weights, rows, lists="if clear")
            except ValueError:  # such as tensors without rows
                return unjoined(entries)

        def is_atom(entries: Sequence[Any]) -> bool:
            return not isinstance(entries[0], Mapping)

        return nested.merge(joined, outputs, is_atom)

    def _tell(self, step: str, place: str) -> None:
        """Warn once that calls of ``step`` set ``place`` to different values."""
        if place in self._told:
            return
        self._told.add(place)
        warn(
            f"{step} sets {place} to another value for each micro-batch, so the "
            "module's stays as it was; return it, log it, append to a list, or add to "
            "a number"
        )

    def _call(
        self, work: Any, batch: Any, rows: Any, step: str, arguments: Any, measures: Any
    ) -> dict[str, Any]:
        """Call the method ``step`` of a replica for one micro-batch.

        Args:
            work: the replica's modules; the LightningModule is the first.
            batch: the micro-batch.
            rows: the numbers of its rows.
            step: the name of the method.
            arguments: those of the method after the batch.
            measures: the user's metrics, of which the call updates copies.

        Returns:
            The loss with its graph, and the ``_Call`` without graphs.
        """
        module: Any = work[0]
        device = _device_of(module)
        metrics = {}
        for place, metric in measures.by_place.items():
            metrics[place] = _emptied(metric).to(device)
        copies = kept.CallCopies(device, pinned=self._turns.pinned_in(module))
        trainer = _TrainerInCall(module.trainer, copies)
        log = _LogOfCall(module, metrics)
        attributes = {"log": log, "_device": device, "_trainer": trainer}
        call = _Call(step, len(rows))
        # The written attributes come back before they are copied.
        with (
            explained(device, _ELSEWHERE),
            loop.overridden(module, **self._absent),
            standing_in(module, _OF_LIGHTNING, copies, attributes, in_place=True),
            _placed(module, metrics),
        ):
            state = KeptState(module, _OF_LIGHTNING)
            output = getattr(module, step)(batch, *arguments)
            call.changes = state.changes()
        loss = None
        if step == "training_step":
            loss, output = _loss_and_rest(output)
        call.output = nested.map_tensors(Tensor.detach, output)
        if self._count:
            call.weight = self._count(batch)
        call.logged = log.values
        self._note_sizes(call)
        call.metrics = _updated(metrics)
        call.new_in_parts = _new_attributes(
            module, self.lightning_module, self._user_parts
        )
        trainer.end()
        call.trainer = trainer.calls
        return {"loss": loss, "call": call}

    def _note_sizes(self, call: _Call) -> None:
        """Note ``batch_size=`` of what a call has logged, also of a look's call."""
        for (name, _), (_, options) in call.logged.items():
            size = options.get("batch_size")
            if size is not None:
                self._sizes[call.step, name].add(call.rows, size)

    def _log(
        self, name: str, entries: Sequence[_Logged], metrics: Mapping[Any, Metric]
    ) -> None:
        """Log once what calls logged under ``name``: values, or a metric."""
        last = entries[-1]
        if isinstance(last.value, _Place):
            self.lightning_module.log(name, metrics[last.value], **last.options)
            return
        value, size = self._value_of(name, entries)
        options = {**last.options, "batch_size": size}
        self.lightning_module.log(name, value, **options)

    def _value_of(self, name: str, entries: Sequence[_Logged]) -> tuple[Tensor, int]:
        """The value for the whole batch of what calls logged, and the batch size."""
        last = entries[-1]
        values = []
        for entry in entries:
            values.append(torch.as_tensor(entry.value).to(self.root_device))
        size, weights = self._sizes[last.call.step, name].of_batch(entries)
        reduction = last.options.get("reduce_fx", "mean")
        # torch.sum, "sum" and Python's sum mean the same
        reduce = _REDUCTIONS.get(getattr(reduction, "__name__", reduction))
        if reduce is None:
            return join_rows(values, 0, weights), size
        return reduce(torch.stack(values)), size


class _Call:
    """What one call of a step function left on its replica, without graphs.

    It is no dataclass, so that the engine takes it for one value.

    Attributes:
        step: the name of the step function.
        rows: the number of rows of its micro-batch.
        weight: the number of terms of its loss.
        output: what it returned, without the loss.
        logged: what it logged, with the options of ``self.log``, by the name and by how
            often the name had been logged before.
        metrics: the metrics that it updated.
        changes: what it changed in the module's attributes.
        new_in_parts: attributes that submodules did not have before.
        trainer: what it did with the Trainer.
    """

    output: Any
    logged: dict[tuple[str, int], tuple[Any, dict[str, Any]]]
    metrics: dict[_Place, Metric]
    changes: list[Change]
    new_in_parts: list[str]
    trainer: _TrainerCalls

    def __init__(self, step: str, rows: int) -> None:
        self.step = step
        self.rows = rows
        self.weight: float | Tensor = rows


class _Logged(NamedTuple):
    """A value that a call has logged, with the options of ``self.log``."""

    call: _Call
    value: Any
    options: dict[str, Any]


def _logged_by(calls: Sequence[_Call]) -> dict[tuple[str, int], list[_Logged]]:
    """What calls have logged, by the name and by how often it had been logged."""
    logged: dict[tuple[str, int], list[_Logged]] = defaultdict(list)
    for call in calls:
        for key, (value, options) in call.logged.items():
            logged[key].append(_Logged(call, value, options))
    return logged


def _copies_at(place: _Place, calls: Sequence[_Call]) -> list[Metric]:
    """The copies of the metric at ``place`` that calls have updated."""
    return [call.metrics[place] for call in calls if place in call.metrics]


def _joined_state(state: Any) -> Any:
    """A metric's state; of a list of tensors with rows, all rows."""
    if isinstance(state, list) and state and all(tensor.ndim for tensor in state):
        return torch.cat(state)
    return state


def _loss_and_rest(output: Any) -> tuple[Tensor, dict[str, Any]]:
    """The loss that ``training_step`` returned, and what it returned beside it."""
    returned = {**output} if isinstance(output, Mapping) else {"loss": output}
    loss = returned.pop("loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"training_step returned {loss!r} as the loss of a micro-batch, and no "
            "part of a batch can be skipped; return a loss that is zero, such as "
            "(output * 0).sum()"
        )
    return loss, returned


def _device_of(module: LightningModule) -> torch.device:
    """The device of a replica: that of its first parameter."""
    device: torch.device = module.device
    for parameter in module.parameters():
        device = parameter.device
        break
    return device


def _replicas_compiled(module: Any) -> contextlib.AbstractContextManager[None]:
    """In the body replicas of ``torch.compile(module)`` run ``forward`` compiled."""
    compiled = module._compiler_ctx
    methods = {name: compiled[f"original_{name}"] for name in _STEPS}
    return loop.overridden(
        module,
        **methods,
        _compiler_ctx=None,
        _compiled_call_impl=compiled["dynamo_ctx"](module._call_impl),
    )


def _user_parts(module: nn.Module) -> list[str]:
    """The paths of the modules in ``module`` that are of the user's classes."""
    paths = []
    for path, part in module.named_modules():
        if path and not kept.is_of_a_library(type(part).__module__):
            paths.append(path)
    return paths


def _new_attributes(
    replica: nn.Module, module: nn.Module, paths: Sequence[str]
) -> list[str]:
    """The places of numbers and tensors that modules of a replica keep since a call.

    Such as ``"self.criterion.last"``. Only places where the user's own module has no
    value: the engine tells of the others.
    """
    places = []
    for path in paths:
        try:
            attributes = vars(module.get_submodule(path))
            attributes_of_replica = vars(replica.get_submodule(path))
        except AttributeError:  # the user has removed the module
            continue
        for name, value in attributes_of_replica.items():
            is_new = attributes.get(name) is None and not name.startswith("_")
            if is_new and isinstance(value, (int, float, Tensor)):
                places.append(f"self.{path}.{name}")
    return places


def _none(_: Any) -> None:
    """No value."""


class _LogOfCall:
    """``LightningModule.log`` in a call: records values. After the step all calls log
    them once.

    Attributes:
        values: values with their options, by the name and by how often the name had
            been logged before.
    """

    def __init__(self, module: LightningModule, metrics: Mapping[Any, Any]) -> None:
        self._module = module
        self._signature = inspect.signature(LightningModule.log)
        self._places = {id(metric): at for at, metric in _single(metrics).items()}
        self.values: dict[tuple[str, int], tuple[Any, dict[str, Any]]] = {}

    def __call__(self, *args: Any, **options: Any) -> None:
        arguments = self._signature.bind(self._module, *args, **options).arguments
        arguments.pop("self")
        name = arguments.pop("name")
        value = arguments.pop("value")
        times = sum(name == other for other, _ in self.values)
        if isinstance(value, Tensor):
            value = value.detach().squeeze()
        else:
            value = self._places.get(id(value)) or float(value)
        self.values[name, times] = value, arguments


class _Sizes:
    """What ``batch_size=`` of the calls that log a value means.

    ::

        rows of the calls    2  2  2  4
        batch_size=          2  2  2  4    the call's terms: they are added
        batch_size=         12 12 12 12    a constant: that of the whole batch
    """

    def __init__(self) -> None:
        # Two different numbers tell as much as all.
        self._rows: set[int] = set()
        self._sizes: set[int] = set()

    def add(self, num_rows: int, size: int) -> None:
        """Note the ``batch_size=`` of a call with so many rows."""
        if len(self._rows) < 2:
            self._rows.add(num_rows)
        if len(self._sizes) < 2:
            self._sizes.add(size)

    def of_batch(self, entries: Sequence[_Logged]) -> tuple[int, list[float]]:
        """The batch size of a value that calls have logged, and each call's weight."""
        rows: list[int] = []
        weights: list[float] = []
        sizes: list[Any] = []
        for entry in entries:
            rows.append(entry.call.rows)
            weights.append(float(entry.call.weight))
            sizes.append(entry.options.get("batch_size"))
        if None in sizes:
            return sum(rows), weights
        # Without calls of other sizes to compare with, a size that is the number of
        # rows is taken for len(batch).
        are_rows = sizes == rows and len(self._rows) == 1
        if len(self._sizes) == 1 and not are_rows:
            return sizes[0], weights
        return sum(sizes), list(map(float, sizes))


def _refuse(trainer: Trainer, module: LightningModule) -> None:
    """Raise ``ValueError`` for what this strategy does not support."""
    settings = trainer._accelerator_connector
    step = module.training_step
    is_manual = not module.automatic_optimization
    kinds = {type(parameter).__name__ for parameter in module.parameters()}
    unsupported: dict[str, object] = {}
    unsupported["manual optimization (automatic_optimization=False)"] = is_manual
    unsupported["sharded parameters"] = "DTensor" in kinds
    unsupported["sync_batchnorm=True"] = settings._layer_sync is not None
    unsupported["num_nodes above 1"] = settings._num_nodes_flag > 1
    takes_loader = is_param_in_hook_signature(step, "dataloader_iter", explicit=True)
    unsupported["training_step(dataloader_iter)"] = takes_loader
    loop.refuse(
        "ScatterOnceStrategy",
        unsupported,
        "it trains one whole model in one process, by the losses that training_step "
        "returns; use a strategy of Lightning's",
    )


def _refuse_unequal_loaders(trainer: Trainer, batch: Any) -> None:
    """Raise ``ValueError`` if the batches of a ``CombinedLoader`` differ in rows."""
    combined = getattr(trainer._active_loop, "_combined_loader", None)
    if combined is None or combined._mode == "sequential":
        return  # one batch of one loader
    loaders = combined.iterables
    if isinstance(loaders, Mapping):
        batches = {repr(name): batch[name] for name in loaders}
    elif isinstance(loaders, (list, tuple)):
        batches = {f"number {i}": part for i, part in enumerate(batch)}
    else:
        return
    rows = {}
    for name, batch_of_loader in batches.items():
        num_rows = loop.known_rows(batch_of_loader)
        if num_rows is not None:  # the loader has ended, or its values have no rows
            rows[name] = num_rows
    if len(set(rows.values())) > 1:
        listed = ", ".join(
            f"{number} of loader {name}" for name, number in rows.items()
        )
        raise ValueError(
            "the batches of a CombinedLoader have different numbers of rows "
            f"({listed}), and each replica gets a part of the rows; give the loaders "
            "the same batch_size and drop_last=True, or let a loader return whole "
            "batches to each micro-batch: collate_fn=lambda rows: "
            "scatterpar.Replicated(default_collate(rows))"
        )


# The Trainer in a call: what the call logs there is recorded.


class _TrainerCalls:
    """What one call has done with the Trainer, to be done again if the step succeeds.

    Attributes:
        changes: of the Trainer's profiler, and of attributes that the user gave it.
        objects: the user's callbacks and data module that the call has read, with the
            changes of each.
        attributes: the Trainer's attributes that the call has set, such as
            ``should_stop``.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.objects: list[tuple[Any, list[Change]]] = []
        self.attributes: dict[str, Any] = {}
        self._calls: list[tuple[Sequence[Any], tuple[Any, ...], dict[str, Any]]] = []

    def add(self, path: Sequence[Any], *args: Any, **options: Any) -> None:
        """Record a call of the Trainer's method at ``path``."""
        self._calls.append((path, args, options))

    def changes_of(self, user_object: Any) -> list[Change]:
        """The changes of one of the user's objects."""
        for changed, changes in self.objects:
            if changed is user_object:
                return changes
        return []

    def replay(self, trainer: Any, device: torch.device) -> None:
        """Do with the Trainer what was recorded, with tensors on ``device``."""
        for name, value in self.attributes.items():
            setattr(trainer, name, value)
        for path, args, options in self._calls:
            target = trainer
            for part in path:
                is_number = isinstance(part, int)
                target = target[part] if is_number else getattr(target, part)
            args, options = loop.moved((args, options), device)
            target(*args, **options)


class _TrainerInCall:
    """The Trainer as a call sees it.

    ::

        trainer.logger.log(…)      recorded, and called after the step
        trainer.should_stop = …    recorded, and set after the step
        trainer.profiler           a copy, whose changes are added after the step
        trainer.losses             of the user's: a copy, whose changes are added
        trainer.callbacks[0]       of the user's: a copy, whose changes are added
    """

    def __init__(self, trainer: Any, copies: kept.CallCopies) -> None:
        attributes = {}
        for name, value in vars(trainer).items():
            if not _is_of_trainer(name):
                attributes[name] = copies.of(value)
        profiler = copies.of(trainer.profiler)
        if isinstance(profiler, AdvancedProfiler):  # it profiles one thread at a time
            profiler = PassThroughProfiler()
        attributes["profiler"] = profiler
        user_attributes = SimpleNamespace(**attributes)
        # __setattr__ records what the step function sets.
        vars(self).update(
            _trainer=trainer,
            calls=_TrainerCalls(),
            _copies=copies,
            _objects={},
            _kept=user_attributes,
            _state=KeptState(user_attributes, ()),
        )

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance(self.trainer, Trainer)
        return type(self._trainer)

    def __getattr__(self, name: str) -> Any:
        for attributes in (vars(self._kept), self.calls.attributes):
            if name in attributes:
                return attributes[name]
        return getattr(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_of_trainer(name) or hasattr(type(self._trainer), name):
            self.calls.attributes[name] = value
        else:
            setattr(self._kept, name, value)

    @property
    def logger(self) -> Any:
        return _recorded(self._trainer.logger, self.calls, ("logger",))

    @property
    def loggers(self) -> list[Any]:
        recorded = []
        for number, logger in enumerate(self._trainer.loggers):
            recorded.append(_recorded(logger, self.calls, ("loggers", number)))
        return recorded

    @property
    def callbacks(self) -> list[Any]:
        return [self._in_call(callback) for callback in self._trainer.callbacks]

    @property
    def datamodule(self) -> Any:
        return self._in_call(self._trainer.datamodule)

    def _in_call(self, user_object: Any) -> Any:
        """The copy of an object of the user's; a library's object itself."""
        kind = type(user_object)
        if kept.is_of_a_library(kind.__module__):
            return user_object
        if id(user_object) not in self._objects:
            copied = object.__new__(kind)
            for name, value in vars(user_object).items():
                vars(copied)[name] = self._copies.of(value)
            state = KeptState(copied, ())
            self._objects[id(user_object)] = user_object, copied, state
        _, copied, _ = self._objects[id(user_object)]
        return copied

    def end(self) -> None:
        """Record what the call has added to the copies."""
        self.calls.changes = self._state.changes()
        for user_object, _, state in self._objects.values():
            self.calls.objects.append((user_object, state.changes()))


def _is_of_trainer(name: str) -> bool:
    """Whether Lightning's Trainer has this attribute, not the user."""
    return name.startswith("_") or name in _OF_TRAINER


class _Recorded:
    """A logger, or an object of one, in a call: its methods are recorded, not called.

    Methods that return something, by their name, and attributes are the logger's.
    """

    def __init__(self, target: Any, calls: _TrainerCalls, path: Sequence[Any]) -> None:
        self._target = target
        self._calls = calls
        self._path = path

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance(self.logger, TensorBoardLogger)
        return type(self._target)

    def __call__(self, *args: Any, **options: Any) -> None:
        self._calls.add(self._path, *args, **options)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if callable(value) and name.startswith(("get", "is_", "has_")):
            return value
        return _recorded(value, self._calls, (*self._path, name))


def _recorded(value: Any, calls: _TrainerCalls, path: Sequence[Any]) -> Any:
    """What stands for an attribute of the Trainer's, or of a logger's, in a call."""
    if value is None or isinstance(value, (bool, int, float, str, os.PathLike)):
        return value
    is_method = isinstance(value, (types.MethodType, types.FunctionType))
    if is_method or isinstance(value, types.BuiltinFunctionType):
        return partial(calls.add, path)
    return _Recorded(value, calls, path)


# Metrics of torchmetrics: each call updates empty copies, whose states are merged in
# row order.


class _Metrics:
    """Metrics by place; no container, so that the engine takes it for one value."""

    def __init__(self, by_place: Mapping[Any, Any]) -> None:
        self.by_place = by_place


class _Place(NamedTuple):
    """Where a single metric is: the place of the outermost one, and the path in it."""

    outer: str | kept.Path
    inner: str


def _metrics_of(module: nn.Module) -> dict[str | kept.Path, Any]:
    """The outermost metrics and collections of metrics in ``module``.

    By their path, such as ``"head.accuracy"``; those in a plain list or dict of the
    module's attributes by ``kept.Path``.
    """
    kinds = (Metric, MetricCollection)
    metrics: dict[str | kept.Path, Any] = {}
    prefixes: tuple[str, ...] = ()
    # A module comes before the modules in it.
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, kinds) and not path.startswith(prefixes):
            metrics[path] = part
            prefixes += (f"{path}.",)
    attributes = kept.kept_attributes(module, _OF_LIGHTNING)
    for place, metric in kept.find(attributes, kinds).items():
        metrics[place] = metric
    return metrics


def _single(metrics: Mapping[Any, Any]) -> dict[_Place, Metric]:
    """All single metrics, including those in collections and in other metrics."""
    single = {}
    for outer, metric in metrics.items():
        for inner, part in metric.named_modules():
            if isinstance(part, Metric):
                single[_Place(outer, inner)] = part
    return single


@contextlib.contextmanager
def _placed(module: nn.Module, metrics: Mapping[Any, Any]) -> Iterator[None]:
    """In the body, ``module`` has ``metrics`` at their places.

    Afterwards it has what was there before.
    """
    before = {}
    for place, metric in metrics.items():
        before[place] = _exchange(module, place, metric)
    try:
        yield
    finally:
        for place, metric in before.items():
            _exchange(module, place, metric)


def _exchange(module: nn.Module, place: str | kept.Path, metric: Any) -> Any:
    """Put ``metric`` at a place of ``module``. Returns what was there."""
    if isinstance(place, str):
        before = module.get_submodule(place)
        module.set_submodule(place, metric)
        return before
    holder = kept.holder_of(module, place)
    before = place[-1].read(holder)
    place[-1].write(holder, metric)
    return before


def _emptied(metric: Any) -> Any:
    """A copy of ``metric`` without state, which may be large and is not copied."""
    # What deepcopy takes for the copy of an object, by the object's id.
    memo: dict[int, Any] = {}
    for single in _single({"": metric}).values():
        for name in single._defaults:
            state = getattr(single, name)
            if isinstance(state, list):  # such as all predictions so far
                memo[id(state)] = []
        # values of the last batch and of all
        memo[id(single._forward_cache)] = None
        memo[id(single._computed)] = None
    copied = copy.deepcopy(metric, memo)
    copied.reset()
    return copied


def _updated(metrics: Mapping[Any, Any]) -> dict[_Place, Metric]:
    """The single metrics that were updated, by their places."""
    for part in nn.ModuleList(metrics.values()).modules():
        # gives all members of a group the shared state
        if isinstance(part, MetricCollection):
            part.values(copy_state=False)
    single = _single(metrics)
    return {place: metric for place, metric in single.items() if metric._update_count}


def _merge(metric: Metric, copies: Sequence[Metric], device: torch.device) -> None:
    """Merge states of ``copies`` into ``metric``, in their order.

    Raises:
        ValueError: torchmetrics cannot merge a state.
    """
    # For the value of the step: with the copies' states alone.
    of_step = _emptied(metric)
    for copied in copies:
        _check_states(metric, copied)
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
