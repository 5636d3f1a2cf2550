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
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partialmethod
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from scatterpar.batch import nested
from scatterpar.batch.markers import Rows
from scatterpar.devices.device_ids import DeviceLike, physical, resolve
from scatterpar.engine import ScatterOnceParallel
from scatterpar.integrations import loop

__all__ = ["ScatterOnceStrategy"]

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
        ValueError: ``graphs=True``; at ``fit``, what does not work with this strategy:
            manual optimization, sharded parameters, ``sync_batchnorm=True``,
            ``num_nodes`` above 1, ``dataloader_iter``.
    """

    strategy_name = "scatter_once"

    def __init__(
        self,
        device_ids: Sequence[DeviceLike] | None = None,
        accum: Any = 1,
        *,
        count: Callable[[Any], Any] | None = None,
        reduction: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        reason = (
            "it replays kernels without Python, and so without self.log; leave "
            "graphs out"
        )
        loop.refuse(
            "ScatterOnceStrategy", {"graphs=True": options.get("graphs")}, reason
        )
        # the Trainer sets its devices=
        self.parallel_devices: list[torch.device] | None = None
        self._device_ids, self._options = device_ids, {"accum": accum, **options}
        self._count, self._combined = count, dict[str, Any](reduction=reduction)
        if count is not None:
            self._combined["count"] = lambda inputs, _: count(inputs["batch"])
        self._engine: Any = None
        self._until_teardown = contextlib.ExitStack()

    @property
    def root_device(self) -> torch.device:
        """The device of the LightningModule: that of the first replica."""
        return physical(
            resolve(self._device_ids or self.parallel_devices or ["cpu"])[0]
        )

    def setup(self, trainer: Trainer) -> None:
        """Do what ``SingleDeviceStrategy`` does, and make the engine."""
        module: Any = self.lightning_module
        if trainer.training:
            _refuse(trainer, module)
            norms = (
                m
                for m in module.modules()
                if isinstance(m, nn.modules.batchnorm._BatchNorm)
            )
            if "buffers" not in self._options and any(
                m.track_running_stats for m in norms
            ):
                warnings.warn(
                    "the model has batch normalisation, which sees one micro-batch at "
                    "a time; pass "
                    'buffers="batch" for running statistics of all rows of a batch, '
                    'or "master" '
                    "for those of replica 0",
                    stacklevel=2,
                )
        super().setup(trainer)
        enter = self._until_teardown.enter_context
        # torch.compile(module): replicas compile forward
        if compiled := module._compiler_ctx:
            steps = {name: compiled[f"original_{name}"] for name in _STEPS}
            impl = compiled["dynamo_ctx"](module._call_impl)
            own = {"_compiler_ctx": None, "_compiled_call_impl": impl}
            enter(loop.overridden(module, **steps, **own))
        modules, devices = (
            loop.Modules([module]),
            self._device_ids or self.parallel_devices,
        )
        self._engine = enter(
            ScatterOnceParallel(modules, device_ids=devices, **self._options)
        )

    def teardown(self) -> None:
        """Close the engine, and do what ``SingleDeviceStrategy`` does."""
        self._until_teardown.close()
        self._engine = None
        super().teardown()

    def batch_to_device(
        self, batch: Any, device: Any = None, dataloader_idx: int = 0
    ) -> Any:
        """Run the hooks on batch transfer, but leave the batch on the host; the engine
        scatters.
        """
        return super().batch_to_device(batch, torch.device("cpu"), dataloader_idx)

    def training_step(self, batch: Any, *rest: Any, **_: Any) -> Any:
        """Compute the whole batch's loss, with ``training_step`` on the replicas."""
        plugin = self.precision_plugin
        options = {"scaler": getattr(plugin, "scaler", None), **self._combined}
        with (
            plugin.train_step_context(),
            self._inputs("training_step", batch, rest) as inputs,
        ):
            loss, calls = self._engine.loss(
                inputs, return_outputs=itemgetter("call"), **options
            )
        return {**self._finish(calls), "loss": loss}

    def _evaluate(self, step: str, batch: Any, *rest: Any, **_: Any) -> Any:
        context = self.precision_plugin.forward_context()
        with context, torch.no_grad(), self._inputs(step, batch, rest) as inputs:
            calls = self._engine(inputs.pop("work"), **inputs)["call"]
        return self._finish(calls)

    validation_step = partialmethod(_evaluate, "validation_step")
    test_step = partialmethod(_evaluate, "test_step")
    predict_step = partialmethod(_evaluate, "predict_step")

    @contextlib.contextmanager
    def _inputs(
        self, step: str, batch: Any, rest: Sequence[Any]
    ) -> Iterator[dict[str, Any]]:
        """The engine's inputs for method ``step``; in the body the module has no
        metrics.
        """
        by_path = _metrics_of(self.lightning_module)
        with _placed(self.lightning_module, dict.fromkeys(by_path, nn.Identity())):
            call = {
                "work": self._call,
                "step": step,
                "rest": list(rest),
                "measures": by_path,
            }
            rows = {
                "batch": loop.as_rows(batch),
                "rows": Rows(range(loop.num_rows(batch))),
            }
            yield call | rows

    def _finish(self, outputs: Any) -> Any:
        """Transfer what calls left on replicas to the module. Returns their outputs,
        joined.
        """
        module, device = self.lightning_module, self.root_device
        calls, by_path = nested.leaves(outputs), _single(_metrics_of(module))
        for path, metric in by_path.items():
            _merge(
                metric,
                [call.metrics[path] for call in calls if path in call.metrics],
                device,
            )
        logged = defaultdict(list)
        for call in calls:
            loop.add(module, call.added)
            for key, (value, options) in call.logged.items():
                logged[key].append((call, value, options))
        for (name, _), entries in logged.items():
            self._log(name, entries, by_path)
        outputs = [
            nested.map_tensors(lambda t: t.to(device), call.output) for call in calls
        ]
        weights, rows = (
            [float(call.weight) for call in calls],
            [call.rows for call in calls],
        )

        def joined(pieces: list[Any]) -> Any:
            try:
                return nested.join_rows(pieces, 0, weights, rows, lists="if clear")
            except ValueError:  # such as tensors without rows
                return pieces

        return nested.merge(
            joined, outputs, lambda pieces: not isinstance(pieces[0], Mapping)
        )

    def _call(
        self, work: Any, batch: Any, rows: Any, step: str, rest: Any, measures: Any
    ) -> Any:
        """The loss of one micro-batch, and what the call left on its replica, without
        graphs.
        """
        module: Any = work[0]
        device = next((p.device for p in module.parameters()), module.device)
        by_path = {path: _emptied(one).to(device) for path, one in measures.items()}
        # by name, and by how often it had been logged
        logged: dict[tuple[str, int], Any] = {}

        def log(*args: Any, **options: Any) -> None:  # later, once for all calls
            bound = (
                inspect.signature(LightningModule.log)
                .bind(module, *args, **options)
                .arguments
            )
            _, name, value = map(bound.pop, ("self", "name", "value"))
            times = sum(name == other for other, _ in logged)
            is_tensor = isinstance(value, Tensor)
            value = (
                value.detach().squeeze()
                if is_tensor
                else paths.get(id(value)) or float(value)
            )
            logged[name, times] = value, bound

        paths = {id(metric): path for path, metric in _single(by_path).items()}
        own = loop.overridden(module, log=log, _device=device)
        with own, _placed(module, by_path), loop.additions(module) as added:
            output, loss = getattr(module, step)(batch, *rest), None
        if step == "training_step":
            output = {**output} if isinstance(output, Mapping) else {"loss": output}
            loss = output.pop("loss", None)
            if not isinstance(loss, Tensor):
                raise ValueError(
                    f"training_step returned {loss!r} as the loss of a micro-batch, "
                    "and no part of "
                    "a batch can be skipped; return a loss that is zero, such as "
                    "(output * 0).sum()"
                )
        output, metrics = nested.map_tensors(Tensor.detach, output), _updated(by_path)
        call = SimpleNamespace(
            logged=logged, added=added, metrics=metrics, output=output
        )
        call.rows, call.weight = (
            len(rows),
            self._count(batch) if self._count else len(rows),
        )
        return {"loss": loss, "call": call}

    def _log(
        self, name: str, entries: Sequence[Any], by_path: Mapping[str, Metric]
    ) -> None:
        """Log once, for the whole batch, what calls logged under ``name``: values, or a
        metric.
        """
        _, logged, options = entries[-1]
        if isinstance(logged, str):  # the path of a metric
            self.lightning_module.log(name, by_path[logged], **options)
            return
        values = [
            torch.as_tensor(value).to(self.root_device) for _, value, _ in entries
        ]
        size = sum(one.get("batch_size") or call.rows for call, _, one in entries)
        weights = [
            float(one.get("batch_size") or call.weight) for call, _, one in entries
        ]
        reduction = options.get("reduce_fx", "mean")
        reduce = _REDUCTIONS.get(getattr(reduction, "__name__", reduction))
        value = (
            reduce(torch.stack(values))
            if reduce
            else nested.join_rows(values, 0, weights)
        )
        self.lightning_module.log(name, value, **options | {"batch_size": size})


def _refuse(trainer: Trainer, module: LightningModule) -> None:
    """Raise ``ValueError`` for what this strategy does not support."""
    options, step = trainer._accelerator_connector, module.training_step
    given = {
        "manual optimization (automatic_optimization=False)": not module.automatic_optimization,
        "sharded parameters": any(
            type(p).__name__ == "DTensor" for p in module.parameters()
        ),
        "sync_batchnorm=True": options._layer_sync is not None,
        "num_nodes above 1": options._num_nodes_flag > 1,
        "training_step(dataloader_iter)": is_param_in_hook_signature(
            step, "dataloader_iter", True
        ),
    }
    reason = (
        "it trains one whole model in one process, by the losses that "
        "training_step returns"
    )
    loop.refuse(
        "ScatterOnceStrategy", given, f"{reason}; use a strategy of Lightning's"
    )


# Metrics of torchmetrics: each call updates empty copies, whose states are merged in
# row order.


def _metrics_of(module: nn.Module) -> dict[str, Any]:
    """The outermost metrics and collections of metrics in ``module``, by path."""
    modules = dict(module.named_modules(remove_duplicate=False))
    paths = [
        path for path, m in modules.items() if isinstance(m, (Metric, MetricCollection))
    ]
    inside = {path for path in paths for outer in paths if path.startswith(f"{outer}.")}
    return {path: modules[path] for path in paths if path not in inside}


def _single(metrics: Mapping[str, Any]) -> dict[str, Metric]:
    """All single metrics by path, including those in collections and in
    other metrics.
    """
    return {
        path: metric
        for prefix, one in metrics.items()
        for path, metric in one.named_modules(prefix=prefix)
        if isinstance(metric, Metric)
    }


@contextlib.contextmanager
def _placed(module: nn.Module, metrics: Mapping[str, Any]) -> Iterator[None]:
    """In the body, ``module`` has ``metrics`` at their paths, instead of
    what is there.
    """
    before = {path: module.get_submodule(path) for path in metrics}
    for path, metric in metrics.items():
        module.set_submodule(path, metric)
    try:
        yield
    finally:
        for path, metric in before.items():
            module.set_submodule(path, metric)


def _emptied(metric: Any) -> Any:
    """A copy of ``metric`` without state, which may be large and is not copied."""
    memo: dict[int, Any] = {}
    for one in _single({"": metric}).values():
        states = [getattr(one, name) for name in one._defaults]
        memo |= {id(value): [] for value in states if isinstance(value, list)}
        memo |= {id(value): None for value in (one._forward_cache, one._computed)}
    copied = copy.deepcopy(metric, memo)
    copied.reset()
    return copied


def _updated(metrics: Mapping[str, Any]) -> dict[str, Metric]:
    """The single metrics that were updated, by path."""
    for part in nn.ModuleList(metrics.values()).modules():
        # gives all members of a group the shared state
        if isinstance(part, MetricCollection):
            part.values(copy_state=False)
    return {
        path: metric
        for path, metric in _single(metrics).items()
        if metric._update_count
    }


def _merge(metric: Metric, copies: Sequence[Metric], device: torch.device) -> None:
    """Merge states of ``copies`` into ``metric``. Raises ``ValueError`` if torchmetrics
    cannot.
    """
    step = _emptied(metric)  # for the value of the step: with the copies' states alone
    for copied in copies:
        for name, value in copied.metric_state.items():
            if metric._reductions[name] is None and isinstance(value, Tensor):
                raise ValueError(
                    f"the state {name!r} of {type(metric).__name__} cannot be merged "
                    "with another; "
                    "return predictions and targets, and update it in "
                    "on_train_batch_end"
                )
        states = nested.map_tensors(
            lambda t: t.detach().to(device), copied.metric_state
        )
        for target in (metric, step):
            before = target.metric_state
            for name, value in states.items():
                setattr(target, name, value)
            target._update_count += copied._update_count
            # the earlier state comes first, then the copy's
            target._reduce_states(before)
            target._computed = None
    if any(copied._forward_cache is not None for copied in copies):
        metric._forward_cache = step.compute()
