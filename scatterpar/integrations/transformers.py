"""``transformers.Trainer``, and Trainers made from it, on all devices of one process.

The stock loop runs as on one device with larger batches. In its steps, calls of the
model are divided::

    trainer.training_step(model, inputs)     # rows of all devices
        outputs = model(**inputs) ---+---- rows 0:m     on the first device
                                     +---- rows m:2m    on the second
        loss = …                             # stock, or the user's own compute_loss
        accelerator.backward(loss)           # adds the devices' gradients in the last
                                             # batch of an optimizer step
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import TrainingArguments

from scatterpar.devices.device_ids import DeviceLike, resolve
from scatterpar.devices.virtual_devices import physical
from scatterpar.integrations.divided_modules import DividedModules
from scatterpar.sharded import ShardedOptimizer

__all__ = ["ScatterOnceMixin", "ScatterOnceTrainer"]

# Arguments that are rows of one device. TRL derives the last from the first when the
# arguments are made.
_ROWS_PER_DEVICE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "generation_batch_size",
)
_Trainer: Any = object  # the subclasses have a Trainer among their other bases


class ScatterOnceMixin(_Trainer):  # type: ignore[misc]
    """Makes another Trainer train on all devices of one process. It must be the first
    base.

    ``class MyTrainer(ScatterOnceMixin, DPOTrainer): pass``. With N replicas and
    ``per_device_train_batch_size=b``, the result is that of the other Trainer on one
    device with ``per_device_train_batch_size=N * b`` and the same
    ``gradient_accumulation_steps``. Its loop, ``compute_loss``, metrics and callbacks
    run once per batch of N * b rows, as they are.

    Args:
        args: as in the other Trainer, like ``kwargs``. ``trainer.args`` is a copy, with
            the numbers of rows of all devices.
        device_ids: as in ``ScatterOnceParallel``; the first is the Trainer's device.
        shard_optimizer: distribute the optimizer's state over the devices
            (``ShardedOptimizer``).

    Raises:
        ValueError: ``device_ids`` that do not begin with the Trainer's device; or what
            does not work in one process that has the whole model: ``torchrun``,
            DeepSpeed, FSDP, a ``device_map`` of several devices, LOMO optimizers.
    """

    optimizer: Any

    def __init__(
        self,
        *args: Any,
        device_ids: Sequence[DeviceLike] | None = None,
        shard_optimizer: bool = False,
        **kwargs: Any,
    ) -> None:
        # The stock constructor calls methods below, which read these.
        self._device_ids = device_ids
        self._shard_optimizer = shard_optimizer
        self._sharded: ShardedOptimizer | None = None
        self._divided: DividedModules | None = None
        # True once the rows of the arguments are those of all devices. A trial of a
        # search sets rows of one device again.
        self._has_all_rows = False
        own_args = [self._with_all_rows(value) for value in args]
        own_kwargs = {name: self._with_all_rows(v) for name, v in kwargs.items()}
        super().__init__(*own_args, **own_kwargs)
        # Attributes hide the methods of the class, also those of a subclass.
        for name in ("training_step", "prediction_step"):
            self.__dict__[name] = partial(self._in_step, getattr(self, name))

    # Arguments: those of one device that takes the rows of all.

    def _with_all_rows(self, value: Any) -> Any:
        """A copy of the Trainer's arguments for the rows of all devices.

        Returns any other value as it is. The user may pass the same arguments to
        another Trainer.
        """
        if not isinstance(value, TrainingArguments):
            return value
        args = copy.copy(value)
        self._multiply_rows(args, len(self._resolved_devices(args)))
        return args

    def _multiply_rows(self, args: Any, factor: int) -> None:
        for name in _ROWS_PER_DEVICE:
            rows = getattr(args, name, None)
            if rows is not None:
                setattr(args, name, rows * factor)
        self._has_all_rows = True

    def _resolved_devices(self, args: Any) -> Sequence[torch.device]:
        """The replicas' devices.

        Raises ``ValueError`` if the Trainer's own device is not the first.
        """
        main = args.device
        device_ids = self._device_ids
        if device_ids is None and main.type == "cpu":
            # The user asked for the CPU, even if there are accelerators.
            device_ids = ["cpu"]
        devices = resolve(device_ids)
        first = physical(devices[0])
        if (first.type, first.index or 0) != (main.type, main.index or 0):
            raise ValueError(
                f"device_ids must begin with the Trainer's own device, {main}, where "
                f"the model is; got {devices[0]} first"
            )
        return devices

    def create_accelerator_and_postprocess(self) -> None:
        """Do what the Trainer does, for the rows of all devices."""
        _refuse_arguments(self.args, self.model)
        devices = self._resolved_devices(self.args)
        # Arguments that the Trainer has made itself, or that a trial has set.
        if not self._has_all_rows:
            self._multiply_rows(self.args, len(devices))
        self.args._n_gpu = min(self.args.n_gpu, 1)  # prevents nn.DataParallel
        self._train_batch_size = self.args.train_batch_size
        super().create_accelerator_and_postprocess()
        # accelerate's own asks the model, but only if there are several processes.
        self.accelerator.no_sync = self._no_sync

    def _hp_search_setup(self, trial: Any) -> None:
        # A trial sets rows of one device.
        if trial is not None and self.hp_search_backend is not None:
            num_devices = len(self._resolved_devices(self.args))
            for name in _ROWS_PER_DEVICE:
                rows = getattr(self.args, name, None)
                if rows is not None:
                    setattr(self.args, name, rows // num_devices)
            self._has_all_rows = False
        super()._hp_search_setup(trial)

    # Steps: calls of the model are divided.

    def _in_step(
        self, step: Any, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``training_step`` or ``prediction_step``, with the model's calls
        divided.
        """
        with self._divided_model(model).step(inputs):
            return step(model, inputs, *args, **kwargs)

    def _divided_model(self, model: nn.Module) -> DividedModules:
        """Find or make the division of this model. A search of hyperparameters replaces
        the model.
        """
        divided = self._divided
        if divided is None or not divided.is_of(model):
            self._close()
            devices = self._resolved_devices(self.args)
            self._divided = divided = DividedModules(model, devices)
        return divided

    def _no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        return self._divided_model(model).no_sync()

    def _close(self) -> None:
        if self._divided is not None:
            self._divided.close()
            self._divided = None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the Trainer's optimizer; with ``shard_optimizer`` as a
        ``ShardedOptimizer``.
        """
        optimizer = super().create_optimizer(*args, **kwargs)
        if not self._shard_optimizer:
            return optimizer
        # accelerate may have wrapped it.
        unwrapped_optimizer = getattr(optimizer, "optimizer", optimizer)
        if unwrapped_optimizer is not self._sharded:
            engine = self._divided_model(self.model).engine
            self._sharded = ShardedOptimizer(engine, lambda _: optimizer)
            self.optimizer = self._sharded
        return self.optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, and close the engine at the end."""
        try:
            return super().train(*args, **kwargs)
        finally:
            # Replicas would keep the memory of their devices as long as the Trainer.
            self._close()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer does; outside of training, close the engine at the
        end.
        """
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            if not self.is_in_train:
                self._close()


class ScatterOnceTrainer(ScatterOnceMixin, transformers.Trainer):
    """``transformers.Trainer`` on all devices of one process: see
    ``ScatterOnceMixin``.

    Checkpoints are exchangeable with those of the stock Trainer.
    """


def _refuse_arguments(args: Any, model: Any) -> None:
    """Refuse what needs other processes, or another owner of the model or its
    gradients.
    """
    optimizer = args.optim.lower()
    device_map = getattr(model, "hf_device_map", None) or {}
    conflicts = {
        "torchrun (several processes)": args.world_size > 1,
        "DeepSpeed": args.deepspeed,
        "FSDP": args.fsdp,
        "a model spread by device_map": len(set(device_map.values())) > 1,
        f"the optimizer {optimizer}, which steps in the backward pass": (
            "lomo" in optimizer
        ),
    }
    for name, is_used in conflicts.items():
        if is_used:
            raise ValueError(
                "ScatterOnceTrainer trains one whole model in one process, and does "
                f"not go together with {name}; use the stock Trainer"
            )
