"""Lightning's ``Trainer`` on all devices of one process.

``training_step`` runs for every micro-batch, on a replica of the LightningModule. The Trainer gets
the loss of the whole batch, whose backward pass adds the gradient of the whole batch. The Trainer
does everything else: order of the hooks, optimizers, schedules, callbacks, checkpoints.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partialmethod
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from scatterpar.batch import nested
from scatterpar.batch.markers import Rows
from scatterpar.devices.runtime import DeviceLike, physical, resolve
from scatterpar.engine import ScatterOnceParallel
from scatterpar.integrations import loop, metrics

__all__ = ["ScatterOnceStrategy"]

_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_REDUCTIONS: dict[Any, Any] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}


class ScatterOnceStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Trains a LightningModule on all devices of one process, with the gradient of one device.

    For the ``Trainer`` of ``lightning.pytorch``, whose ``world_size`` is then 1. Each batch of the
    loader is divided among the replicas. Validation, test and prediction run on all replicas, too.
    The LightningModule must use automatic optimization, and needs no change.

    Args:
        device_ids: one entry per replica, as in ``ScatterOnceParallel``. By default the devices
            that ``devices=`` of the ``Trainer`` names.
        accum: sub-steps per replica, as in ``ScatterOnceParallel``.
        count: ``count(batch)`` returns the number of terms that the mean loss of
            ``training_step`` averages over in ``batch``. By default the number of rows.
        reduction: ``"sum"`` if ``training_step`` returns the sum of its terms.
        options: further arguments of ``ScatterOnceParallel``, such as ``buffers="batch"``.

    Raises:
        ValueError: ``graphs=True``; at ``fit``, what does not work with this strategy: manual
            optimization, sharded parameters, ``sync_batchnorm=True``, ``num_nodes`` above 1,
            ``dataloader_iter``.
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
        reason = "it replays kernels without Python, and so without self.log; leave graphs out"
        loop.refuse("ScatterOnceStrategy", {"graphs=True": options.get("graphs")}, reason)
        self.parallel_devices: list[torch.device] | None = None  # the Trainer sets its devices=
        self._device_ids, self._options = device_ids, {"accum": accum, **options}
        self._count, self._reduction = count, reduction
        self._engine: Any = None
        self._until_teardown = contextlib.ExitStack()

    @property
    def root_device(self) -> torch.device:
        """The device of the LightningModule: that of the first replica."""
        return physical(resolve(self._device_ids or self.parallel_devices or ["cpu"])[0])

    def setup(self, trainer: Trainer) -> None:
        """Do what ``SingleDeviceStrategy`` does, and make the engine."""
        module: Any = self.lightning_module
        if trainer.training:
            _refuse(trainer, module)
            if "buffers" not in self._options and any(map(_normalises_batches, module.modules())):
                warnings.warn(_BATCH_NORM, stacklevel=2)
        super().setup(trainer)
        enter = self._until_teardown.enter_context
        if compiled := module._compiler_ctx:  # torch.compile(module): replicas compile forward
            steps = {name: compiled[f"original_{name}"] for name in _STEPS}
            impl = compiled["dynamo_ctx"](module._call_impl)
            own = {"_compiler_ctx": None, "_compiled_call_impl": impl}
            enter(loop.overridden(module, **steps, **own))
        modules, devices = loop.Modules([module]), self._device_ids or self.parallel_devices
        self._engine = enter(ScatterOnceParallel(modules, device_ids=devices, **self._options))

    def teardown(self) -> None:
        """Close the engine, and do what ``SingleDeviceStrategy`` does."""
        self._until_teardown.close()
        self._engine = None
        super().teardown()

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Run the hooks on batch transfer, but leave the batch on the host; the engine scatters."""
        return super().batch_to_device(batch, torch.device("cpu"), dataloader_idx)

    # The steps.

    def training_step(self, batch: Any, *rest: Any, **_: Any) -> Any:
        """Compute the whole batch's loss, with ``training_step`` on the replicas."""
        plugin, step, count = self.precision_plugin, "training_step", self._count
        with plugin.train_step_context(), self._inputs(step, batch, rest) as inputs:
            loss, calls = self._engine.loss(
                inputs,
                reduction=self._reduction,
                count=None if count is None else lambda inputs, _: count(inputs["batch"]),
                scaler=getattr(plugin, "scaler", None),
                return_outputs=itemgetter("call"),
            )
        extras = self._finish(calls)
        return loss if extras is None else {**extras, "loss": loss}

    def _evaluate(self, step: str, batch: Any, *rest: Any, **_: Any) -> Any:
        stage = {"validation_step": "val_step"}.get(step, step)
        context = getattr(self.precision_plugin, f"{stage}_context")()
        with context, torch.no_grad(), self._inputs(step, batch, rest) as inputs:
            calls = self._engine(inputs.pop("work"), **inputs)["call"]
        return self._finish(calls)

    validation_step = partialmethod(_evaluate, "validation_step")
    test_step = partialmethod(_evaluate, "test_step")
    predict_step = partialmethod(_evaluate, "predict_step")

    @contextlib.contextmanager
    def _inputs(self, step: str, batch: Any, rest: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """The engine's inputs for method ``step``; in the body the module has no metrics."""
        module = self.lightning_module
        by_path = metrics.metrics_of(module)
        with metrics.placed(module, dict.fromkeys(by_path, metrics.ABSENT)):
            call = {"work": self._call, "step": step, "rest": list(rest), "measures": by_path}
            rows = {"batch": loop.as_rows(batch), "rows": Rows(range(loop.num_rows(batch)))}
            yield call | rows

    def _finish(self, outputs: Any) -> Any:
        """Transfer what calls left on replicas to the module. Returns their outputs, joined."""
        module, device = self.lightning_module, self.root_device
        calls = sorted(nested.leaves(outputs), key=attrgetter("rows"))
        by_path = metrics.single(metrics.metrics_of(module))
        for path, metric in by_path.items():
            copies = [call.metrics[path] for call in calls if path in call.metrics]
            metrics.merge(metric, copies, device)
        logged = defaultdict(list)
        for call in calls:
            call.additions.add_to(module)
            for key, (value, options) in call.logged.items():
                logged[key].append((call, value, options))
        for (name, _), entries in logged.items():
            self._log(name, entries, by_path)
        outputs = [nested.map_tensors(lambda t: t.to(device), call.output) for call in calls]
        weights = [float(call.weight) for call in calls]
        return _joined(outputs, weights, [len(call.rows) for call in calls])

    def _call(self, work: Any, batch: Any, rows: Any, step: str, rest: Any, measures: Any) -> Any:
        """The loss of one micro-batch, and what the call left on its replica, without graphs."""
        module: Any = work[0]
        device = next((p.device for p in module.parameters()), module.device)
        by_path = {path: metrics.emptied(one).to(device) for path, one in measures.items()}
        additions, loss = loop.Additions(module), None
        logged: dict[tuple[str, int], Any] = {}  # by name, and by how often it had been logged
        count = self._count or (lambda _: len(rows))  # the terms of a mean over the call

        def log(*args: Any, **options: Any) -> None:  # later, once for all calls
            bound = inspect.signature(LightningModule.log).bind(None, *args, **options).arguments
            del bound["self"]
            name, value = bound.pop("name"), bound.pop("value")
            times = sum(name == other for other, _ in logged)
            is_tensor = isinstance(value, Tensor)
            value = value.detach().squeeze() if is_tensor else paths.get(id(value)) or float(value)
            logged[name, times] = value, bound

        paths = {id(metric): path for path, metric in metrics.single(by_path).items()}
        with loop.overridden(module, log=log, _device=device), metrics.placed(module, by_path):
            output = getattr(module, step)(batch, *rest)
        if step == "training_step":
            loss, output = _split(output)
        call = SimpleNamespace(rows=rows, weight=count(batch), logged=logged)
        call.additions, call.metrics = additions.end(module), metrics.updated(by_path)
        call.output = nested.map_tensors(Tensor.detach, output)
        return {"loss": loss, "call": call}

    def _log(self, name: str, entries: Sequence[Any], by_path: Mapping[str, Metric]) -> None:
        """Log once, for the whole batch, what calls logged under ``name``: values, or a metric."""
        _, logged, options = entries[-1]
        if isinstance(logged, str):  # the path of a metric
            self.lightning_module.log(name, by_path[logged], **options)
            return
        values = [torch.as_tensor(value).to(self.root_device) for _, value, _ in entries]
        size = sum(one.get("batch_size") or len(call.rows) for call, _, one in entries)
        weights = [float(one.get("batch_size") or call.weight) for call, _, one in entries]
        reduction = options.get("reduce_fx", "mean")
        reduce = _REDUCTIONS.get(getattr(reduction, "__name__", reduction))
        value = reduce(torch.stack(values)) if reduce else nested.join_rows(values, 0, weights)
        self.lightning_module.log(name, value, **options | {"batch_size": size})


def _split(output: Any) -> tuple[Tensor, Any]:
    """Split what ``training_step`` returned into the loss and the rest."""
    extras = {**output} if isinstance(output, Mapping) else None
    loss = output if extras is None else extras.pop("loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"training_step returned {loss!r} as the loss of a micro-batch, and no part of a batch "
            f"can be skipped; return a loss that is zero, such as (output * 0).sum()"
        )
    return loss, extras


def _joined(outputs: Sequence[Any], weights: Sequence[float], rows: Sequence[int]) -> Any:
    """The outputs of calls as one: rows joined, numbers averaged, a list of anything else."""
    if isinstance(outputs[0], Mapping):
        return {k: _joined([one[k] for one in outputs], weights, rows) for k in outputs[0]}
    try:
        return nested.join_rows(outputs, 0, weights, rows, lists="if clear")
    except ValueError:  # such as tensors without rows
        return list(outputs)


def _normalises_batches(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats


def _refuse(trainer: Trainer, module: LightningModule) -> None:
    """Raise ``ValueError`` for what this strategy does not support."""
    options, step = trainer._accelerator_connector, module.training_step
    given = {
        "manual optimization (automatic_optimization=False)": not module.automatic_optimization,
        "sharded parameters": any(type(p).__name__ == "DTensor" for p in module.parameters()),
        "sync_batchnorm=True": options._layer_sync is not None,
        "num_nodes above 1": options._num_nodes_flag > 1,
        "training_step(dataloader_iter)": is_param_in_hook_signature(step, "dataloader_iter", True),
    }
    reason = "it trains one whole model in one process, by the losses that training_step returns"
    loop.refuse("ScatterOnceStrategy", given, f"{reason}; use a strategy of Lightning's")


_BATCH_NORM = (
    "the model has batch normalisation, which sees one micro-batch at a time; pass buffers="
    '"batch" for running statistics of all rows of a batch, or "master" for those of replica 0'
)
