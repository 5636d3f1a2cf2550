"""``transformers.Trainer`` on all devices of one process, with the gradient of one
device.

The loader collates all rows of an optimizer step as a list of batches, for which the
stock ``training_step`` runs once. Meanwhile ``compute_loss`` is ``engine.loss``: the
Trainer's own ``compute_loss`` runs for each batch on a replica. In an evaluation each
replica runs the Trainer's own ``prediction_step`` for a batch. Everything else is the
stock Trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from scatterpar.devices.device_ids import DeviceLike, resolve
from scatterpar.devices.virtual_devices import physical
from scatterpar.errors import warn
from scatterpar.integrations import step_batches
from scatterpar.integrations.step_batches import SUM
from scatterpar.integrations.trainer_arguments import (
    changed_class,
    changed_number,
    own_arguments,
    with_user_values,
)
from scatterpar.integrations.trainer_loop import TrainerLoop, loss_class
from scatterpar.loops.arguments import check_count, refuse, warn_of_batch_norm
from scatterpar.loops.evaluation import BatchesAhead
from scatterpar.loops.modules import overridden
from scatterpar.loops.user_functions import of_user
from scatterpar.objects.whose import is_user_function
from scatterpar.sharded import ShardedOptimizer
from scatterpar.step.request import Buffers, Reduction

__all__ = ["ScatterOnceMixin", "ScatterOnceTrainer"]

_ROWS = "per_device_train_batch_size"
_BATCHES = "gradient_accumulation_steps"
_REFERENCE_ROWS = "precompute_ref_batch_size"
# TRL's trainers whose losses of batches combine into that of all, except with these
# loss types.
_OF_TRL = {
    "SFTTrainer": [],
    "RewardTrainer": [],
    "KTOTrainer": ["kto"],
    "DPOTrainer": ["sft", "aot", "aot_unpaired", "bco_pair"],
}
_Trainer: Any = object  # the subclasses have a Trainer among their other bases


class ScatterOnceMixin(_Trainer):  # type: ignore[misc]
    """Makes another Trainer train as ``ScatterOnceTrainer`` does. It must be the first
    base.

    ``class MyTrainer(ScatterOnceMixin, DPOTrainer): pass``. The other Trainer's
    ``compute_loss`` is called for every batch, in the thread of a replica. If you have
    defined it, it is called on your own Trainer, for one batch at a time, in their
    order; meanwhile the Trainer refers to the replica's modules. ``training_step`` is
    called once per step, with a list of all its batches. ``trainer.args`` is a copy:
    the arguments of one device that takes all rows of a step at once.

    Raises:
        ValueError: as ``ScatterOnceTrainer``; a trainer or loss type of TRL for which
            the losses of batches do not combine into the loss of all.
    """

    optimizer: Any
    _kind_of_loop: type[TrainerLoop] = TrainerLoop

    def __init__(
        self,
        *args: Any,
        device_ids: Sequence[DeviceLike] | None = None,
        shard_optimizer: bool = False,
        count: Callable[[Any], float | Tensor] | None = None,
        reduction: Reduction | None = None,
        buffers: Buffers = "master",
        **kwargs: Any,
    ) -> None:
        _check_combination(count, reduction)
        # The stock constructor calls methods below, which read these.
        self._device_ids = device_ids
        self._shard_optimizer = shard_optimizer
        self._loop = self._kind_of_loop(self, buffers)
        # The user may pass the same arguments to a stock Trainer, too.
        copied_args = [own_arguments(value) for value in args]
        copied_kwargs = {name: own_arguments(v) for name, v in kwargs.items()}
        super().__init__(*copied_args, **copied_kwargs)
        # Only now: TRL's constructors set the type of loss.
        if self._loop.is_of_trl:
            _refuse_losses(self)
        self._loop.count = SUM if reduction == "sum" else count
        self._loop.is_mean = reduction == "mean"  # else looks find it out
        # Attributes hide the methods of the class, also from a user's training_step.
        self.__dict__["compute_loss"] = self._loop.loss_of_inputs
        self.__dict__["_prepare_inputs"] = self._loop.prepared
        self.__dict__["_get_num_items_in_batch"] = self._loop.num_items

    def create_accelerator_and_postprocess(self) -> None:
        """Do what the Trainer does, with the arguments of one device for all rows of a
        step.
        """
        _refuse(self.args, self.model)
        devices = self._resolved_devices()
        attributes = self.args.__dict__
        # Each trial of a search of hyperparameters calls this method again.
        attributes.update(with_user_values(attributes))
        rows = attributes[_ROWS]
        num_batches = attributes[_BATCHES]
        user_numbers = {_ROWS: rows, _BATCHES: num_batches}
        self._loop.begin_on(devices, num_batches)
        # of one step, each computed by one replica
        self._num_batches = len(devices) * num_batches
        if not attributes.get(_REFERENCE_ROWS, True):  # TRL's, on the first device
            attributes[_REFERENCE_ROWS] = rows
        changed_numbers = {_ROWS: rows * self._num_batches, _BATCHES: 1}
        for name, value in changed_numbers.items():
            attributes[name] = changed_number(value, user_numbers[name])
        # The class, because files and loggers get what ``to_dict`` returns.
        self.args.__class__ = changed_class(type(self.args))
        attributes["_n_gpu"] = min(self.args.n_gpu, 1)  # prevents nn.DataParallel
        # A search of hyperparameters reads it, and then calls this method.
        self._train_batch_size = self.args.train_batch_size
        super().create_accelerator_and_postprocess()

    def _resolved_devices(self) -> Sequence[torch.device]:
        """The replicas' devices. Raises ``ValueError`` if the Trainer's is not the
        first.
        """
        main = self.args.device
        device_ids = self._device_ids
        if device_ids is None and main.type == "cpu":
            # the user asked for the CPU, even if there are accelerators
            device_ids = ["cpu"]
        devices = resolve(device_ids)
        first = physical(devices[0])
        if (first.type, first.index or 0) != (main.type, main.index or 0):
            raise ValueError(
                f"device_ids must begin with the Trainer's own device, {main}, where "
                f"the model is; got {devices[0]} first"
            )
        return devices

    # The loader: all rows of a step, collated batch by batch. They stay on the host,
    # because the engine scatters them.

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's loader of all rows of a step, which are collated as a list of
        batches.
        """
        collator = self.data_collator
        if self._loop.is_by_batches:
            collator = self._step_collator(collator)
        # On its device a batch would be copied to replicas from there: a byte twice.
        with (
            overridden(self.accelerator, device_placement=False),
            overridden(self, data_collator=collator),
        ):
            return super().get_train_dataloader(*args, **kwargs)

    def _step_collator(self, collate: Any) -> Any:
        """Returns a collator of all rows of a step, whose result is a ``Step``."""
        # auto_find_batch_size makes it smaller.
        size = math.ceil(self._train_batch_size / self._num_batches)
        collator: Any = partial(step_batches.by_number, collate, size)
        # Some loaders read attributes of the user's collator.
        vars(collator).update(getattr(collate, "__dict__", {}))
        return collator

    def floating_point_ops(self, inputs: Any) -> int:
        """The Trainer's number, of all batches of a step."""
        return sum(map(super().floating_point_ops, step_batches.batches_of(inputs)))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for batch in step_batches.batches_of(inputs):
            super()._track_num_input_tokens(batch)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's optimizer; with ``shard_optimizer`` as a
        ``ShardedOptimizer``.
        """
        optimizer = super().create_optimizer(*args, **kwargs)
        if not self._shard_optimizer:
            return self.optimizer
        engine = self._loop.engine_of_the_model()
        # accelerate may have wrapped it
        unwrapped_optimizer = getattr(optimizer, "optimizer", optimizer)
        if unwrapped_optimizer is not self._loop.sharded:
            self._loop.sharded = ShardedOptimizer(engine, lambda _: optimizer)
            self.optimizer = self._loop.sharded
        return self.optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, and close the engine at the end."""
        warns = self._loop.buffers == "master" and self._num_batches > 1
        # Between the trials of a search of hyperparameters there is no model.
        if warns and self.model is not None:
            warn_of_batch_norm(self.model)
        self._tell_functions()
        try:
            return super().train(*args, **kwargs)
        finally:
            # Replicas would keep the memory of their devices as long as the Trainer.
            self._loop.close()

    def _tell_functions(self) -> None:
        """Warn of the user's functions that get something else than with the stock
        loop, or are not called.
        """
        prepare = type(self)._prepare_inputs
        if is_user_function(prepare):
            warn(
                f"{prepare.__qualname__} gets the rows of one batch, as with gradient "
                "accumulation; one that mixes rows mixes these alone"
            )
        # One loss of all rows is one batch, as in the stock loop.
        if self._num_batches == 1 or not self._loop.is_by_batches:
            return
        step = type(self).training_step
        if is_user_function(step):
            warn(
                f"{step.__qualname__} is called once per optimizer step, for all its "
                f"{self._num_batches} batches, of which the Trainer's loader makes a "
                "list, and compute_loss in it returns the loss of all their rows; "
                "write into compute_loss what is for each batch"
            )
        context = type(self).compute_loss_context_manager
        if is_user_function(context):
            warn(
                f"{context.__qualname__} is called once per optimizer step, around the "
                f"calls for all its {self._num_batches} batches; write into "
                "compute_loss what is for each batch"
            )
        if self._loop.num_batches == 1:  # the stock loop does not call it either
            return
        for callback in of_user(self.callback_handler.callbacks):
            at_end = getattr(type(callback), "on_substep_end", None)
            if at_end is not None and is_user_function(at_end):
                warn(
                    f"{at_end.__qualname__} is not called, since all batches of an "
                    "optimizer step are one step of this loop; use on_step_end, or "
                    "compute_loss, which is called for each batch"
                )

    # Evaluation and prediction: each replica computes a batch of the stock loop.

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer does, a batch on each replica at a time. Outside of
        training, close the engine at the end.
        """
        # Nothing is read ahead for one device.
        if len(self._loop.devices) == 1:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        # A callback of an evaluation may evaluate, too.
        is_outermost = "prediction_step" not in vars(self)
        ahead = BatchesAhead(dataloader)
        step = partial(self._loop.prediction_in, ahead)
        try:
            # Batches stay on the host: the engine copies each to its replica.
            with (
                overridden(dataloader, device=None),
                overridden(self, prediction_step=step),
            ):
                return super().evaluation_loop(ahead, *args, **kwargs)
        finally:
            if is_outermost and not self.is_in_train:
                self._loop.close()


class ScatterOnceTrainer(ScatterOnceMixin, transformers.Trainer):
    """``transformers.Trainer`` on all devices of one process, with the gradient of one
    device.

    With N replicas, ``per_device_train_batch_size=b`` and
    ``gradient_accumulation_steps=k``, an optimizer step is one ``forward_backward`` of
    b * N * k rows. The gradient is that of one device with enough memory for all these
    rows, whatever the lengths of their batches. Checkpoints are exchangeable with those
    of the stock Trainer.

    Args:
        args: as in ``transformers.Trainer``, like ``kwargs``.
        device_ids: as in ``ScatterOnceParallel``; the first is the Trainer's device.
        shard_optimizer: distribute the optimizer's state over the devices
            (``ShardedOptimizer``).

    Raises:
        ValueError: ``device_ids`` that do not begin with the Trainer's device; or what
            does not work in one process that has the whole model: ``torchrun``,
            DeepSpeed, FSDP, a ``device_map`` of several devices, LOMO optimizers.
    """


def _check_combination(count: Any, reduction: Any) -> None:
    """Refuse invalid ``count=`` and ``reduction=``."""
    if reduction not in (None, "mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    check_count(count, ["batch"], 'batch["labels"]')
    if count is not None and reduction == "sum":
        raise ValueError(
            'count= is the number of terms of a mean; leave it out with reduction="sum"'
        )


def _refuse(args: Any, model: Any) -> None:
    """Refuse what needs other processes, or another owner of the model or its
    gradients.
    """
    optimizer = args.optim.lower()
    steps_in_backward = f"the optimizer {optimizer}, which steps in the backward pass"
    device_map = getattr(model, "hf_device_map", None) or {}
    config = getattr(args, "accelerator_config", None)
    dispatches = getattr(config, "dispatch_batches", None)
    accumulation = getattr(config, "gradient_accumulation_kwargs", None) or {}
    conflicts = {
        "torchrun (several processes)": args.world_size > 1,
        "DeepSpeed": args.deepspeed,
        "FSDP": args.fsdp,
        "a model spread by device_map": len(set(device_map.values())) > 1,
        "dispatch_batches=True (leave it out: one process reads all batches itself)": (
            dispatches
        ),
        steps_in_backward: "lomo" in optimizer,
        # transformers would set it in the place of the number of this Trainer
        "num_steps in accelerator_config (pass gradient_accumulation_steps=)": (
            accumulation.get("num_steps", 1) != 1
        ),
    }
    reason = "it trains one whole model in one process; use the stock Trainer"
    refuse("ScatterOnceTrainer", conflicts, reason)


def _refuse_losses(trainer: Any) -> None:
    """Refuse losses of TRL's whose batches do not combine into that of all."""
    kind = loss_class(trainer, "trl").__name__
    loss_types = getattr(trainer, "loss_types", None)
    if not loss_types:
        loss_types = [getattr(trainer, "loss_type", None)]
    problems: dict[str, Any] = {}
    for loss_type in loss_types:
        words = f"loss_type={loss_type!r} has terms over a whole batch"
        problems[words] = loss_type in _OF_TRL.get(kind, [])
    experts = "the auxiliary loss of a mixture of experts is a term over a batch"
    problems[experts] = getattr(trainer, "aux_loss_enabled", False)
    problems["its loss is not known to be that of its batches together"] = (
        kind not in _OF_TRL
    )
    name = loss_class(trainer).__name__
    conflicts = {f"{name} here: {words}": is_so for words, is_so in problems.items()}
    refuse("ScatterOnceMixin", conflicts, "use the stock class on one device")
