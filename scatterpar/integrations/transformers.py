"""``transformers.Trainer`` on all devices of one process, with the gradient of one
device.

The loader collates all rows of an optimizer step as a list of batches, for which the
stock ``training_step`` runs once. Meanwhile ``compute_loss`` is ``engine.loss``: the
Trainer's own ``compute_loss`` runs for each batch on a replica. In an evaluation each
replica runs the Trainer's own ``prediction_step`` for a batch. Everything else is the
stock Trainer's.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.markers import Rows
from scatterpar.devices.device_ids import DeviceLike, physical, resolve
from scatterpar.engine import ScatterOnceParallel
from scatterpar.errors import warn
from scatterpar.integrations import step_batches
from scatterpar.integrations.step_batches import (
    FIRST,
    LABELS,
    ROWS,
    SHIFTED,
    SUM,
    How,
    Step,
)
from scatterpar.integrations.trl_metrics import Gathered, metric_of_step
from scatterpar.loops.arguments import check_count, refuse, warn_of_batch_norm
from scatterpar.loops.evaluation import BatchesAhead, Turns, brought_home
from scatterpar.loops.lending import (
    Lending,
    Parts,
    copy_on_replica,
    loan_of,
    modules_of,
    roots_of,
)
from scatterpar.loops.modules import Modules, device_of, moved, overridden
from scatterpar.loops.rows import as_rows, check_rows
from scatterpar.loops.user_functions import UserFunctions, groups_of, hooks_in, of_user
from scatterpar.objects.references import names_in
from scatterpar.objects.walk import function_of
from scatterpar.objects.whose import is_user_function
from scatterpar.sharded import ShardedOptimizer
from scatterpar.step.request import Buffers, Reduction
from scatterpar.step.substeps import detached
from scatterpar.step.turns import lasting_a_turn
from scatterpar.torch_private import unwrapped
from scatterpar.verify.dropped_records import is_look

__all__ = ["ScatterOnceMixin", "ScatterOnceTrainer"]

# Attributes that stay as they are in a call. They lead to data, or to modules that are
# exchanged otherwise.
_NOT_LENT = {
    "_engine",
    "_parts",
    "eval_dataset",
    "model_wrapped",
    "train_dataset",
}
# TRL's trainers fill these in compute_loss. Each call gets metrics of its own.
_METRICS = "_metrics"
_TOKENS = "_total_train_tokens"
# Methods that attributes hide outside of a call.
_STEPS = ("_prepare_inputs", "compute_loss", "prediction_step")
_ROWS = "per_device_train_batch_size"
_BATCHES = "gradient_accumulation_steps"
_REFERENCE_ROWS = "precompute_ref_batch_size"
_REMEDIES = (
    "Pass count= to the Trainer, a function of a batch that gives its number of terms, "
    'for a mean over something else, or reduction="sum" for a sum. If it compares '
    "rows with each other, or is a ratio of sums, train with the stock class on one "
    "device, or in a loop of your own with engine.loss(inputs, targets, criterion, "
    "whole_batch=True). Rows are mixed in the data collator, not in _prepare_inputs."
)
# TRL's trainers whose losses of batches combine into that of all, except with these
# loss types.
_OF_TRL = {
    "SFTTrainer": [],
    "RewardTrainer": [],
    "KTOTrainer": ["kto"],
    "DPOTrainer": ["sft", "aot", "aot_unpaired", "bco_pair"],
}
# Their batches are first the chosen rows of all pairs, then the rejected ones.
_OF_PAIRS = {"DPOTrainer", "RewardTrainer"}
# Metrics of pairs: margins are chosen rewards without the rejected.
_CHOSEN = "rewards/chosen"
_REJECTED = "rewards/rejected"
_MARGINS = "rewards/margins"
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
    _engine: ScatterOnceParallel | None = None
    _parts: Sequence[nn.Module] = ()
    _sharded: ShardedOptimizer | None = None
    _is_checked = True  # whether losses of batches have to combine

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
        self._is_of_trl = _loss_class(self, "trl.") is not None
        self._buffers = buffers
        self._takes_turns = False  # in the present step
        self._user_functions = UserFunctions()
        # The user may pass the same arguments to a stock Trainer, too.
        copied_args = [_own_arguments(value) for value in args]
        copied_kwargs = {name: _own_arguments(v) for name, v in kwargs.items()}
        super().__init__(*copied_args, **copied_kwargs)
        # Only now: TRL's constructors set the type of loss.
        if self._is_of_trl:
            _refuse_losses(self)
        self._count = SUM if reduction == "sum" else count
        self._is_mean = reduction == "mean"  # else looks find it out
        # Attributes hide the methods of the class, also from a user's training_step.
        self.__dict__["compute_loss"] = self._loss_of_inputs
        self.__dict__["_prepare_inputs"] = self._prepared

    def create_accelerator_and_postprocess(self) -> None:
        """Do what the Trainer does, with the arguments of one device for all rows of a
        step.
        """
        _refuse(self.args, self.model)
        self._devices = self._resolved_devices()
        home = physical(self._devices[0])
        optimizers = lambda: filter(None, [self.optimizer])  # noqa: E731
        self._lending = Lending(self._roots, _NOT_LENT, home, optimizers)
        attributes = self.args.__dict__
        # Each trial of a search of hyperparameters calls this method again.
        attributes.update(_with_user_values(attributes))
        rows = attributes[_ROWS]
        num_batches = attributes[_BATCHES]
        self._user_args = {_ROWS: rows, _BATCHES: num_batches}
        # of one step, each computed by one replica
        self._num_batches = len(self._devices) * num_batches
        if not attributes.get(_REFERENCE_ROWS, True):  # TRL's, on the first device
            attributes[_REFERENCE_ROWS] = rows
        changed_numbers = {_ROWS: rows * self._num_batches, _BATCHES: 1}
        for name, value in changed_numbers.items():
            attributes[name] = _Changed(value)
            attributes[name].user_value = self._user_args[name]
        # The class, because files and loggers get what ``to_dict`` returns.
        self.args.__class__ = _changed_class(type(self.args))
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
        collator = self._step_collator(self.data_collator)
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

    # The engine, and the modules that it replicates.

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's optimizer; with ``shard_optimizer`` as a
        ``ShardedOptimizer``.
        """
        optimizer = super().create_optimizer(*args, **kwargs)
        if not self._shard_optimizer:
            return self.optimizer
        engine = self._engine_of_the_model()
        # accelerate may have wrapped it
        unwrapped_optimizer = getattr(optimizer, "optimizer", optimizer)
        if unwrapped_optimizer is not self._sharded:
            self._sharded = ShardedOptimizer(engine, lambda _: optimizer)
            self.optimizer = self._sharded
        return self.optimizer

    def _engine_of_the_model(self) -> ScatterOnceParallel:
        """The engine of the modules that the present step may call."""
        parts = list(dict.fromkeys(self._modules()))
        if self._engine is not None and parts == self._parts:
            return self._engine
        # First: two engines of one model would have two copies of it on each device.
        self._close_engine()
        self._parts = parts
        model = parts[0]
        # accelerate compiles what it wraps, which replicas do not call.
        if self.args.torch_compile:
            backend = self.args.torch_compile_backend
            mode = self.args.torch_compile_mode
            model = torch.compile(model, backend=backend, mode=mode)
        names = [type(part).__name__ for part in parts]
        work = Modules(zip(names, [model, *parts[1:]], strict=True))
        self._engine = ScatterOnceParallel(
            work, 1, self._devices, buffers=self._buffers
        )
        self._engine.loop.loss_name = "compute_loss"
        self._engine.loop.remedies = _REMEDIES
        self._engine.loop.divided = self._divided_inputs
        self._engine.loop.around_looks = self._looking
        if self._sharded is not None:
            self._sharded.engine = self._engine
        return self._engine

    def _modules(self) -> list[Any]:
        """The modules that a step may call, the model first."""
        parts = [self.model]
        for module in modules_of(self, _NOT_LENT):
            # A metric is no part of a replica: calls write the user's own.
            has_parameters = next(module.parameters(), None) is not None
            is_of_torch = type(module).__module__.startswith("torch.")
            if has_parameters or is_of_torch:
                parts.append(module)
        return parts

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, and close the engine at the end."""
        if self._buffers == "master" and self._num_batches > 1:
            warn_of_batch_norm(self.model)
        prepare = type(self)._prepare_inputs
        if is_user_function(prepare):
            warn(
                f"{prepare.__qualname__} gets the rows of one batch, as with gradient "
                "accumulation; one that mixes rows mixes these alone"
            )
        try:
            return super().train(*args, **kwargs)
        finally:
            # Replicas would keep the memory of their devices as long as the Trainer.
            self._close_engine()

    # The step.

    def _prepared(self, inputs: Any) -> Any:
        """Inputs after ``_prepare_inputs`` of the Trainer's class.

        Those of a step stay as they are, on the host. The engine copies each
        micro-batch to its replica, whose call prepares it.
        """
        if isinstance(inputs, Step) or self._is_training():
            return inputs
        return type(self)._prepare_inputs(self, inputs)

    def _is_training(self) -> Any:
        """Whether a ``training_step`` runs, which may have a batch of its own."""
        return self.is_in_train and self.model.training and torch.is_grad_enabled()

    def _loss_of_inputs(
        self, model: nn.Module, inputs: Any, *args: Any, **options: Any
    ) -> Any:
        """``compute_loss`` in training: the loss of all rows, by all replicas."""
        if not isinstance(inputs, Step) and not self._is_training():
            return type(self).compute_loss(self, model, inputs, *args, **options)
        returns_outputs = options.get("return_outputs", args[:1] == (True,))
        conflicts = {"return_outputs=True in training_step": returns_outputs}
        reason = "the outputs stay on the replicas; compute what needs them there"
        refuse("ScatterOnceMixin", conflicts, reason)
        return self._loss_of_step(inputs)

    def _loss_of_step(self, step: Any) -> Any:
        """The loss of all rows of a step. Adds what the calls kept and logged."""
        batches = step_batches.batches_of(step)
        is_collated = isinstance(step, Step)
        batch = Rows(step, FIRST) if is_collated else self._divisible_batch(step)
        # Each replica has at most one micro-batch per collated batch.
        accum = len(step) if is_collated else self._user_args[_BATCHES]
        inputs = {"work": self._on_replica, "batch": batch, "items": None}
        candidates = self._candidates(batches)
        loop_options = self._engine_of_the_model().loop
        # By their order: of two that fit the first is taken.
        loop_options.candidates = list(candidates)
        select = itemgetter("beside")
        loss, outputs = self._engine_loss(inputs, accum, return_outputs=select)
        calls = [call for call in nested.atoms(outputs) if call is not None]
        self._collect(calls, candidates[loop_options.chosen])
        if self._takes_turns:
            remedy = "self.state.global_step counts steps"
            self._user_functions.tell_numbers("compute_loss", len(calls), remedy, self)
        return loss

    def _candidates(self, batches: Sequence[Any]) -> dict[Any, How]:
        """Ways in which losses of the batches may combine, the likeliest first."""
        items = None
        hows = self._hows()
        if SUM in hows:
            items = self._get_num_items_in_batch(list(batches), self.args.device)
        if items is None and self._count is None:
            # A row whose own loss is NaN looks like a sum.
            hows = [how for how in hows if how != SUM]
        return {step_batches.candidate(how, items): how for how in hows}

    def _hows(self) -> Sequence[How]:
        """How losses of batches may combine, the likeliest way first."""
        # Its own compute_loss: a subclass of the user's may combine otherwise.
        is_of_trl = _loss_class(self).__module__.startswith("trl.")
        if self._count is not None:
            return [self._count]
        if is_of_trl and self.loss_is_scaled_for_ga is False:
            return [ROWS]
        of_labels = [LABELS, SHIFTED]
        if self._loss_shifts_labels:
            of_labels.reverse()
        if self._is_mean:
            return [*of_labels, ROWS]
        # First the items: the stock loop divides by them if the model takes them.
        return [SUM, *of_labels, ROWS]

    def _divided_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a look: rows of one batch, or two batches.

        Raises:
            ValueError: neither rows nor batches can be joined.
        """
        batch = inputs["batch"]
        if isinstance(batch, Rows):
            batches = batch.entries
            try:
                batch = self._divisible_batch(step_batches.telling_batch(batches))
            except ValueError:
                # Such as images, of which a row may have several.
                if self._has_pairs():
                    raise
                batch = step_batches.rows_of_batches(batches[:2])
        return {**inputs, "batch": batch}

    def _looking(self) -> contextlib.AbstractContextManager[None]:
        """In the body, which is a look, calls of functions leave nothing."""
        # The Trainer's own objects, which a user's function may write, too.
        owners = [self, self.args, self.state, self.control]
        owners.append(groups_of(self.optimizer))
        # Data sets may have statistics.
        data_sets = [self.train_dataset, self.eval_dataset]
        owners += of_user([*self.callback_handler.callbacks, *data_sets])
        roots = roots_of(owners, self._parts, _NOT_LENT)
        return self._user_functions.looking(
            self._parts, self._lending, roots, _NOT_LENT
        )

    def _divisible_batch(self, batch: Any) -> Any:
        """A batch whose rows can be divided, or ``ValueError``."""
        if self._has_pairs():
            batch = _divided_by_pairs(batch)
        rows = as_rows(batch)
        check_rows(
            rows,
            "let the Trainer's loader make the batches (its collator makes one for "
            "each replica, which is not divided), with per_device_train_batch_size=1 "
            "if that is not enough",
        )
        return rows

    def _has_pairs(self) -> bool:
        """Whether batches are the chosen rows of all pairs, then the rejected ones."""
        return self._is_of_trl and _loss_class(self, "trl.").__name__ in _OF_PAIRS

    def _get_num_items_in_batch(self, batches: Any, device: Any) -> Any:
        """The Trainer's number; ``None`` for a ``Step``: each batch has its own."""
        if batches and isinstance(batches[0], Step):
            return None
        return super()._get_num_items_in_batch(batches, device)

    def _engine_loss(self, inputs: Any, accum: int, *args: Any, **options: Any) -> Any:
        """``engine.loss``, by replicas that call a function of the user's in turn."""
        engine = self._engine_of_the_model()
        # The number of batches differs from step to step: the last has fewer.
        engine.accum = accum
        scaler = self.accelerator.scaler
        # A criterion of all rows knows more of the step than a few outputs.
        engine.loop.is_checked = self._is_checked and not options.get("whole_batch")
        self._choose_turns(engine, "_prepare_inputs", "compute_loss")
        try:
            return engine.loss(inputs, *args, scaler=scaler, **options)
        finally:
            self._lending.end_step()

    def _choose_turns(self, engine: ScatterOnceParallel, *steps: str) -> None:
        """Let replicas call these functions in turn if they are the user's."""
        functions_of_user = [*filter(is_user_function, self._functions(steps))]
        self._takes_turns = bool(functions_of_user)
        engine.loop.takes_turns = self._takes_turns
        engine.loop.lends = self._takes_turns
        for function in functions_of_user:
            self._user_functions.tell_turns(function)

    def _functions(self, steps: Sequence[str]) -> list[Any]:
        """What a step calls that may write: methods, functions, hooks of modules.

        A method of a library may call one that a class of the user's overrides, so the
        search follows all names in the code of methods.
        """
        functions = hooks_in(self._parts)
        names = [*steps]
        for name in names:  # which grow
            value = vars(self).get(name)  # such as compute_loss_func
            if callable(value) and not isinstance(value, nn.Module):
                functions.append(value)
            # All classes, not the first: a method may call that of its base.
            for base in type(self).__mro__ if name != "log" else ():
                function = function_of(vars(base).get(name))
                if function is not None:
                    functions.append(function)
                    code = inspect.unwrap(function).__code__
                    names += names_in(code) - {*names}
        return functions

    def _roots(self) -> list[Any]:
        """What a function of the user's may write: this Trainer, and callbacks."""
        callbacks = of_user(self.callback_handler.callbacks)
        return roots_of([self, *callbacks], self._parts, _NOT_LENT)

    def _on_replica(self, work: Any, batch: Any, items: Any) -> Any:
        """The loss of a Trainer that refers to a replica's modules."""
        if items is None:
            device = device_of(work[0], self.args.device)
            items = self._get_num_items_in_batch([batch], device)
        with (
            self._standing_in(work) as (trainer, record),
            overridden(trainer, _get_num_items_in_batch=lambda *_: items),
        ):
            record.batch = batch
            # A copy, because compute_loss may take labels out of the batch.
            inputs = trainer._prepare_inputs(copy.copy(batch))
            model = self._model_of(work) if self._takes_turns else trainer.model
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=items)
        # A captured sub-step returns tensors alone.
        is_needed = self._takes_turns or record.has_entries()
        return {"loss": loss, "beside": record if is_needed else None}

    @contextlib.contextmanager
    def _standing_in(self, work: Any) -> Iterator[tuple[Any, _CallRecord]]:
        """Yields a Trainer that refers to a replica's modules, and the record of what
        the body logs and measures there.

        In a turn it is this Trainer, otherwise a copy.
        """
        device = device_of(work[0], self.args.device)
        record = _CallRecord()
        attributes = self._attributes_on_replica(work, device, record)
        with contextlib.ExitStack() as stack:
            trainer: Any = self
            if self._takes_turns:
                # Else numbers that calls write would differ with the rows of a look.
                if is_look():
                    self._user_functions.restart_look()
                assert self._engine is not None
                loan = loan_of(self._engine.loop.replicas, work)
                lent = self._lending.lent(loan, device)
                stack.enter_context(lasting_a_turn(lent))
                # what ``args.device`` reads, a cached property
                stack.enter_context(overridden(self.args, _setup_devices=device))
            else:
                parts = Parts(zip(self._parts, work.children(), strict=True))
                trainer = copy_on_replica(self, parts, _NOT_LENT)
                args = object.__new__(type(self.args))  # with this Trainer's numbers
                vars(args).update(vars(self.args), _setup_devices=device)
                attributes["args"] = args
            for step in _STEPS:  # in the place of the methods of this step
                method = getattr(type(self), step)
                attributes[step] = types.MethodType(method, trainer)
            stack.enter_context(overridden(trainer, **attributes))
            yield trainer, record
            # In a turn it is this Trainer's number, which stays as it was: calls of a
            # look count tokens, too.
            record.tokens = vars(trainer).get(_TOKENS, 0) - attributes.get(_TOKENS, 0)

    def _model_of(self, work: Any) -> Any:
        """The model that a call on a replica gets: in turns the user's own, which may
        be compiled.
        """
        assert self._engine is not None
        module: Any = self._engine.module
        return module[0] if self._takes_turns else work[0]

    def _attributes_on_replica(
        self, work: Any, device: torch.device, record: _CallRecord
    ) -> dict[str, Any]:
        """What a Trainer on a replica has in the place of this one's attributes."""
        gather = Gathered.of if self._is_of_trl else _unchanged
        attributes = {
            "accelerator": _Recording(self.accelerator, device, record.logs, gather),
            "log": partial(_record, record.logs, self.log),
            "model_wrapped": self._model_of(work),
        }
        if self._is_of_trl:
            record.metrics = {mode: defaultdict(list) for mode in self._metrics}
            attributes[_METRICS] = record.metrics
            attributes[_TOKENS] = self._total_train_tokens
        return attributes

    def _collect(self, calls: Sequence[_CallRecord], how: How) -> None:
        """Add what calls of ``compute_loss`` counted, logged and measured, as if it had
        been one call.
        """
        self._transfer(calls)
        if not self._is_of_trl:
            return
        # The stock loop divides this sum by the number of labels.
        if how == SUM and self._count is None:
            how = SHIFTED if self._loss_shifts_labels else LABELS
        weights = [float(step_batches.terms(how, call.batch).sum()) for call in calls]
        self._append_metrics("train", calls, weights)

    def _append_metrics(
        self, mode: str, calls: Sequence[_CallRecord], weights: Sequence[float]
    ) -> None:
        """Append one value to each metric of TRL's: that of all calls together.

        Metrics that are means of numbers have the weights of the calls' losses.
        """
        values: dict[str, list[tuple[Any, float]]] = defaultdict(list)
        for call, weight in zip(calls, weights, strict=True):
            for name, appended in call.metrics[mode].items():
                values[name] += [(value, weight) for value in appended]
        metrics = {name: metric_of_step(pairs) for name, pairs in values.items()}
        _replace_margins(metrics)
        own_metrics = self._metrics[mode]
        # The number of tokens of the whole run stands in a list of one entry.
        if metrics.pop("num_tokens", None) is not None:
            own_metrics["num_tokens"] = [self._total_train_tokens]
        for name, value in metrics.items():
            own_metrics[name].append(value)

    def _transfer(self, calls: Sequence[_CallRecord]) -> None:
        """Add the tokens that calls counted to this Trainer, and log what they logged.

        Here, because some loggers know the run by the thread that has started it.
        """
        for call in calls:
            if call.tokens:
                self._total_train_tokens += call.tokens
            for log, *arguments in call.logs:
                args, options = moved(arguments, self.args.device)
                log(*args, **options)

    # Evaluation and prediction: each replica computes a batch of the stock loop.

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer does, a batch on each replica at a time. Outside of
        training, close the engine at the end.
        """
        # Nothing is read ahead for one device.
        if len(self._devices) == 1:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        ahead = BatchesAhead(dataloader, self._devices)
        step = partial(self._prediction_in, ahead)
        try:
            # Batches stay on the host: the engine copies each to its replica.
            with (
                overridden(dataloader, device=None),
                overridden(self, prediction_step=step),
            ):
                return super().evaluation_loop(ahead, *args, **kwargs)
        finally:
            if not self.is_in_train:
                self._close_engine()

    def _prediction_in(
        self, ahead: BatchesAhead, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """``prediction_step`` in an evaluation.

        The user's takes turns on the devices. With a library's, replicas compute the
        next batches at the same time.
        """
        # The model may be one that the Trainer has compiled.
        is_replicated = unwrapped(model)[0] is self.model
        if not is_replicated or not ahead.has(inputs):
            return type(self).prediction_step(self, model, inputs, *args, **kwargs)
        if ahead.turns is None and ahead.groups is None:
            # Modules and functions are searched once: that takes longer than a batch.
            engine = self._engine_of_the_model()
            self._choose_turns(engine, "prediction_step", "compute_loss")
            if self._takes_turns:
                ahead.turns = Turns(engine, self._parts, self._roots, _NOT_LENT)
            elif len(ahead.read(2)) > 1:  # one batch needs no replicas
                predict = partial(self._predict_on_replica, args=args, options=kwargs)
                ahead.groups = engine.batch_groups(predict)
        if ahead.turns is not None:
            return self._predict_in_turn(ahead.turns, model, inputs, *args, **kwargs)
        if ahead.groups is None:
            return type(self).prediction_step(self, model, inputs, *args, **kwargs)
        result = ahead.result()
        record = result["record"]
        self._transfer([record])
        if self._is_of_trl:
            self._append_metrics("eval", [record], [1.0])
        return result["output"]

    def _predict_in_turn(
        self, turns: Turns, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The Trainer's own ``prediction_step``, on the device of the next batch."""
        device = turns.next_device()
        with contextlib.ExitStack() as stack:
            stack.enter_context(turns.turn(device))
            if device != turns.devices[0]:
                placed = _Placed(self.accelerator, physical(device))
                stack.enter_context(overridden(self, accelerator=placed))
                here = overridden(self.args, _setup_devices=physical(device))
                stack.enter_context(here)
            output = type(self).prediction_step(self, model, inputs, *args, **kwargs)
        return brought_home(output, device, turns.devices[0])

    def _predict_on_replica(
        self, work: Any, batch: Any, args: Sequence[Any], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The Trainer's own ``prediction_step`` for one batch, on a replica.

        Returns its output, and the record of what it has logged and measured.
        """
        with self._standing_in(work) as (trainer, record):
            output = trainer.prediction_step(
                trainer.model, copy.copy(batch), *args, **options
            )
        return {"output": output, "record": record}


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


def _replace_margins(metrics: dict[str, Any]) -> None:
    """Compute margins again: KTO's calls append them only for rows of both kinds."""
    # A mean of the calls' margins would count each call, and not each row.
    if metrics.keys() >= {_CHOSEN, _REJECTED}:
        metrics[_MARGINS] = metrics[_CHOSEN] - metrics[_REJECTED]


def _unchanged(inputs: Any) -> Any:
    return inputs


class _CallRecord:
    """What one call on a replica has logged and measured.

    Attributes:
        batch: the micro-batch of a training.
        logs: calls of ``log`` methods: the method and the arguments.
        metrics: TRL's, by mode and name.
        tokens: the number that TRL's trainers have added to that of the run.
        components: sums of terms of sentence-transformers' losses, by mode and name.
    """

    def __init__(self) -> None:
        self.batch: Any
        self.logs: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.tokens = 0
        self.components: dict[str, dict[str, Any]] = {}

    def has_entries(self) -> bool:
        """Whether the call has logged or measured anything, or may have."""
        has_components = any(self.components.values())
        return bool(self.logs or self.metrics or self.tokens or has_components)


class _Placed:
    """An accelerator on another device."""

    def __init__(self, accelerator: Any, device: torch.device) -> None:
        self._accelerator = accelerator
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


class _Recording(_Placed):
    """An accelerator on another device, whose logs are recorded.

    ``gather`` is applied to what is gathered: metrics of TRL's know how they combine.
    """

    def __init__(
        self,
        accelerator: Any,
        device: torch.device,
        logs: list[Any],
        gather: Callable[[Any], Any],
    ) -> None:
        super().__init__(accelerator, device)
        self._gather = gather
        self.log = partial(_record, logs, accelerator.log)

    def gather(self, tensor: Any) -> Any:
        """The accelerator's result, of one process."""
        return self._gather(self._accelerator.gather(tensor))

    def gather_for_metrics(self, *args: Any, **options: Any) -> Any:
        """The accelerator's result, of one process."""
        # The loader is ahead of this batch, but has said so for the group's last batch
        # alone: nothing is cut off.
        return self._gather(self._accelerator.gather_for_metrics(*args, **options))


def _record(logs: list[Any], log: Any, *args: Any, **options: Any) -> None:
    """Record a call of ``log``, which is made once the step has succeeded."""
    # Values as they are now: the next call may write them.
    logs.append((log, *nested.map_tensors(detached, (args, options))))


class _Changed(int):
    """A number of ``TrainingArguments`` that a Trainer of this module has changed."""

    # A search of hyperparameters makes a number of the same class of the user's.
    user_value: int | None = None


class _Arguments(transformers.TrainingArguments):
    """A base of changed arguments: outside of the Trainer they have the user's numbers.

    Files and loggers get the user's, and so do copies and pickles, whose class is the
    user's own: they can be used again.
    """

    def to_dict(self) -> dict[str, Any]:
        """The arguments as the user has passed them."""
        arguments: dict[str, Any] = super().to_dict()  # type: ignore[no-untyped-call]
        return _with_user_values(arguments)

    def __reduce_ex__(self, protocol: Any) -> Any:
        user_class = type(self).__bases__[1]
        return object.__new__, (user_class,), _with_user_values(vars(self))


def _changed_class(kind: type) -> type:
    """The class of changed arguments of this class."""
    if issubclass(kind, _Arguments):
        return kind
    return type(kind.__name__, (_Arguments, kind), {"__module__": kind.__module__})


def _own_arguments(value: Any) -> Any:
    """A copy of a user's ``TrainingArguments``; any other value itself."""
    # Not replace(): it would run the constructor's checks for changed numbers.
    is_arguments = isinstance(value, transformers.TrainingArguments)
    return copy.copy(value) if is_arguments else value


def _with_user_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with the user's numbers in the place of changed ones."""
    values = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, _Changed):
            values[name] = value.user_value or int(value)
    return values


def _check_combination(count: Any, reduction: Any) -> None:
    """Refuse invalid ``count=`` and ``reduction=``."""
    if reduction not in (None, "mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    check_count(count, ["batch"], 'batch["labels"]')
    if count is not None and reduction == "sum":
        raise ValueError(
            'count= is the number of terms of a mean; leave it out with reduction="sum"'
        )


def _divided_by_pairs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of pairs, whose rows are the pairs::

    input_ids    chosen 0, chosen 1, chosen 2, rejected 0, rejected 1, rejected 2
    rows         (chosen 0, rejected 0), (chosen 1, rejected 1), (chosen 2, …)
    """
    # Chosen and rejected rows, so twice the number of pairs.
    num_rows = len(batch["input_ids"])
    divided = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.ndim and len(value) == num_rows:
            chosen, rejected = value.chunk(2)
            pairs = torch.stack([chosen, rejected], 1)
            divided[name] = Rows(list(pairs), _joined_pairs)
    return divided


def _joined_pairs(pairs: Sequence[Tensor]) -> Tensor:
    """The chosen rows of pairs, then the rejected ones."""
    return torch.stack(list(pairs), 1).flatten(0, 1)


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
    kind = _loss_class(trainer, "trl.").__name__
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
    name = _loss_class(trainer).__name__
    conflicts = {f"{name} here: {words}": is_so for words, is_so in problems.items()}
    refuse("ScatterOnceMixin", conflicts, "use the stock class on one device")


def _loss_class(trainer: Any, module: str = "") -> Any:
    """The first class that defines ``compute_loss``, in a module whose name begins like
    this; ``None`` if there is none.
    """
    for base in type(trainer).__mro__:
        if base.__module__.startswith(module) and "compute_loss" in vars(base):
            return base
    return None
