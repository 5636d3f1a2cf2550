"""``transformers.Trainer`` with the single-device gradient on all devices, scattered once a step.

Where no launcher is used, the stock Trainer wraps a model in ``nn.DataParallel`` as soon as it sees
two GPUs, and calls it once for every batch that it accumulates. ``ScatterOnceTrainer`` takes the
whole window of ``gradient_accumulation_steps`` batches as one step of a ``ScatterOnceParallel``.
All else is the stock Trainer's own: data, order, optimizer, schedule, callbacks, checkpoints.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from scatterpar.integrations.loop import each_call, num_rows
from scatterpar.integrations.trainer_base import (
    DIVIDED,
    ROWS,
    SUM,
    Collected,
    TrainerBase,
    each_row,
    override_methods,
)
from scatterpar.replicas.compiled import unwrapped
from scatterpar.step.markers import Rows

__all__ = ["ScatterOnceMixin", "ScatterOnceTrainer"]


class ScatterOnceMixin(TrainerBase):
    """Makes a Trainer that trains as ``ScatterOnceTrainer`` out of another: first in the bases.

    ``class MyTrainer(ScatterOnceMixin, DPOTrainer): pass``. The other's ``compute_loss`` is called
    for every batch, in the thread of a replica, on a copy of the Trainer that holds the replica of
    every module that the Trainer has: ``self.model``, ``self.ref_model``, ``self.loss``. Numbers
    that it counts up on itself, and TRL's metrics, come back to the Trainer. Its ``training_step``
    is not called, and it is warned of one.

    Args:
        args: those of the Trainer. Its ``TrainingArguments`` are copied: ``trainer.args`` are those
            of one device that accumulates the batches of all replicas.
        device_ids: as in ``ScatterOnceTrainer``, like ``shard_optimizer`` and ``micro_batch_cost``.
        kwargs: those of the Trainer.

    Raises:
        ValueError: as ``ScatterOnceTrainer``; a trainer of TRL, or a loss type of it, whose losses
            of batches do not make up that of all of them, by name.
    """

    # The step.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The Trainer's own window of batches, of which the last one will make the step."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._window, self._window_size = (), len(batches)
        if self._micro_batch_cost is not None and batches:
            items = self._get_num_items_in_batch(batches[0], device)
        return batches, items

    def floating_point_ops(self, inputs: Any) -> int:
        """The Trainer's own, summed over the micro-batches of a step that is cut by cost."""
        counted = super().floating_point_ops
        return sum(map(counted, inputs)) if isinstance(inputs, list) else counted(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for batch in inputs if isinstance(inputs, list) else [inputs]:
            super()._track_num_input_tokens(batch)  # type: ignore[no-untyped-call]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own; the replicas are let go at the end."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._close_engine()

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Nothing, but for the last batch of the window: the step of all of them.

        Returns:
            The window's loss, or zero, so that the sum that the Trainer logs is the window's.
        """
        model.train()
        is_cut = self._micro_batch_cost is not None
        self._window = [*self._window, *map(self._prepared, inputs if is_cut else [inputs])]
        if hasattr(self, "_step"):
            self._step += 1  # which of their batches TRL's GRPO and RLOO prepare next
        if len(self._window) < self._window_size and not is_cut:
            return torch.zeros((), device=self.args.device)
        window, self._window = self._window, ()
        switch = getattr(self.optimizer, "train", None)  # of schedule-free optimizers
        if callable(switch):
            switch()
        loss = self._step_of(window, num_items_in_batch)
        every = self.args.torch_empty_cache_steps
        if every and self.state.global_step % every == 0 and torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        return loss

    def _step_of(self, window: Sequence[Any], items: Any) -> Tensor:
        """One step of a window of batches, which are dealt out to the replicas as they are."""
        if any(batch.get("return_loss") for batch in window) and _towers(self._module()):
            return self._step_of_towers(window)
        if not getattr(self, "loss_is_scaled_for_ga", None):
            self.current_gradient_accumulation_steps = 1  # to compute_loss it is one batch
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.compute_loss_context_manager())
            if hasattr(self, "maybe_activation_offload_context"):  # of TRL's trainers
                stack.enter_context(self.maybe_activation_offload_context)
            kind = self._how_losses_combine(window, items, window)
            is_sum = kind in (SUM, DIVIDED)
            engine = self._engine_of_the_model()
            engine.accum = len(window)  # each batch is a micro-batch
            items = items if is_sum or items is None else True
            batch = Rows(window, operator.itemgetter(0))
            loss: Tensor
            loss, collected = engine.forward_backward(
                {"work": self._loss_of, "batch": batch, "items": items},
                reduction="sum" if is_sum else "mean",
                count=None if is_sum else self._count_of(kind),
                scaler=self.accelerator.scaler,
                return_outputs=operator.itemgetter("collected"),
            )
        self._collect(
            each_call(collected), [float(self._count_of(kind)({"batch": one})) for one in window]
        )
        return loss

    def _step_of_towers(self, window: Sequence[Any]) -> Tensor:
        """One step of a model that compares images with texts, as CLIP does: of all rows.

        Its towers run on the replicas, and the rest of it once, with what they gave.
        """

        def criterion(found: list[list[Tensor]], _: Any) -> Any:
            model = self._module()
            with contextlib.ExitStack() as stack:
                for tower, parts in zip(_towers(model), zip(*found, strict=True), strict=True):
                    pooled = BaseModelOutputWithPooling(pooler_output=torch.cat(parts))
                    stack.enter_context(
                        override_methods(tower, forward=lambda *_, it=pooled, **__: it)
                    )
                return self.compute_loss(model, dict(window[0]))

        inputs = {"work": _pooled, "batch": Rows(window, operator.itemgetter(0))}
        return self._step_of_all_rows(inputs, len(window), criterion)

    def _step_of_all_rows(
        self, inputs: Any, accum: int, criterion: Callable[[Any, Any], Any]
    ) -> Tensor:
        """One step whose criterion sees what the replicas have computed for all rows."""
        engine = self._engine_of_the_model()
        engine.accum = accum
        with self.compute_loss_context_manager():
            loss: Tensor = engine.forward_backward(
                inputs, None, criterion, scaler=self.accelerator.scaler, whole_batch=True
            )
        return loss

    # Evaluation and prediction: on all replicas where the outputs have rows, else on the master.

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The Trainer's own, for micro-batches on copies of it that hold the replicas' modules."""

        def alone(trainer: ScatterOnceMixin, model: nn.Module, inputs: Any) -> Any:
            return super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys, **kwargs
            )

        together = (
            self._evaluates_on_all()
            and not self._predicts_alone
            and not getattr(self.args, "predict_with_generate", False)
            and not inputs.get("return_loss")  # it compares rows
            and unwrapped(model)[0] is self.model  # the Trainer compiles it, too
            and len(self._replicas()) > 1
            and num_rows(inputs) > 1
        )
        found = self._predict(alone, inputs) if together else None
        return alone(self, model, inputs) if found is None else found

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own; after training the replicas are let go at the end."""
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            if not self.is_in_train:
                self._close_engine()

    def _predict(self, alone: Callable[..., Any], inputs: Any) -> Any:
        """Loss, outputs and labels of all rows; ``None`` where micro-batches do not tell them."""
        batch = dict(self._prepared(inputs))
        kind = ROWS
        if any(batch.get(name) is not None for name in self.label_names):
            items = self._get_num_items_in_batch([batch], self.args.device)
            kind = self._how_losses_combine([batch], items, each_row(batch))
            if not self._kinds:
                return None

        def part(work: Any, batch: dict[str, Any]) -> Any:
            trainer = self._trainer_copy(work)
            collected = Collected(trainer)
            vars(trainer)["_prepare_inputs"] = dict  # which they are
            weight = torch.as_tensor(1.0 if kind == SUM else self._count_of(kind)({"batch": batch}))
            loss, outputs, labels = alone(trainer, trainer._module(), batch)
            if loss is not None:
                weight = weight.to(loss.device) / num_rows(batch)  # as parts count with their rows
                loss = torch.where(weight > 0, loss * weight, 0)
            return loss, weight, outputs, labels, collected.end(trainer)

        engine = self._engine_of_the_model()
        engine.accum = 1
        try:
            with torch.no_grad():
                loss, weight, outputs, labels, collected = engine(part, batch=batch)
        except ValueError:  # such as outputs without rows
            self._predicts_alone = True
            self._close_engine()
            return None
        parts = each_call(collected)
        self._collect(parts, [1.0] * len(parts))
        if loss is not None:
            loss = loss * num_rows(batch) if kind == SUM else loss / weight
        return loss, outputs, labels

    def _prepared(self, inputs: Any) -> Any:
        """A batch as a Trainer's own override prepares it; the rest is done by the scatter."""
        if type(self)._prepare_inputs is transformers.Trainer._prepare_inputs:
            return inputs
        return self._prepare_inputs(inputs)


class ScatterOnceTrainer(ScatterOnceMixin, transformers.Trainer):
    """``transformers.Trainer`` on all devices of one process, with the gradient of one device.

    With N replicas, ``per_device_train_batch_size=b`` and ``gradient_accumulation_steps=k``, an
    optimizer step is one ``forward_backward`` of b * N * k rows: the gradient is that of one device
    with enough memory for them all, whatever the lengths of their batches. Checkpoints are those of
    the stock Trainer, both ways.

    Args:
        args: as in ``transformers.Trainer``.
        device_ids: one entry per replica, as in ``ScatterOnceParallel``; the first is the Trainer's
            own device. By default every visible accelerator, or one CPU replica.
        shard_optimizer: the optimizer's state lies on all of these devices (``ShardedOptimizer``).
        micro_batch_cost: for rows of unequal length: the rows of a step are cut into micro-batches
            of similar lengths, of at most so many entries of the model's main input (tokens) with
            padding, and each is collated by itself. The result is the same up to rounding.
        kwargs: as in ``transformers.Trainer``.

    Raises:
        ValueError: what does not go together with one process that holds the whole model, by name:
            ``torchrun``, DeepSpeed, FSDP, a ``device_map`` of several devices, LOMO optimizers; or
            ``device_ids`` that do not begin with the Trainer's own device.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> model = BertForSequenceClassification(
        ...     BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        ... )
        >>> rows = [{"input_ids": [1, 2, i], "labels": i % 2} for i in range(8)]
        >>> args = TrainingArguments(
        ...     tempfile.mkdtemp(), use_cpu=True, report_to="none", disable_tqdm=True,
        ...     per_device_train_batch_size=1, gradient_accumulation_steps=2, num_train_epochs=1,
        ... )
        >>> trainer = ScatterOnceTrainer(model, args, train_dataset=rows, device_ids=["cpu"] * 2)
        >>> trainer.train().global_step  # 8 rows, 1 * 2 * 2 = 4 of them a step
        {'train_runtime': ...}
        2
    """


def _towers(model: nn.Module) -> list[nn.Module]:
    """What a contrastive model has for images and for texts."""
    names = ("vision_model", "text_model")
    parts = (dict(part.named_children()) for part in model.modules())
    return next(([its[n] for n in names] for its in parts if its.keys() >= {*names}), [])


def _pooled(work: Any, batch: Mapping[str, Any]) -> list[list[Tensor]]:
    """What the towers of a replica make of a batch: an entry of the window, and so in a list."""
    model = work.parts[0]
    found: dict[nn.Module, Tensor] = {}

    def note(tower: nn.Module, _: Any, output: Any) -> None:
        found[tower] = output.pooler_output

    hooks = [tower.register_forward_hook(note) for tower in _towers(model)]
    try:
        model(**{**batch, "return_loss": False})
    finally:
        for hook in hooks:
            hook.remove()
    return [[found[tower] for tower in _towers(model)]]
