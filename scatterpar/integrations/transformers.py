"""``transformers.Trainer`` with the single-device gradient on all devices, scattered once a step.

Where no launcher is used, the stock Trainer wraps a model in ``nn.DataParallel`` as soon as it sees
two cards, and calls it once for every batch that it accumulates. ``ScatterOnceTrainer`` takes the
whole window of ``gradient_accumulation_steps`` batches as one step of a ``ScatterOnceParallel``.
All else is the stock Trainer's own: data, order, optimizer, schedule, callbacks, checkpoints.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from scatterpar.devices.verbs import DeviceLike, physical, resolve
from scatterpar.engine import ScatterOnceParallel
from scatterpar.integrations.combination import (
    LABELS,
    PARTS,
    ROWS,
    SHIFTED,
    SUM,
    Combination,
    rows_of,
    terms_of,
    try_out,
)
from scatterpar.replicas.compiled import checked_how, unwrapped
from scatterpar.step.markers import Rows
from scatterpar.verify.untouched import untouched

__all__ = ["ScatterOnceMixin", "ScatterOnceTrainer"]

_TRIES = 10  # steps in which how losses combine is looked at again, while it is not decided
_RANDOM_STATES = "rng_state_replicas.pth"
# Overrides of training_step that do nothing else than enter a context, which the mixin enters too.
_KNOWN_STEPS = ("trl.trainer.sft_trainer",)


# What the mixin stands in front of: the Trainer, which its other bases bring along.
if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class ScatterOnceMixin(_Base):
    """Makes a Trainer that trains as ``ScatterOnceTrainer`` out of another: first in the bases.

    ``class MyTrainer(ScatterOnceMixin, SFTTrainer): pass``. The other's ``compute_loss`` is called
    for every micro-batch with a replica as the model, in the replica's thread. Its
    ``training_step`` is not called, and it is warned of one.

    Args:
        args: those of the Trainer.
        device_ids: one entry per replica, as in ``ScatterOnceParallel``; the first is the Trainer's
            own device. By default every visible accelerator, or one CPU replica.
        kwargs: those of the Trainer.
    """

    def __init__(
        self, *args: Any, device_ids: Sequence[DeviceLike] | None = None, **kwargs: Any
    ) -> None:
        self._device_ids = device_ids
        self._engine: ScatterOnceParallel | None = None
        self._window: list[Any] = []
        self._window_size = 1
        self._combination: Combination | None = None
        self._tries = 0
        self._predicts_alone = False
        self._says_all_rows = False
        super().__init__(*args, **kwargs)
        self._train_batch_size = self._rows_of_a_batch()
        self._warn_of_overrides()

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's own, for one process that, to its knowledge, has one device."""
        _refuse(self.args, self.model)
        self._replicas()
        self.args._n_gpu = min(self.args.n_gpu, 1)  # so that it does not wrap in nn.DataParallel
        super().create_accelerator_and_postprocess()
        # A trial of a hyperparameter search has just set it anew, from arguments of one device.
        self._train_batch_size = self._rows_of_a_batch()

    def _rows_of_a_batch(self) -> int:
        return self.args.per_device_train_batch_size * len(self._replicas())

    def _replicas(self) -> tuple[torch.device, ...]:
        """The device of each replica, the Trainer's own first."""
        ids = self._device_ids
        if ids is None and self.args.device.type == "cpu":
            ids = ["cpu"]  # the user asked for the CPU, whatever else is here
        devices = resolve(ids)
        first, own = physical(devices[0]), self.args.device
        if (first.type, first.index or 0) != (own.type, own.index or 0):
            raise ValueError(
                f"device_ids must begin with the Trainer's own device, {own}, where it keeps the "
                f"model; got {devices[0]} first"
            )
        return devices

    @contextlib.contextmanager
    def _rows_of_all_replicas(self) -> Iterator[None]:
        """The arguments say how many rows a batch of all replicas has.

        The Trainer takes that for one device's: to group by length, to weigh batches, to tell
        speeds, and to compare with a checkpoint.
        """
        args, sizes = self.args, ("per_device_train_batch_size", "per_device_eval_batch_size")
        before = {name: getattr(args, name) for name in sizes}
        factor = 1 if self._says_all_rows else len(self._replicas())
        said, self._says_all_rows = self._says_all_rows, True
        try:
            for name, rows in before.items():
                setattr(args, name, rows * factor)
            yield
        finally:
            self._says_all_rows = said
            for name, rows in before.items():
                setattr(args, name, rows)

    # The data: b rows for each replica, and left on the host, from where they are scattered.

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, with b rows for each replica in a batch."""
        with self._rows_of_all_replicas():
            return super().get_train_dataloader(*args, **kwargs)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, with b rows for each replica in a batch."""
        with self._rows_of_all_replicas():
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, with b rows for each replica in a batch."""
        with self._rows_of_all_replicas():
            return super().get_test_dataloader(*args, **kwargs)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("is_training", len(args) > 4 and args[4]):
            return super()._get_dataloader(*args, **kwargs)
        placing, self.accelerator.device_placement = self.accelerator.device_placement, False
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.accelerator.device_placement = placing

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The Trainer's own window of batches, of which the last one will make the step."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._window, self._window_size = [], len(batches)
        return batches, items

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        with self._rows_of_all_replicas():  # it compares the arguments with those of a checkpoint
            return super()._init_training_state(*args, **kwargs)

    # The step.

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own; the replicas are let go at the end."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._let_go()

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Nothing, but for the last batch of the window: the step of all of them.

        Returns:
            The window's loss, or zero, so that the sum that the Trainer logs is the window's.
        """
        self._window.append(inputs)
        if len(self._window) < self._window_size:
            return torch.zeros((), device=self.args.device)
        window, self._window = self._window, []
        self.current_gradient_accumulation_steps = 1  # to compute_loss it is one batch
        model.train()
        switch = getattr(self.optimizer, "train", None)  # of schedule-free optimizers
        if callable(switch):
            switch()
        window = [self._as_rows(batch) for batch in window]
        combination = self._how_losses_combine(window, num_items_in_batch)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.compute_loss_context_manager())
            if hasattr(self, "maybe_activation_offload_context"):  # of TRL's trainers
                stack.enter_context(self.maybe_activation_offload_context)
            loss: Tensor = self._engine_of_the_model().forward_backward(
                {
                    "work": self._loss_of,
                    "batch": Rows.from_batches(window),
                    "items": num_items_in_batch,
                    "whole": combination.adds_up,
                },
                reduction="sum" if combination.adds_up else "mean",
                count=None if combination.adds_up else partial(self._count, combination.kind),
                scaler=self.accelerator.scaler,
            )
        if self.args.torch_empty_cache_steps and not (
            self.state.global_step % self.args.torch_empty_cache_steps
        ):
            torch.accelerator.empty_cache()
        return loss

    def _loss_of(self, model: nn.Module, batch: Any, items: Any, whole: bool) -> Any:
        """The loss of a micro-batch, by the Trainer's own ``compute_loss``.

        Losses that add up are given the window's number of items. Others get that of the
        micro-batch, so that each is the micro-batch's own mean, whatever it does with the number.
        """
        items = items if whole or items is None else self._terms(batch)
        loss: Any = self.compute_loss(model, batch, num_items_in_batch=items)
        return loss

    def _terms(self, batch: Any) -> Any:
        return terms_of(batch, shifted=self._loss_shifts_labels)

    def _count(self, kind: str, inputs: Any, _: Any) -> Any:
        return self._weight_of(inputs["batch"], kind)

    def _weight_of(self, batch: Any, kind: str) -> Any:
        """How much a micro-batch's mean counts."""
        if kind == ROWS:
            return rows_of(batch)
        return terms_of(batch, shifted=True) if kind == SHIFTED else self._terms(batch)

    def _as_rows(self, batch: Any) -> dict[str, Any]:
        """The batch as the Trainer prepares it, but on the host, and its lists marked."""
        if type(self)._prepare_inputs is not transformers.Trainer._prepare_inputs:
            batch = self._prepare_inputs(batch)
        rows = rows_of(batch)
        return {
            key: Rows(value) if isinstance(value, list) and len(value) == rows else value
            for key, value in batch.items()
        }

    def _engine_of_the_model(self) -> ScatterOnceParallel:
        if self._engine is not None and unwrapped(self._engine.module.model)[0] is not self.model:
            self._let_go()
        if self._engine is None:
            work = _Work(self._compiled(self._module()))
            # How losses combine is found out here: verify would refuse what the Trainer warns of.
            self._engine = ScatterOnceParallel(work, device_ids=self._replicas(), verify=False)
        return self._engine

    def _compiled(self, model: nn.Module) -> Any:
        """The model, compiled where ``torch_compile`` asks for it."""
        args = self.args
        options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        how = checked_how(options if args.torch_compile else None)
        return model if how is None else how(model)

    def _let_go(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    # How losses combine.

    def _how_losses_combine(self, window: Sequence[Mapping[str, Any]], items: Any) -> Combination:
        """What two rows told, once; looked at again while the rows did not tell it."""
        known = self._combination
        if known is None or not (known.decisive or self._tries >= _TRIES):
            self._tries += 1
            found = self._try_out(next((b for b in window if rows_of(b) > 1), window[0]))
            if found is not None and not found.exact and (known is None or known.exact):
                warnings.warn(
                    f"how the losses of micro-batches combine is not known: those of two rows, as "
                    f"a {found.kind}, are {found.deviation:.2g} off the loss of both (relative). A "
                    f"loss that compares rows with each other, or an auxiliary one of the whole "
                    f"batch, is computed per micro-batch",
                    stacklevel=2,
                )
            self._combination = found or known
        if self._combination is None or (self._combination.kind == PARTS and items is None):
            return Combination(LABELS, 0.0, 0.0, decisive=False)
        return self._combination

    def _try_out(self, batch: Mapping[str, Any]) -> Combination | None:
        """On the Trainer's model, in eval mode and without a trace."""
        twin = copy.copy(self)
        if "_metrics" in vars(self):  # TRL's trainers collect in compute_loss
            vars(twin)["_metrics"] = copy.deepcopy(vars(self)["_metrics"])
        model = self._module()

        def loss_of(rows: Mapping[str, Any], items: Any) -> Tensor:
            rows = transformers.Trainer._prepare_inputs(twin, dict(rows))
            if not isinstance(items, int):
                items = items.to(self.args.device)
            loss: Any = twin.compute_loss(model, rows, num_items_in_batch=items)
            return torch.as_tensor(loss).detach()

        with untouched([model], (), [self.args.device]), torch.no_grad():
            model.eval()
            return try_out(loss_of, _plain(batch), self._terms, self._tolerance())

    def _tolerance(self) -> float:
        """What rounding may make of a loss: much in half precision."""
        floating = [p.dtype for p in self._module().parameters() if p.is_floating_point()]
        low = any(torch.finfo(dtype).bits < 32 for dtype in floating)
        return 2e-2 if low or self.accelerator.mixed_precision != "no" else 1e-5

    def _module(self) -> nn.Module:
        assert isinstance(self.model, nn.Module)
        return self.model

    # Evaluation and prediction: on all replicas where the outputs have rows, else on the master.

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The Trainer's own, with a model that runs on all replicas."""
        alone = self._predicts_alone or getattr(self.args, "predict_with_generate", False)
        own = unwrapped(model)[0] is self.model  # the Trainer compiles it, too
        if own and not alone and len(self._replicas()) > 1 and rows_of(inputs) > 1:
            model = _OnAllReplicas(self._module(), self)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own."""
        with self._rows_of_all_replicas():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own."""
        with self._rows_of_all_replicas():
            return super().predict(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own; after training the replicas are let go at the end."""
        try:
            with self._rows_of_all_replicas():
                return super().evaluation_loop(*args, **kwargs)
        finally:
            if not self.is_in_train:
                self._let_go()

    def _predict(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """What the model returns for all rows; a loss in it is that of all rows."""
        combination = None
        if "labels" in inputs:
            items = inputs.get("num_items_in_batch")
            combination = self._how_losses_combine([inputs], items)
        if combination is not None and not combination.exact:
            return model(**inputs)
        kind = ROWS if combination is None else combination.kind
        adds_up = combination is not None and combination.adds_up
        try:
            outputs = self._engine_of_the_model()(self._outputs_of, kind=kind, **inputs)
        except ValueError:  # such as outputs without rows
            self._predicts_alone = True
            self._let_go()
            return model(**inputs)
        if outputs["loss"] is None:
            return outputs["outputs"]
        loss = outputs["loss"].sum()
        return _with_loss(outputs["outputs"], loss if adds_up else loss / outputs["weight"].sum())

    def _outputs_of(self, model: nn.Module, kind: str, **inputs: Any) -> dict[str, Any]:
        """A micro-batch's outputs; its loss and the loss's weight, spread over its rows."""
        rows = rows_of(inputs)
        adds_up = kind in (PARTS, SUM)
        own = rows if adds_up else self._weight_of(inputs, kind)
        if inputs.get("num_items_in_batch") is not None and not adds_up:
            inputs["num_items_in_batch"] = self._terms(inputs)
        outputs = model(**inputs)
        loss = _loss_in(outputs)
        if loss is None:
            return {"outputs": outputs, "loss": None, "weight": None}
        weight = torch.as_tensor(own, device=loss.device)
        part = loss.detach() if adds_up else torch.where(weight > 0, loss * weight, 0)
        return {
            "outputs": _with_loss(outputs, torch.zeros_like(loss)),
            "loss": (part / rows).expand(rows),
            "weight": (weight / rows).expand(rows),
        }

    # Random numbers of the other devices, which the Trainer does not save.

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        others = self._other_accelerators()
        if others:
            states = {str(d): torch.get_device_module(d).get_rng_state(d) for d in others}
            torch.save(states, Path(output_dir) / _RANDOM_STATES)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        path = None if checkpoint is None else Path(checkpoint) / _RANDOM_STATES
        if path is not None and path.is_file():
            states = torch.load(path, weights_only=True)
            for device in self._other_accelerators():
                if str(device) in states:
                    torch.get_device_module(device).set_rng_state(states[str(device)], device)

    def _other_accelerators(self) -> list[torch.device]:
        devices = dict.fromkeys(self._replicas())
        return [d for d in devices if d.type != "cpu" and physical(d) != self.args.device]

    def _warn_of_overrides(self) -> None:
        bases = type(self).__mro__
        for base in bases[bases.index(ScatterOnceMixin) + 1 : bases.index(transformers.Trainer)]:
            if "training_step" in vars(base) and not base.__module__.startswith(_KNOWN_STEPS):
                warnings.warn(
                    f"{base.__name__}.training_step is not called: ScatterOnceMixin makes one step "
                    f"of the whole window of batches; move what it does to compute_loss",
                    stacklevel=3,
                )


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


class _Work(nn.Module):
    """Calls whatever it is given on the replica of the Trainer's model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Any, **kwargs: Any) -> Any:
        return work(self.model, **kwargs)


class _OnAllReplicas(nn.DataParallel[nn.Module]):
    """The model as ``compute_loss`` sees it in evaluation: called, it runs on all replicas.

    It is an ``nn.DataParallel`` since that is what Trainers know to unwrap.
    """

    def __init__(self, model: nn.Module, trainer: ScatterOnceMixin) -> None:
        nn.Module.__init__(self)
        self.module = model
        self._trainer = trainer

    def forward(self, **inputs: Any) -> Any:
        return self._trainer._predict(self.module, inputs)


def _refuse(args: Any, model: Any) -> None:
    """Refuse, by name, what needs other processes, or another owner of the model or gradients."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    found = {
        "torchrun (several processes)": args.world_size > 1,
        "DeepSpeed": bool(args.deepspeed),
        "FSDP": bool(args.fsdp),
        "a model spread by device_map": len(set(getattr(model, "hf_device_map", None) or ())) > 1
        and len(set(model.hf_device_map.values())) > 1,
        f"the optimizer {optimizer}": "lomo" in optimizer,
    }
    for name, given in found.items():
        if given:
            raise ValueError(
                f"ScatterOnceTrainer does not go together with {name}: it trains one whole model "
                "in one process, with gradients that are complete before the optimizer's step; use "
                "the stock Trainer"
            )


def _plain(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {key: v.entries if isinstance(v, Rows) else v for key, v in batch.items()}


def _loss_in(outputs: Any) -> Tensor | None:
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    else:
        loss = outputs[0] if isinstance(outputs, tuple) and outputs else None
    return loss if isinstance(loss, Tensor) and not loss.ndim else None


def _with_loss(outputs: Any, loss: Tensor) -> Any:
    if isinstance(outputs, MutableMapping):
        outputs["loss"] = loss
        return outputs
    return (loss, *outputs[1:])
