"""Lightning's ``Trainer`` on all devices of one process.

The Trainer's loop runs as with one device, and calls the LightningModule's own step
functions once per batch. Meanwhile the networks that these call are divided::

    module.training_step(batch, …)       # the user's, in the user's thread
        self.net(images) ---+---- rows 0:m     on the first device
                            +---- rows m:2m    on the second
        self.log(…)
    strategy.backward(loss)              # adds the devices' gradients, unless the
                                         # Trainer accumulates
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partialmethod
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torchmetrics import Metric

from scatterpar.devices.device_ids import DeviceLike, resolve
from scatterpar.devices.virtual_devices import physical
from scatterpar.integrations.divided_modules import DividedModules

__all__ = ["ScatterOnceStrategy"]

_METHODS_OF_STEPS = (
    "forward",
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
)


class ScatterOnceStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Trains a LightningModule on all devices of one process.

    For the ``Trainer`` of ``lightning.pytorch``, whose ``world_size`` is then 1. Calls
    of the LightningModule's networks are divided: the rows of each batch of the loader
    are computed by all devices. Everything else is computed once, as with one device:
    step functions, losses, metrics, ``self.log``, callbacks, manual optimization. So
    the result is that of one device with the same loader.

    Args:
        device_ids: as in ``ScatterOnceParallel``. By default the devices that
            ``devices=`` of the ``Trainer`` names.

    Raises:
        ValueError: at ``fit``, ``sync_batchnorm=True`` or ``num_nodes`` above 1.
    """

    strategy_name = "scatter_once"

    def __init__(self, device_ids: Sequence[DeviceLike] | None = None) -> None:
        super().__init__()
        # The Trainer sets this to the devices that its devices= names.
        self.parallel_devices: list[torch.device] | None = None
        self._device_ids = device_ids
        self._divided: DividedModules | None = None
        self._until_teardown = contextlib.ExitStack()
        # What ``pre_backward`` begins. After an error nobody calls ``post_backward``.
        self._until_backward_ends = contextlib.ExitStack()

    @property
    def root_device(self) -> torch.device:
        """The device of the LightningModule: that of the first replica."""
        if self._divided is not None:  # it is asked for in each batch
            return physical(self._divided.device_ids[0])
        return physical(self._resolved_devices()[0])

    def _resolved_devices(self) -> Sequence[torch.device]:
        return resolve(self._device_ids or self.parallel_devices or ["cpu"])

    def setup(self, trainer: Trainer) -> None:
        """Do what ``SingleDeviceStrategy`` does, and divide the calls of networks."""
        _refuse_trainer(trainer)
        super().setup(trainer)
        module: Any = self.lightning_module
        devices = self._resolved_devices()
        self._divided = divided = DividedModules(
            module, devices, is_owner=True, excluded=(Metric,)
        )
        if module._compiler_ctx:
            compiled = _networks_compiled(module, divided.models())
            self._until_teardown.enter_context(compiled)

    def teardown(self) -> None:
        """Close the engine, and do what ``SingleDeviceStrategy`` does."""
        self._until_backward_ends.close()
        # Before the module goes to the host: replicas read its tensors.
        if self._divided is not None:
            self._divided.close()
            self._divided = None
        self._until_teardown.close()
        super().teardown()

    def _step(self, name: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a step function of the LightningModule, whose networks are divided."""
        function = getattr(super(), name)
        # The user may have caught an error of the last backward pass.
        self._until_backward_ends.close()
        if self._divided is None:  # a callback calls it after the end
            return function(batch, *args, **kwargs)
        with self._divided.step(batch):
            return function(batch, *args, **kwargs)

    training_step = partialmethod(_step, "training_step")
    validation_step = partialmethod(_step, "validation_step")
    test_step = partialmethod(_step, "test_step")
    predict_step = partialmethod(_step, "predict_step")

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Decide whether the backward pass adds the devices' gradients.

        Those of an optimizer step are added once, in its last batch. With manual
        optimization nobody knows which is the last: each backward pass adds its own.
        """
        super().pre_backward(closure_loss)
        divided = self._divided
        if divided is None:
            return
        module: Any = self.lightning_module
        accumulates = module.automatic_optimization and (
            module.trainer.fit_loop._should_accumulate()
        )
        if accumulates:
            self._until_backward_ends.enter_context(divided.no_sync())
        # Activation checkpoints call networks again.
        self._until_backward_ends.enter_context(divided.step(goes_on=True))

    def post_backward(self, closure_loss: Tensor) -> None:
        """The backward pass is over."""
        self._until_backward_ends.close()
        super().post_backward(closure_loss)


@contextlib.contextmanager
def _networks_compiled(module: Any, networks: Sequence[nn.Module]) -> Iterator[None]:
    """In the body, the networks of ``torch.compile(module)`` are compiled, and its step
    functions run as they are.

    torch's compiler does not ask who runs the calls of a module. Lightning has put
    compiled functions in the places of the module's methods.
    """
    compiled = module._compiler_ctx
    run_compiled = compiled["dynamo_ctx"]
    methods: dict[str, Any] = {}
    for name in _METHODS_OF_STEPS:
        methods[name] = vars(module).pop(name)
        vars(module)[name] = compiled[f"original_{name}"]
    eager = [network for network in networks if network._compiled_call_impl is None]
    for network in eager:
        network._compiled_call_impl = run_compiled(network._call_impl)
    try:
        yield
    finally:
        vars(module).update(methods)
        for network in eager:
            network._compiled_call_impl = None


def _refuse_trainer(trainer: Trainer) -> None:
    """Raise ``ValueError`` for what needs several processes."""
    # Read here, because a strategy is not told of these arguments.
    settings = trainer._accelerator_connector
    conflicts = {
        "sync_batchnorm=True": settings._layer_sync is not None,
        "num_nodes above 1": settings._num_nodes_flag > 1,
    }
    for name, is_used in conflicts.items():
        if is_used:
            raise ValueError(
                "ScatterOnceStrategy trains one whole model in one process, and does "
                f"not go together with {name}; use a strategy of Lightning's"
            )
