"""``transformers.Trainer`` on all devices of one process, with the gradient of one device.

Without a launcher, the stock Trainer wraps the model in ``nn.DataParallel`` if it sees two GPUs,
and calls it once for every batch that it accumulates. ``ScatterOnceTrainer`` makes one step of a
``ScatterOnceParallel`` from the whole window of ``gradient_accumulation_steps`` batches. Everything
else is the stock Trainer's: data, order, optimizer, schedule, callbacks, checkpoints.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
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
    override_methods,
    split_rows,
)
from scatterpar.replicas.compiled import unwrapped
from scatterpar.step.markers import Rows

__all__ = ["ScatterOnceMixin", "ScatterOnceTrainer"]


class ScatterOnceMixin(TrainerBase):
    """Makes another Trainer train as ``ScatterOnceTrainer`` does. It must be the first base.

    ``class MyTrainer(ScatterOnceMixin, DPOTrainer): pass``. The other Trainer's ``compute_loss`` is
    called for every batch, in the thread of a replica, on a copy of the Trainer. The copy's modules
    are those of the replica: ``self.model``, ``self.ref_model``, ``self.loss``. Numbers that the
    call increments on ``self``, and TRL's metrics, are added to the Trainer's. An overridden
    ``training_step`` is not called, and a warning says so.

    Args:
        args: arguments of the Trainer. Its ``TrainingArguments`` are copied: ``trainer.args`` are
            those of one device that accumulates the batches of all replicas.
        device_ids: as in ``ScatterOnceTrainer``, like ``shard_optimizer`` and ``micro_batch_cost``.
        kwargs: keyword arguments of the Trainer.

    Raises:
        ValueError: as ``ScatterOnceTrainer``; a trainer or loss type of TRL for which the losses of
            batches do not combine into the loss of all.
    """

    # The step.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The Trainer's window of batches. ``training_step`` of the last one makes the step."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._window, self._window_size = (), len(batches)
        if self._micro_batch_cost is not None and batches:
            items = self._get_num_items_in_batch(batches[0], device)
        return batches, items

    def floating_point_ops(self, inputs: Any) -> int:
        """The Trainer's number; with ``micro_batch_cost`` the sum over the micro-batches."""
        counted = super().floating_point_ops
        return sum(map(counted, inputs)) if isinstance(inputs, list) else counted(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for batch in inputs if isinstance(inputs, list) else [inputs]:
            super()._track_num_input_tokens(batch)  # type: ignore[no-untyped-call]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, and close the engine at the end."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._close_engine()

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Store a batch; for the last one of the window, make one step of all its batches.

        Returns:
            The window's loss for the last batch, otherwise zero: the Trainer logs the sum.
        """
        model.train()
        # With micro_batch_cost, a list of micro-batches. Lists of TRL's loaders are single batches.
        batches = [inputs] if self._micro_batch_cost is None else inputs
        self._window = [*self._window, *map(self._prepared, batches)]
        if hasattr(self, "_step"):
            self._step += 1  # TRL's GRPO and RLOO count the batches that they have prepared
        if len(self._window) < self._window_size:
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
        """One step of a window. Each of its batches is a micro-batch of one replica."""
        if any(batch.get("return_loss") for batch in window) and _towers(self._module()):
            return self._step_of_towers(window)
        if not getattr(self, "loss_is_scaled_for_ga", None):
            self.current_gradient_accumulation_steps = 1  # else compute_loss would divide by it
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.compute_loss_context_manager())
            if hasattr(self, "maybe_activation_offload_context"):  # of TRL's trainers
                stack.enter_context(self.maybe_activation_offload_context)
            combination = self._how_losses_combine(window, items, window)
            is_sum, count = combination in (SUM, DIVIDED), self._count_of(combination)
            engine = self._engine_of_the_model()
            engine.accum = len(window)  # each batch is a micro-batch
            items = items if is_sum or items is None else True
            batch = Rows(window, operator.itemgetter(0))
            loss: Tensor
            loss, collected = engine.forward_backward(
                {"work": self._loss_of, "batch": batch, "items": items},
                reduction="sum" if is_sum else "mean",
                count=None if is_sum else count,
                scaler=self.accelerator.scaler,
                return_outputs=operator.itemgetter("collected"),
            )
        self._collect(each_call(collected), [float(count({"batch": one})) for one in window])
        return loss

    def _step_of_towers(self, window: Sequence[Any]) -> Tensor:
        """One step of a model that compares images with texts, as CLIP does.

        Its two encoders (*towers*) run on the replicas. The rest of the model runs once, with the
        towers' outputs for all rows.
        """

        def criterion(pooled: list[list[Tensor]], _: Any) -> Any:
            model = self._module()
            with contextlib.ExitStack() as stack:
                for tower, parts in zip(_towers(model), zip(*pooled, strict=True), strict=True):
                    output = BaseModelOutputWithPooling(pooler_output=torch.cat(parts))
                    stack.enter_context(
                        override_methods(tower, forward=lambda *_, output=output, **__: output)
                    )
                return self.compute_loss(model, dict(window[0]))

        inputs = {"work": _pooled, "batch": Rows(window, operator.itemgetter(0))}
        return self._step_of_all_rows(inputs, len(window), criterion)

    def _step_of_all_rows(
        self, inputs: Any, accum: int, criterion: Callable[[Any, Any], Any]
    ) -> Tensor:
        """One step whose criterion sees the replicas' outputs for all rows."""
        engine = self._engine_of_the_model()
        engine.accum = accum
        with self.compute_loss_context_manager():
            loss: Tensor = engine.forward_backward(
                inputs, None, criterion, scaler=self.accelerator.scaler, whole_batch=True
            )
        return loss

    # Evaluation and prediction: on all replicas if the outputs have rows, else on the master.

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The Trainer's prediction, on all replicas if possible, for a micro-batch on each."""

        def predict(trainer: ScatterOnceMixin, model: nn.Module, inputs: Any) -> Any:
            return super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys, **kwargs
            )

        use_all = (
            self._evaluates_on_all()
            and not self._predicts_on_master
            and not getattr(self.args, "predict_with_generate", False)
            and not inputs.get("return_loss")  # the loss compares rows
            and unwrapped(model)[0] is self.model  # which the Trainer may have compiled
            and len(self._replicas()) > 1
            and num_rows(inputs) > 1
        )
        prediction = self._predict(predict, inputs) if use_all else None
        return predict(self, model, inputs) if prediction is None else prediction

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer does. Outside of training, close the engine at the end."""
        n = len(self._replicas())
        if n > 1 and not self._evaluates_on_all():
            rows = self.args.per_device_eval_batch_size
            warnings.warn(_ONE_DEVICE.format(type(self).__name__, rows, n * rows), stacklevel=3)
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            if not self.is_in_train:
                self._close_engine()

    def _predict(self, predict: Callable[..., Any], inputs: Any) -> Any:
        """Loss, outputs and labels of all rows; ``None`` if micro-batches cannot give them."""
        batch, combination = dict(self._prepared(inputs)), ROWS
        if any(batch.get(name) is not None for name in self.label_names):
            items = self._get_num_items_in_batch([batch], self.args.device)
            combination = self._how_losses_combine([batch], items, split_rows(batch))
            if not self._combinations:
                return None
        is_sum, count = combination == SUM, self._count_of(combination)

        def part(work: Any, batch: dict[str, Any]) -> Any:
            trainer = self._trainer_copy(work)
            collected = Collected(trainer)
            vars(trainer)["_prepare_inputs"] = dict  # they are prepared
            weight = torch.as_tensor(1.0 if is_sum else count({"batch": batch}))
            loss, outputs, labels = predict(trainer, trainer._module(), batch)
            if loss is not None:
                weight = weight.to(loss.device) / num_rows(batch)  # the engine averages over rows
                loss = torch.where(weight > 0, loss * weight, 0)
            return loss, weight, outputs, labels, collected.end(trainer)

        engine = self._engine_of_the_model()
        engine.accum = 1
        try:
            with torch.no_grad():
                loss, weight, outputs, labels, collected = engine(part, batch=batch)
        except ValueError:  # for example outputs without rows
            self._predicts_on_master = True
            self._close_engine()
            return None
        parts = each_call(collected)
        self._collect(parts, [1.0] * len(parts))
        if loss is not None:
            loss = loss * num_rows(batch) if is_sum else loss / weight
        return loss, outputs, labels

    def _prepared(self, inputs: Any) -> Any:
        """A batch after ``_prepare_inputs`` of a subclass; the stock one only moves it."""
        if type(self)._prepare_inputs is transformers.Trainer._prepare_inputs:
            return inputs
        return self._prepare_inputs(inputs)


class ScatterOnceTrainer(ScatterOnceMixin, transformers.Trainer):
    """``transformers.Trainer`` on all devices of one process, with the gradient of one device.

    With N replicas, ``per_device_train_batch_size=b`` and ``gradient_accumulation_steps=k``, an
    optimizer step is one ``forward_backward`` of b * N * k rows. The gradient is that of one device
    with enough memory for all these rows, whatever the lengths of their batches. Checkpoints are
    exchangeable with those of the stock Trainer.

    Args:
        args: as in ``transformers.Trainer``.
        device_ids: one entry per replica, as in ``ScatterOnceParallel``; the first is the Trainer's
            device. By default every visible accelerator, or one CPU replica.
        shard_optimizer: distribute the optimizer's state over these devices, as
            ``ShardedOptimizer`` does.
        micro_batch_cost: for rows of unequal length: the rows of a step are cut into micro-batches
            of similar lengths, each of which is collated separately. A micro-batch has at most so
            many entries of the model's main input (tokens), with padding. The result is the same up
            to rounding.
        kwargs: as in ``transformers.Trainer``.

    Raises:
        ValueError: ``device_ids`` that do not begin with the Trainer's device; or what does not
            work in one process that has the whole model: ``torchrun``, DeepSpeed, FSDP, a
            ``device_map`` of several devices, LOMO optimizers.

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


_ONE_DEVICE = (
    "{} evaluates on the first device, in batches of per_device_eval_batch_size={}: its eval_loss "
    "and metrics are means over batches, those of the stock class with this number. To compare "
    "with batches of all replicas, pass per_device_eval_batch_size={}"
)


def _towers(model: nn.Module) -> list[nn.Module]:
    """The encoders of a contrastive model, for images and for texts; empty for other models."""
    names = ("vision_model", "text_model")
    parts = (dict(part.named_children()) for part in model.modules())
    return next(([part[n] for n in names] for part in parts if part.keys() >= {*names}), [])


def _pooled(work: Any, batch: Mapping[str, Any]) -> list[list[Tensor]]:
    """The pooled outputs of a replica's towers for one batch: a list with one entry per batch."""
    model = work.parts[0]
    outputs: dict[nn.Module, Tensor] = {}

    def store(tower: nn.Module, _: Any, output: Any) -> None:
        outputs[tower] = output.pooler_output

    hooks = [tower.register_forward_hook(store) for tower in _towers(model)]
    try:
        model(**{**batch, "return_loss": False})
    finally:
        for hook in hooks:
            hook.remove()
    return [[outputs[tower] for tower in _towers(model)]]
