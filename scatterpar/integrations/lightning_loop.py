"""The calls of ``training_step`` on replicas, and what they leave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.markers import Rows
from scatterpar.engine import ScatterOnceParallel
from scatterpar.integrations.lightning_logs import (
    CallResults,
    LoggedValues,
    Silent,
    StepCall,
    joined_outputs,
)
from scatterpar.integrations.lightning_metrics import (
    NO_METRIC,
    StepMetrics,
    merge,
    metrics_of,
    placed,
    single_metrics,
)
from scatterpar.loops.loop import Loop
from scatterpar.loops.modules import overridden
from scatterpar.loops.rows import as_rows, num_rows
from scatterpar.loops.user_functions import groups_of, of_user
from scatterpar.objects.walk import Walk
from scatterpar.step.request import Reduction
from scatterpar.step.substeps import detached
from scatterpar.verify.dropped_records import is_look

_REMEDIES = (
    "In Lightning pass ScatterOnceStrategy(…, count=lambda batch: …), the number of "
    "terms that the mean averages over in a batch, such as lambda batch: "
    'batch[1].ne(-100).sum() for labels of which some are ignored, or reduction="sum" '
    "for a sum. If it compares rows with each other, or is a ratio of sums, train it "
    "on one device with a strategy of Lightning's, or in a loop of your own with "
    "engine.loss(inputs, targets, criterion, whole_batch=True). "
    "verify=False does not check."
)
# Attributes of a LightningModule that refer to the loop.
OF_LOOP = ("_trainer", "_fabric")


class ModuleLoop(Loop):
    """The training of a LightningModule.

    Args:
        strategy: knows the module, also of a later ``fit``.
        count: the user's number of terms of a mean.
        reduction: how losses combine, as an option of the engine.
    """

    function = "training_step"
    remedies = _REMEDIES
    once_per_batch = (
        "on_train_batch_start runs once per batch, and self.global_step counts steps"
    )
    gradients_at = (
        "on_before_optimizer_step finds the gradient of the whole batch in .grad, and "
        "may keep a copy for the next step"
    )
    not_lent = OF_LOOP
    takes_turns = True

    def __init__(
        self,
        strategy: Any,
        count: Callable[[Any], float | Tensor] | None,
        reduction: Reduction | None,
    ) -> None:
        super().__init__()
        self._strategy = strategy
        self._count = count
        self._combination: dict[str, Any] = {"reduction": reduction}
        if count is not None:
            self._combination["count"] = partial(_terms_of_call, count)
        self._replicated: PartsOf | None = None
        self._logged = LoggedValues()
        # Whether calls of the present step have returned None: one answer, or both.
        self._skips: set[bool] = set()
        self._step_metrics = StepMetrics()
        self._call_results: CallResults | None = None  # of the calls of a step

    def begin_training(
        self, engine: ScatterOnceParallel[Any], replicated: PartsOf
    ) -> None:
        """From now on ``engine`` computes the steps, with these parts of the module."""
        self.close()  # that of a training which has failed
        self.engine = engine
        engine.loop = self.options()
        self._replicated = replicated
        self._step_metrics = StepMetrics()

    def end(self) -> None:
        """Drop what no file can have, since the Trainer may be saved."""
        self.close()
        self._replicated = None
        self._step_metrics = StepMetrics()
        vars(self).pop("lending", None)

    @property
    def _module(self) -> Any:
        return self._strategy.lightning_module

    def owners(self) -> list[Any]:
        """The LightningModule, which leads to modules in plain containers, too, such as
        metrics in a dict.
        """
        return [self._module]

    def beside(self) -> list[Any]:
        """The Trainer, its optimizers' groups and schedules, the data module; callbacks
        and data sets of the user.
        """
        trainer = self._strategy.trainer
        roots = [trainer, trainer.datamodule]
        roots += map(groups_of, trainer.optimizers)
        roots += [config.scheduler for config in trainer.lr_scheduler_configs]
        loaders = trainer.fit_loop._combined_loader.flattened
        data_sets = [getattr(loader, "dataset", None) for loader in loaders]
        return [*roots, *of_user([*trainer.callbacks, *data_sets])]

    def replicated_modules(self) -> Sequence[nn.Module]:
        """The LightningModule, whose parts replicas have."""
        return [self._module]

    def optimizers(self) -> Sequence[Any]:
        """Those of the Trainer."""
        return self._strategy.trainer.optimizers  # type: ignore[no-any-return]

    def written(self) -> Walk:
        """All that calls may write, and the metrics, which some calls get themselves.

        Looks copy all metrics.
        """
        roots = self.roots()
        for metric in self._step_metrics.metrics.values():
            roots += metric.modules()
        return Walk(roots, excluded=self.not_lent)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """In the body, which is a look, loggers and profiler are silent, and so is what
        prints beside the progress bar.
        """
        trainer = self._strategy.trainer
        silent: dict[str, Any] = {"profiler": PassThroughProfiler()}
        # A logger writes files and sends numbers, which no journal restores.
        silent["_loggers"] = [Silent(logger) for logger in trainer.loggers]
        parts = self._module.modules()
        printing = [part for part in parts if isinstance(part, LightningModule)]
        printing += [trainer, trainer.progress_bar_callback]
        # First: each call of the look begins with what the journal saves.
        with contextlib.ExitStack() as stack:
            stack.enter_context(overridden(trainer, **silent))
            for owner in printing:
                stack.enter_context(overridden(owner, print=_print_nothing))
            stack.enter_context(super().looking())
            yield

    def training_step(
        self, batch: Any, arguments: Sequence[Any], context: Any, scaler: Any
    ) -> Any:
        """The result of ``training_step`` for the whole batch.

        Args:
            batch: of the loader.
            arguments: those of the method after the batch.
            context: holds for the calls, such as autocast.
            scaler: that of the losses.
        """
        options = dict(self._combination)
        # Backward passes of sub-steps run before the Trainer scales the loss.
        options["scaler"] = scaler
        options["return_outputs"] = itemgetter("call")
        inputs: dict[str, Any] = {"work": self.call}
        inputs["arguments"] = list(arguments)
        inputs["batch"] = as_rows(batch)
        # Calls end in any order of the replicas, and are sorted by their first rows.
        inputs["rows"] = Rows(range(num_rows(batch)))
        self._skips.clear()
        with context, self.without_metrics() as metrics:
            self._step_metrics.begin_step(metrics, self.home)
            try:
                loss, records = self.step(inputs, **options)
            finally:
                self._step_metrics.end_step()
                self._call_results = None  # it has copies of metrics
        calls = sorted(nested.atoms(records), key=attrgetter("first_row"))
        self._collect(calls, metrics)
        # As the stock loop, which then makes no backward pass.
        if True in self._skips:
            return None
        outputs = joined_outputs(calls, self.home)
        outputs["loss"] = loss
        return outputs

    def call(self, work: Any, batch: Any, rows: Any, arguments: Any) -> dict[str, Any]:
        """Call ``training_step`` for a micro-batch.

        Args:
            work: the replica's modules; the LightningModule is the first.
            batch: the micro-batch.
            rows: the numbers of its rows.
            arguments: those of the method after the batch.

        Returns:
            The loss with its graph, and the ``StepCall`` without graphs.
        """
        call = StepCall(rows[0], len(rows))
        if self._count:
            call.weight = self._count(batch)
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

    def _collect(self, calls: Sequence[StepCall], metrics: Mapping[str, Any]) -> None:
        """Update the user's metrics with what calls have measured, and log."""
        single = single_metrics(metrics)
        for place, metric in single.items():
            copies = [call.metrics[place] for call in calls if place in call.metrics]
            merge(metric, copies, self.home)
        self._logged.log(self._module, calls, single)

    @contextlib.contextmanager
    def without_metrics(self) -> Iterator[dict[str, Any]]:
        """In the body the module that is replicated has no metrics: calls update
        copies. Yields its metrics.
        """
        module = self._module
        metrics = metrics_of(module)
        # Lightning notes the names of metrics, which is no change of the module.
        names = overridden(module, _metric_attributes=None)
        with names, placed(module, dict.fromkeys(metrics, NO_METRIC)):
            yield metrics

    @contextlib.contextmanager
    def _in_call(self, work: Any, call: StepCall) -> Iterator[LightningModule]:
        """In the body the call runs. Yields the module whose step function to call."""
        device = self.device_of(work)
        module = self._module
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.in_turn(self.loan_of(work), device))
            in_call = self._step_metrics.of_call(
                module, device, is_first=not call.first_row
            )
            metrics = stack.enter_context(in_call)
            call.places = metrics.places
            for part in module.modules():
                if isinstance(part, LightningModule):
                    stack.enter_context(overridden(part, _device=device))
            # Names of metrics by ``id``, which are copies of this call.
            stack.enter_context(overridden(module, _metric_attributes=None))
            # What it does with logged values.
            to_tensor = partial(_logged_tensor, module._LightningModule__to_tensor)
            methods = {"_LightningModule__to_tensor": to_tensor}
            stack.enter_context(overridden(module, **methods))
            results = self._results_of(call)
            stack.enter_context(results.of_call(self._strategy.trainer, call, device))
            yield module
        # Not in a finally: what a failed call has measured is dropped.
        call.metrics = metrics.updated

    def _results_of(self, call: StepCall) -> CallResults:
        """What ``call`` finds as the results of the Trainer: as earlier calls of the
        step have left them.
        """
        # Each call of a look, and each try at a step, begins with the Trainer's.
        if self._call_results is None or is_look() or not call.first_row:
            self._call_results = CallResults(self._strategy.trainer._results)
        return self._call_results


class PartsOf(nn.Module):
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


def _logged_tensor(
    to_tensor: Callable[[Any, str], Tensor], value: Any, name: str
) -> Tensor:
    """What Lightning makes of a logged value.

    A number stays on the host, which would wait for a device to copy it there.
    """
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=torch.get_default_dtype())
    return to_tensor(value, name)


def _print_nothing(*_: Any, **__: Any) -> None:
    """Print nothing, in the place of ``print`` of Lightning's objects."""


def _terms_of_call(count: Callable[[Any], Any], inputs: Any, _: Any) -> Any:
    """The user's ``count``, of the inputs of the engine."""
    return count(inputs["batch"])


def _zero(work: nn.Module) -> Tensor:
    """A loss of zero, whose gradient is zero."""
    trained = [part for part in work.parameters() if part.requires_grad]
    return trained[0].flatten()[:0].sum()
