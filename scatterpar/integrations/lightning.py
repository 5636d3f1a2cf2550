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
from collections.abc import Callable, Iterator, Sequence
from functools import partial, partialmethod
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from scatterpar.devices.device_ids import DeviceLike, resolve
from scatterpar.devices.virtual_devices import physical
from scatterpar.engine import ScatterOnceParallel
from scatterpar.integrations.lightning_loop import OF_LOOP, ModuleLoop, PartsOf
from scatterpar.integrations.lightning_metrics import called_at_home, updated_at_home
from scatterpar.loops.arguments import check_count, refuse, warn_of_batch_norm
from scatterpar.loops.evaluation import Evaluation
from scatterpar.loops.modules import Modules, overridden
from scatterpar.step.request import Accum, Reduction

__all__ = ["ScatterOnceStrategy"]

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
_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


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
        self._loop = ModuleLoop(self, count, reduction)
        # That of this strategy: ``trainer`` of the module may be another, which a
        # callback has made for an evaluation.
        self.trainer: Any = None
        self._until_teardown = contextlib.ExitStack()
        # The present one, and the device of its batch that was transferred last.
        self._evaluation: Any = None
        self._device_of_batch: torch.device | None = None

    @property
    def root_device(self) -> torch.device:
        """The device of the LightningModule: that of the first replica."""
        device_ids = resolve(self._device_ids or self.parallel_devices or ["cpu"])
        return physical(device_ids[0])

    def setup(self, trainer: Trainer) -> None:
        """Do what ``SingleDeviceStrategy`` does, and make the engine."""
        module: Any = self.lightning_module
        self.trainer = trainer
        if trainer.training:
            _refuse(trainer, module)
            if "buffers" not in self._options:
                warn_of_batch_norm(module)
            self._loop.let_take_turns([module.training_step])
        # Replicas are made of the module where it is from now on: on its device.
        super().setup(trainer)
        if module._compiler_ctx:
            self._until_teardown.enter_context(_replicas_compiled(module))
        replicated = PartsOf(module)
        engine = ScatterOnceParallel(
            Modules([(type(module).__name__, replicated)]),
            device_ids=self._device_ids or self.parallel_devices,
            # A replay runs no Python, and so no ``self.log``.
            **{"graphs": False, **self._options},
        )
        self._loop.begin(self.root_device)
        self._loop.begin_training(engine, replicated)

    def teardown(self) -> None:
        """Close the engine, and do what ``SingleDeviceStrategy`` does."""
        # Before the module goes to the host: replicas read its tensors.
        self._loop.end()
        self._until_teardown.close()
        self._evaluation = None
        self.trainer = None
        super().teardown()

    def batch_to_device(
        self, batch: Any, device: Any = None, dataloader_idx: int = 0
    ) -> Any:
        """Run the hooks on batch transfer.

        In training the batch stays on the host: the engine copies the rows of each
        replica to its device. In an evaluation the devices get whole batches in turn.
        """
        device = torch.device("cpu")
        if not self.trainer.training:
            self._device_of_batch = self._evaluation.next_device()
            device = physical(self._device_of_batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    # Training.

    def training_step(self, batch: Any, *arguments: Any, **options: Any) -> Any:
        """Compute the whole batch's loss, with ``training_step`` on the replicas.

        When the training has ended, on the module's device alone.
        """
        if self._loop.engine is None:
            return super().training_step(batch, *arguments, **options)
        precision = self.precision_plugin
        context = precision.train_step_context()
        scaler = getattr(precision, "scaler", None)
        return self._loop.training_step(batch, arguments, context, scaler)

    # Evaluation.

    def _begin_evaluation(self) -> None:
        """The loop begins, from the first device on."""
        module = self.lightning_module
        engine = self._loop.engine
        assert engine is not None
        self._evaluation = Evaluation(engine, [module], excluded=OF_LOOP)
        self._device_of_batch = None

    on_validation_start = _begin_evaluation
    on_test_start = _begin_evaluation
    on_predict_start = _begin_evaluation

    def _evaluate(self, step: str, *arguments: Any, **options: Any) -> Any:
        """Call a step function for a batch: on the device that has the batch."""
        home = self._evaluation.home
        # A batch that the loop does not transfer is on the first device.
        device = self._device_of_batch or home
        self._device_of_batch = None
        function = getattr(super(), step)
        with self._in_turn(device, home):
            output = function(*arguments, **options)
        return self._evaluation.brought_home(output, device)

    validation_step = partialmethod(_evaluate, "validation_step")
    test_step = partialmethod(_evaluate, "test_step")
    predict_step = partialmethod(_evaluate, "predict_step")

    @contextlib.contextmanager
    def _in_turn(self, device: torch.device, home: torch.device) -> Iterator[None]:
        """In the body the module has the tensors of a replica.

        Metrics and logged values stay on the first device.
        """
        module = self.lightning_module
        results = self.trainer._results
        with self._loop.without_metrics() as metrics:  # replicas have none
            turn = self._evaluation.turn(device)
        if device == home:
            with turn:
                yield
            return
        log = partial(called_at_home, module.log, device, home)
        with (
            turn,
            overridden(module, _device=physical(device), log=log),
            updated_at_home(metrics, device, home),
        ):
            yield
        # Numbers are logged on the module's device.
        if results is not None and physical(device) != self.root_device:
            results.to(self.root_device)


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
