"""Lightning's ``Trainer`` on all devices of one process.

In training each replica computes micro-batches of the loader's batch::

    for rows in micro_batches:                   # in their order, in turns
        lend the LightningModule a replica's modules
        loss = module.training_step(rows, …)     # backward passes overlap
    module.log(…)                                # once, with the values of all rows

In an evaluation each device computes whole batches of the loop::

    batch 0    module.validation_step(…)         # with the user's own modules
    batch 1    lend the modules of a replica on the second device, and give them back
    batch 2    module.validation_step(…)         # kernels of batch 1 may still run

The Trainer does everything else: order of the hooks, optimizers, schedules, callbacks,
checkpoints.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, partialmethod
from numbers import Number
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from scatterpar.batch import nested
from scatterpar.batch.joining import join_rows
from scatterpar.batch.markers import Rows
from scatterpar.devices.device_ids import DeviceLike, physical, resolve
from scatterpar.devices.transfers import to_device
from scatterpar.engine import ScatterOnceParallel
from scatterpar.errors import Told, warn
from scatterpar.loops.arguments import check_count, refuse, warn_of_batch_norm
from scatterpar.loops.evaluation import Turns, brought_home
from scatterpar.loops.lending import Lending, loan_of, roots_of
from scatterpar.loops.modules import Modules, device_of, moved, overridden
from scatterpar.loops.rows import as_rows, num_rows
from scatterpar.loops.user_functions import UserFunctions, groups_of, of_user
from scatterpar.objects.walk import Walk
from scatterpar.step.request import Accum, Reduction
from scatterpar.step.substeps import detached
from scatterpar.step.turns import lasting_a_turn
from scatterpar.verify.dropped_records import Silent, is_look

__all__ = ["ScatterOnceStrategy"]

_REMEDIES = (
    "In Lightning pass ScatterOnceStrategy(…, count=lambda batch: …), the number of "
    "terms that the mean averages over in a batch, such as lambda batch: "
    'batch[1].ne(-100).sum() for labels of which some are ignored, or reduction="sum" '
    "for a sum. If it compares rows with each other, or is a ratio of sums, train it "
    "on one device with a strategy of Lightning's, or in a loop of your own with "
    "engine.loss(inputs, targets, criterion, whole_batch=True). "
    "verify=False does not check."
)
_UNSUPPORTED = (
    "it trains one whole model in one process, by the losses that training_step "
    "returns; use a strategy of Lightning's"
)
_MANUAL = (
    "the Trainer's loop has no loss to compute. Use the stock strategy, make a "
    "ScatterOnceParallel engine in configure_model or on_fit_start, and call "
    "self.manual_backward(engine.loss(inputs, targets, criterion)) in training_step "
    "(docs/lightning.md, Manual optimization)"
)
_ONCE_PER_BATCH = (
    "on_train_batch_start runs once per batch, and self.global_step counts steps"
)
# Attributes of a LightningModule that refer to the loop.
_OF_LOOP = ("_trainer", "_fabric")
# In the place of a metric, in the module that is replicated.
_NO_METRIC = nn.Identity()
_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_REDUCTIONS: dict[Any, Any] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}
_CLOSE = 1e-2  # of logged values: rounding in half precision is smaller


class ScatterOnceStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Trains a LightningModule on all devices of one process, with the gradient of one
    device.

    For the ``Trainer`` of ``lightning.pytorch``, whose ``world_size`` is then 1. Each
    batch of the loader is divided among the replicas. Validation, test and prediction
    give each device whole batches. The LightningModule must use automatic optimization,
    and needs no change.

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
        refuse(
            "ScatterOnceStrategy",
            {"graphs=True": options.get("graphs")},
            "it replays kernels without Python, and so without self.log; leave "
            "graphs out",
        )
        check_count(count, ["batch"], "batch[1]")
        # The Trainer sets this to the devices that its devices= names.
        self.parallel_devices: list[torch.device] | None = None
        self._device_ids = device_ids
        self._options = {"accum": accum, **options}
        self._count = count
        # How losses combine, as options of the engine.
        self._combination: dict[str, Any] = {"reduction": reduction}
        if count is not None:
            self._combination["count"] = partial(_terms_of_call, count)
        self._functions = UserFunctions()
        self._logged = _LoggedValues()
        # Whether calls of the present step have returned None: one answer, or both.
        self._skips: set[bool] = set()
        self._engine: Any = None
        self._replicated: Any = None  # the parts of the LightningModule
        self._until_teardown = contextlib.ExitStack()
        # By path, the module's metrics without their states: calls copy these while
        # the loop updates the user's.
        self._empty_metrics: dict[str, Any] = {}
        # Of an evaluation: the turns of its batches; the device of the batch that was
        # transferred last.
        self._turns: Any = None
        self._lending: Any = None
        self._device_of_batch: torch.device | None = None

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
                warn_of_batch_norm(module)
            self._functions.tell_turns(module.training_step)
        # Replicas are made of the module where it is from now on: on its device.
        super().setup(trainer)
        if module._compiler_ctx:
            self._until_teardown.enter_context(_replicas_compiled(module))
        self._replicated = _PartsOf(module)
        engine = ScatterOnceParallel(
            Modules([(type(module).__name__, self._replicated)]),
            device_ids=self._device_ids or self.parallel_devices,
            # A replay runs no Python, and so no ``self.log``.
            **{"graphs": False, **self._options},
        )
        # In turns calls have the user's own module, so what they write is its own.
        engine.loop.takes_turns = True
        engine.loop.lends = True
        engine.loop.loss_name = "training_step"
        engine.loop.remedies = _REMEDIES
        engine.loop.around_looks = self._around_look
        engine.loop.written = self._written
        self._engine = self._until_teardown.enter_context(engine)
        self._lending = Lending(
            self._lent_roots,
            _OF_LOOP,
            self.root_device,
            self._keyed_optimizers,
        )

    def _keyed_optimizers(self) -> Sequence[Any]:
        return self.lightning_module.trainer.optimizers  # type: ignore[no-any-return]

    def _lent_roots(self) -> list[Any]:
        """The LightningModule, and modules to which it refers by plain containers.

        Calls write these, too, such as metrics in a dict.
        """
        module = self.lightning_module
        return roots_of([module], module.modules(), _OF_LOOP)

    def teardown(self) -> None:
        """Close the engine, and do what ``SingleDeviceStrategy`` does."""
        # Before the module goes to the host: replicas read its tensors.
        self._until_teardown.close()
        # A Trainer may be saved, and none of these can be.
        self._engine = self._turns = self._lending = self._replicated = None
        super().teardown()

    def batch_to_device(
        self, batch: Any, device: Any = None, dataloader_idx: int = 0
    ) -> Any:
        """Run the hooks on batch transfer.

        In training the batch stays on the host: the engine copies the rows of each
        replica to its device. In an evaluation the devices get whole batches in turn.
        """
        device = torch.device("cpu")
        if not self.lightning_module.trainer.training:
            self._device_of_batch = self._turns.next_device()
            device = physical(self._device_of_batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    # Training.

    def training_step(self, batch: Any, *arguments: Any, **_: Any) -> Any:
        """Compute the whole batch's loss, with ``training_step`` on the replicas."""
        precision = self.precision_plugin
        module = self.lightning_module
        options = dict(self._combination)
        # Backward passes of sub-steps run before the Trainer scales the loss.
        options["scaler"] = getattr(precision, "scaler", None)
        options["return_outputs"] = itemgetter("call")
        inputs: dict[str, Any] = {"work": self._training_call}
        inputs["arguments"] = list(arguments)
        inputs["batch"] = as_rows(batch)
        # Calls end in any order of the replicas, and are sorted by their first rows.
        inputs["rows"] = Rows(range(num_rows(batch)))
        self._skips.clear()
        with precision.train_step_context(), self._without_metrics() as metrics:
            self._empty_metrics = _all_emptied(metrics)
            try:
                loss, records = self._engine.loss(inputs, **options)
            finally:
                self._lending.end_step()
        calls = sorted(nested.atoms(records), key=attrgetter("first_row"))
        self._functions.tell_numbers(
            "training_step", len(calls), _ONCE_PER_BATCH, module
        )
        self._log(calls, metrics)
        # As the stock loop, which then makes no backward pass.
        if True in self._skips:
            return None
        outputs = self._joined(calls)
        outputs["loss"] = loss
        return outputs

    def _training_call(
        self, work: Any, batch: Any, rows: Any, arguments: Any
    ) -> dict[str, Any]:
        """Call ``training_step`` for a micro-batch.

        Args:
            work: the replica's modules; the LightningModule is the first.
            batch: the micro-batch.
            rows: the numbers of its rows.
            arguments: those of the method after the batch.

        Returns:
            The loss with its graph, and the ``_Call`` without graphs.
        """
        call = _Call(rows[0], len(rows))
        if self._count:
            call.weight = self._count(batch)
        if is_look():
            self._functions.restart_look()
        with self._in_call(work, call) as module:
            output = module.training_step(batch, *arguments)
        # Raises Lightning's own error if it is no loss.
        result = ClosureResult.from_training_step_output(output)
        # A graph would keep the activations of all micro-batches until the step ends.
        call.output = nested.map_tensors(detached, result.extra)
        if is_look():
            self._logged.look(call, is_whole=work[0] is self._replicated)
        self._logged.note_sizes(call)
        loss = result.closure_loss
        self._check_skips(loss is None)
        # All calls of the step return None, and the step's gradient is dropped.
        if loss is None:
            loss = _zero(work)
        return {"loss": loss, "call": call}

    def _written(self) -> Walk:
        """Finds all that calls may write, before the tries of a step."""
        return Walk(self._written_in_calls())

    def _written_in_calls(self) -> list[Any]:
        """What calls may write: the LightningModule, the Trainer, its optimizers'
        groups and schedules, the data module; callbacks and data sets of the user.
        """
        module = self.lightning_module
        trainer = module.trainer
        roots = [module, trainer, trainer.datamodule]
        roots += map(groups_of, trainer.optimizers)
        roots += [config.scheduler for config in trainer.lr_scheduler_configs]
        loaders = trainer.fit_loop._combined_loader.flattened
        data_sets = [getattr(loader, "dataset", None) for loader in loaders]
        roots += of_user([*trainer.callbacks, *data_sets])
        return roots_of(roots, module.modules(), _OF_LOOP)

    def _check_skips(self, skips: bool) -> None:
        """Raise ``ValueError`` if ``training_step`` returns ``None`` for some rows."""
        if is_look():
            if skips:
                raise ValueError("training_step returned None for rows of a look")
            return
        self._skips.add(skips)
        if len(self._skips) > 1:
            raise ValueError(
                "training_step returned None for a part of the batch, and only a whole "
                "batch can be skipped; return None for all rows of the batch, or a "
                "loss for all, such as (output * 0).sum() for rows that do not count"
            )

    def _joined(self, calls: Sequence[_Call]) -> Any:
        """What calls returned beside their losses, with their rows joined."""
        outputs = []
        for call in calls:
            output = moved(call.output, self.root_device)
            outputs.append(nested.map_atoms(_marked, output))
        # Averages of outputs are weighted like the loss.
        weights = [float(call.weight) for call in calls]
        rows = [call.num_rows for call in calls]

        def joined(entries: list[Any]) -> Any:
            try:
                return join_rows(entries, 0, weights, rows, lists="if clear")
            except ValueError:  # such as tensors without rows
                return entries

        return {
            name: nested.map_atoms(
                _unmarked, joined([output[name] for output in outputs])
            )
            for name in outputs[0]
        }

    # Calls of step functions on replicas.

    @contextlib.contextmanager
    def _without_metrics(self) -> Iterator[dict[str, Any]]:
        """In the body the module that is replicated has no metrics: calls update
        copies. Yields its metrics.
        """
        module = self.lightning_module
        metrics = _metrics_of(module)
        # Lightning notes the names of metrics, which is no change of the module.
        names = overridden(module, _metric_attributes=None)
        with names, _placed(module, dict.fromkeys(metrics, _NO_METRIC)):
            yield metrics

    @contextlib.contextmanager
    def _in_call(self, work: Any, call: _Call) -> Iterator[LightningModule]:
        """In the body the call runs. Yields the module whose step function to call."""
        device = device_of(work[0], self.root_device)
        copies = {}
        for place, metric in self._empty_metrics.items():
            copies[place] = _emptied(metric).to(device)
        call.places = {id(metric): at for at, metric in _single(copies).items()}
        module = self.lightning_module
        with contextlib.ExitStack() as stack:
            lent = self._lending.lent(loan_of(self._engine.loop.replicas, work), device)
            stack.enter_context(lasting_a_turn(lent))
            stack.enter_context(_placed(module, copies))
            for part in module.modules():
                if isinstance(part, LightningModule):
                    stack.enter_context(overridden(part, _device=device))
            stack.enter_context(overridden(module, log=call.log))
            yield module
        # Not in a finally: what a failed call has measured is dropped.
        call.metrics = _updated(copies)

    def _log(self, calls: Sequence[_Call], metrics: Mapping[str, Any]) -> None:
        """Update the user's metrics with what calls have measured, and log."""
        single = _single(metrics)
        for place, metric in single.items():
            copies = [call.metrics[place] for call in calls if place in call.metrics]
            _merge(metric, copies, self.root_device)
        self._logged.log(self.lightning_module, calls, single)

    # Evaluation.

    def _begin_evaluation(self) -> None:
        """The loop begins, from the first device on."""
        module = self.lightning_module
        self._turns = Turns(self._engine, [module], lambda: (), _OF_LOOP)
        self._device_of_batch = None

    on_validation_start = _begin_evaluation
    on_test_start = _begin_evaluation
    on_predict_start = _begin_evaluation

    def _evaluate(self, step: str, *arguments: Any, **options: Any) -> Any:
        """Call a step function for a batch: on the device that has the batch."""
        home = self._turns.devices[0]
        # A batch that the loop does not transfer is on the first device.
        device = self._device_of_batch or home
        self._device_of_batch = None
        function = getattr(super(), step)
        with self._in_turn(device, home):
            output = function(*arguments, **options)
        return brought_home(output, device, home)

    validation_step = partialmethod(_evaluate, "validation_step")
    test_step = partialmethod(_evaluate, "test_step")
    predict_step = partialmethod(_evaluate, "predict_step")

    @contextlib.contextmanager
    def _in_turn(self, device: torch.device, home: torch.device) -> Iterator[None]:
        """In the body the module has the tensors of a replica.

        Metrics and logged values stay on the first device.
        """
        module = self.lightning_module
        results = module.trainer._results
        with self._without_metrics() as metrics:  # replicas have none
            turn = self._turns.turn(device)
        if device == home:
            yield
            return
        log = partial(_called_at_home, module.log, device, home)
        with (
            turn,
            overridden(module, _device=physical(device), log=log),
            _updated_at_home(metrics, device, home),
        ):
            yield
        # Numbers are logged on the module's device.
        if results is not None and physical(device) != self.root_device:
            results.to(self.root_device)

    @contextlib.contextmanager
    def _around_look(self) -> Iterator[None]:
        """In the body a look calls ``training_step``: loggers and profiler are silent.

        Afterwards callbacks, the data module and attributes that the user gave the
        Trainer are as before.
        """
        trainer = self.lightning_module.trainer
        silent: dict[str, Any] = {"profiler": PassThroughProfiler()}
        # A logger writes files and sends numbers, which no journal restores.
        silent["_loggers"] = [Silent(logger) for logger in trainer.loggers]
        with (
            # First: each call of the look begins with what the journal saves.
            overridden(trainer, **silent),
            self._functions.looking(
                [self.lightning_module], self._lending, self._written_in_calls()
            ),
        ):
            yield


class _Call:
    """What one call of a step function left, without graphs.

    It is no dataclass, so that the engine takes it for one value.

    Attributes:
        first_row: the number of its first row.
        num_rows: the number of rows of its micro-batch.
        weight: the number of terms of its loss.
        output: what it returned, without the loss.
        logged: what it logged, with the options of ``self.log``, by the name and by how
            often the name had been logged before.
        places: where the metrics are that it updates, by their ``id``.
        metrics: the metrics that it has updated.
    """

    output: Any
    places: dict[int, _Place]
    metrics: dict[_Place, Metric]

    def __init__(self, first_row: int, num_rows: int) -> None:
        self.first_row = first_row
        self.num_rows = num_rows
        self.weight: float | Tensor = num_rows
        self.logged: dict[tuple[str, int], tuple[Any, dict[str, Any]]] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def log(self, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        """Record a value, in the place of ``LightningModule.log``."""
        # Seldom, so their names are not asked at each call.
        if arguments:
            _, _, _, *names = inspect.signature(LightningModule.log).parameters
            options.update(zip(names, arguments, strict=False))
        if isinstance(value, Metric):
            value = self.places.get(id(value), value)
        elif isinstance(value, Tensor):
            value = value.detach().clone().squeeze()
        elif isinstance(value, Number):
            value = torch.tensor(value, dtype=torch.get_default_dtype())
        # A step may log a name more than once: each time is a value of its own.
        times = sum(name == other for other, _ in self.logged)
        self.logged[name, times] = value, options


class _UnjoinedNumber:
    """A number that is not averaged, such as of right rows.

    Joined, it is an entry of a list: calls that return equal numbers by chance must not
    look like one call.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


def _marked(atom: Any) -> Any:
    """An atom of a call's output, and marked if it is a number.

    A tensor of floats is averaged, and not marked.
    """
    is_tensor = isinstance(atom, Tensor)
    if is_tensor and not atom.ndim and not atom.is_floating_point():
        return _UnjoinedNumber(atom)
    return _UnjoinedNumber(atom) if isinstance(atom, Number) else atom


def _unmarked(atom: Any) -> Any:
    return atom.value if isinstance(atom, _UnjoinedNumber) else atom


def _terms_of_call(count: Callable[[Any], Any], inputs: Any, _: Any) -> Any:
    """The user's ``count``, of the inputs of the engine."""
    return count(inputs["batch"])


def _two_sets() -> tuple[set[Any], set[Any]]:
    return set(), set()


class _Logged(NamedTuple):
    """A value that a call has logged, with the options of ``self.log``."""

    call: _Call
    value: Any
    options: dict[str, Any]


class _LoggedValues:
    """Logs the values of all calls of a step, once for the batch."""

    def __init__(self) -> None:
        # By the name of a logged value: numbers of rows, and batch_size=. Calls of
        # looks count too: they have other numbers of rows.
        self._seen: defaultdict[str, tuple[set[int], set[Any]]]
        self._seen = defaultdict(_two_sets)
        # Of a look: the call for all its rows, and those for parts of them.
        self._whole: _Call | None = None
        self._parts: list[_Call] = []
        self._told = Told()
        self._warnings: list[str] = []  # of a look, in which warnings are not shown

    def log(
        self,
        module: LightningModule,
        calls: Sequence[_Call],
        metrics: Mapping[_Place, Metric],
    ) -> None:
        """Log what calls have logged: metrics, and one value for all rows.

        Warns of values that a look has found to be no means.
        """
        for text in self._warnings:
            warn(text)
        self._warnings = []
        for (name, _), entries in _logged_by(calls).items():
            value = entries[-1].value
            options = dict(entries[-1].options)
            if isinstance(value, _Place):
                options["metric_attribute"] = value.path
                value = metrics[value]
            elif isinstance(value, Tensor):
                # A single call's value is that of the batch, with the user's options.
                if len(entries) > 1:
                    value, options["batch_size"] = self._value_of(name, entries)
                value = to_device(value, module.device)
            module.log(name, value, **options)

    def note_sizes(self, call: _Call) -> None:
        """Note ``batch_size=`` of what a call has logged, also of a look's call."""
        for (name, _), (_, options) in call.logged.items():
            rows, sizes = self._seen[name]
            rows.add(call.num_rows)
            sizes.add(options.get("batch_size"))

    def look(self, call: _Call, *, is_whole: bool) -> None:
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

    def _compare(self, whole: _Call, parts: Sequence[_Call]) -> None:
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


def _logged_by(calls: Sequence[_Call]) -> dict[tuple[str, int], list[_Logged]]:
    """What calls have logged, by the name and by how often it had been logged."""
    logged: dict[tuple[str, int], list[_Logged]] = defaultdict(list)
    for call in calls:
        for key, (value, options) in call.logged.items():
            logged[key].append(_Logged(call, value, options))
    return logged


# Modules.


class _PartsOf(nn.Module):
    """The submodules and parameters of a LightningModule, and nothing else of it.

    In turns replicas need no more. Attributes of the LightningModule that its step
    function writes would make new replicas in each step.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        # The same dictionaries, so that later changes are seen here, too.
        vars(self).update(
            _modules=module._modules,
            _parameters=module._parameters,
            _buffers=module._buffers,
            _non_persistent_buffers_set=module._non_persistent_buffers_set,
        )


def _zero(work: nn.Module) -> Tensor:
    """A loss of zero, whose gradient is zero."""
    trained = [part for part in work.parameters() if part.requires_grad]
    return trained[0].flatten()[:0].sum()


def _replicas_compiled(module: Any) -> contextlib.AbstractContextManager[None]:
    """In the body replicas of ``torch.compile(module)`` run ``forward`` compiled."""
    # Lightning replaces methods of the module, which replicas would call on it.
    compiled = module._compiler_ctx
    methods = {name: compiled[f"original_{name}"] for name in _STEPS}
    return overridden(
        module,
        **methods,
        _compiler_ctx=None,
        _compiled_call_impl=compiled["dynamo_ctx"](module._call_impl),
    )


def _refuse(trainer: Trainer, module: LightningModule) -> None:
    """Raise ``ValueError`` for what this strategy does not support."""
    # Read here, because a strategy is not told of these arguments.
    settings = trainer._accelerator_connector
    step = module.training_step
    is_manual = not module.automatic_optimization
    kinds = {type(parameter).__name__ for parameter in module.parameters()}
    manual = {"manual optimization (automatic_optimization=False)": is_manual}
    refuse("ScatterOnceStrategy", manual, _MANUAL)
    unsupported: dict[str, object] = {}
    unsupported["sharded parameters"] = "DTensor" in kinds
    unsupported["sync_batchnorm=True"] = settings._layer_sync is not None
    unsupported["num_nodes above 1"] = settings._num_nodes_flag > 1
    takes_loader = is_param_in_hook_signature(step, "dataloader_iter", explicit=True)
    unsupported["training_step(dataloader_iter)"] = takes_loader
    refuse("ScatterOnceStrategy", unsupported, _UNSUPPORTED)


# Metrics of torchmetrics: each call updates empty copies, whose states are merged in
# row order.


class _Place(NamedTuple):
    """Where a single metric is: the place of the outermost one, and the path in it."""

    outer: str
    inner: str

    @property
    def path(self) -> str:
        """The path of the metric in the LightningModule."""
        return f"{self.outer}.{self.inner}".removesuffix(".")


_METRICS = (Metric, MetricCollection)


def _metrics_of(module: nn.Module) -> dict[str, Any]:
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


def _single(metrics: Mapping[Any, Any]) -> dict[_Place, Metric]:
    """All single metrics, including those in collections and in other metrics."""
    single = {}
    for outer, metric in metrics.items():
        for inner, part in metric.named_modules():
            if isinstance(part, Metric):
                single[_Place(outer, inner)] = part
    return single


@contextlib.contextmanager
def _placed(module: nn.Module, metrics: Mapping[str, Any]) -> Iterator[None]:
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
def _updated_at_home(
    metrics: Mapping[Any, Any], device: torch.device, home: torch.device
) -> Iterator[None]:
    """In the body, metrics on ``home`` are updated with values of ``device``."""
    with contextlib.ExitStack() as stack:
        for metric in _single(metrics).values():
            # Their states stay, because lists of what they have seen may be long.
            update = partial(_called_at_home, metric.update, device, home)
            stack.enter_context(overridden(metric, update=update))
        yield


def _called_at_home(
    function: Callable[..., None],
    device: torch.device,
    home: torch.device,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Call ``function`` with the values of ``device`` on ``home``."""
    arguments, options = brought_home((args, kwargs), device, home)
    function(*arguments, **options)


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
    # A reset sets the defaults, which deepcopy has copied.
    copied = copy.deepcopy(metric, memo)
    copied.reset()
    return copied


def _all_emptied(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of ``metrics`` without states."""
    return {place: _emptied(metric) for place, metric in metrics.items()}


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
