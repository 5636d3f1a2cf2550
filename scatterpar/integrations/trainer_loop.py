"""The calls of ``compute_loss`` and ``prediction_step`` on replicas, and what they
leave.
"""

from __future__ import annotations

import contextlib
import copy
import math
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.markers import Rows
from scatterpar.devices.virtual_devices import physical
from scatterpar.engine import ScatterOnceParallel
from scatterpar.errors import Told, warn
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
from scatterpar.integrations.trainer_arguments import changed_number
from scatterpar.integrations.trl_metrics import Gathered, metric_of_step
from scatterpar.libraries import package_of
from scatterpar.loops.arguments import refuse
from scatterpar.loops.evaluation import BatchesAhead, Evaluation
from scatterpar.loops.lending import CopiesOnReplica, modules_of
from scatterpar.loops.loop import Loop
from scatterpar.loops.modules import Modules, overridden, values_on_device
from scatterpar.loops.rows import as_rows, check_rows, num_rows
from scatterpar.loops.user_functions import groups_of, hooks_in, of_user
from scatterpar.objects.walk import function_of
from scatterpar.objects.whose import is_user_class, is_user_function
from scatterpar.sharded import ShardedOptimizer
from scatterpar.step.request import Buffers
from scatterpar.step.substeps import detached
from scatterpar.torch_private.compiler import unwrapped
from scatterpar.verify.dropped_records import is_look

# Attributes that stay as they are in a call. They lead to data, or to modules that are
# exchanged otherwise.
_NOT_LENT = {
    "_loop",
    "eval_dataset",
    "model_wrapped",
    "train_dataset",
}
# TRL's trainers fill these in compute_loss. Each call gets metrics of its own.
_METRICS = "_metrics"
_TOKENS = "_total_train_tokens"
_ROWS_OF_STEP = "_train_batch_size"
# Methods, and functions in attributes, that the Trainer's loop runs in its own thread.
OF_LOOP = frozenset(
    (
        *("_clip_grad_norm", "_determine_best_metric", "_evaluate", "_get_dataloader"),
        *("_get_eval_sampler", "_get_learning_rate", "_get_output_dir"),
        *("_get_train_sampler", "_inner_training_loop", "_load_best_model"),
        *("_load_callback_state", "_load_from_checkpoint", "_load_rng_state"),
        *("_load_optimizer_and_scheduler", "_load_scaler", "_wrap_model"),
        *("_maybe_log_save_evaluate", "_move_model_to_device", "_prepare_dataset"),
        *("_push_from_checkpoint", "_remove_unused_columns", "_run_epoch", "_save"),
        *("_save_checkpoint", "_save_optimizer_and_scheduler", "_save_rng_state"),
        *("_save_scaler", "get_optimizer_group", "pop_callback", "remove_callback"),
        *("_set_signature_columns_if_needed", "_track_num_input_tokens"),
        *("add_callback", "call_model_init", "compute_metrics"),
        *("create_accelerator_and_postprocess", "create_model_card"),
        *("create_optimizer", "create_optimizer_and_scheduler", "create_scheduler"),
        *("data_collator", "evaluate", "evaluation_loop", "evaluator"),
        *("floating_point_ops", "get_batch_samples", "get_decay_parameter_names"),
        *("get_eval_dataloader", "get_learning_rates", "get_optimizer_cls_and_kwargs"),
        *("get_test_dataloader", "get_total_train_batch_size", "get_train_dataloader"),
        *("hyperparameter_search", "log", "log_metrics", "model_init"),
        *("num_examples", "optimizer_cls_and_kwargs", "predict", "prediction_loop"),
        *("preprocess_logits_for_metrics", "processing_class", "push_to_hub"),
        *("save_metrics", "save_model", "save_state", "store_flos", "tokenizer"),
        *("train", "training_step"),
    )
)
# In a training also those that predictions alone run.
OF_PREDICTIONS = frozenset(
    (
        "_pad_tensors_to_max_len",
        "autocast_smart_context_manager",
        "compute_loss_context_manager",
        "prediction_step",
    )
)
# Methods that attributes hide outside of a call.
_STEPS = ("_prepare_inputs", "compute_loss", "prediction_step")
_REMEDIES = (
    "Pass count= to the Trainer, a function of a batch that gives its number of terms, "
    'for a mean over something else, or reduction="sum" for a sum. If it compares '
    "rows with each other, or is a ratio of sums, train with the stock class on one "
    "device, or in a loop of your own with engine.loss(inputs, targets, criterion, "
    "whole_batch=True). Rows are mixed in the data collator, not in _prepare_inputs."
)
# Their batches are first the chosen rows of all pairs, then the rejected ones.
_OF_PAIRS = {"DPOTrainer", "RewardTrainer"}
# Metrics of pairs: margins are chosen rewards without the rejected.
_CHOSEN = "rewards/chosen"
_REJECTED = "rewards/rejected"
_MARGINS = "rewards/margins"


class TrainerLoop(Loop):
    """The steps and evaluations of a Trainer.

    Args:
        trainer: of the user's.
        buffers: as in ``ScatterOnceParallel``.

    Attributes:
        trainer: of the user's.
        buffers: as in ``ScatterOnceParallel``.
        is_of_trl: whether TRL defines its ``compute_loss``.
        devices: those of the replicas.
        num_batches: of one replica in a step, as the user has passed it.
        count: the user's number of terms of a mean, or ``SUM``.
        is_mean: whether the user says that the loss is a mean.
        is_checked: whether losses of batches have to combine.
        is_by_batches: whether the loader collates a step as a list of batches.
        sharded: the optimizer, if it is on all devices.
    """

    function = "compute_loss"
    remedies = _REMEDIES
    once_per_batch = "self.state.global_step counts steps"
    gradients_at = (
        "A callback's on_pre_optimizer_step finds the gradient of the whole batch in "
        ".grad, and may keep a copy for the next step"
    )
    not_lent = _NOT_LENT

    def __init__(self, trainer: Any, buffers: Buffers) -> None:
        super().__init__()
        self.trainer = trainer
        self.buffers = buffers
        self.is_of_trl = loss_class(trainer, "trl") is not None
        self.devices: Sequence[torch.device] = ()
        self.num_batches = 1
        self.count: How | None = None
        self.is_mean = False
        self.is_checked = True
        self.is_by_batches = True
        self.sharded: ShardedOptimizer | None = None
        self._replicated: Sequence[nn.Module] = ()
        self._num_calls = 1  # of the present step
        self._told = Told()
        # Modules, and whether they were in training mode when the step began.
        self._modes: list[tuple[nn.Module, bool]] = []

    def begin_on(self, devices: Sequence[torch.device], num_batches: int) -> None:
        """Replicas are on ``devices``, and each gets so many batches per step."""
        self.devices = devices
        self.num_batches = num_batches
        self.begin(physical(devices[0]))

    # What calls may write.

    def owners(self) -> list[Any]:
        """The Trainer, and the user's callbacks."""
        return [self.trainer, *of_user(self.trainer.callback_handler.callbacks)]

    def beside(self) -> list[Any]:
        """The Trainer's own objects, and the user's data sets, which may have
        statistics.
        """
        trainer = self.trainer
        objects = [trainer.args, trainer.state, trainer.control]
        objects.append(groups_of(trainer.optimizer))
        return [*objects, *of_user([trainer.train_dataset, trainer.eval_dataset])]

    def replicated_modules(self) -> Sequence[nn.Module]:
        """The modules that the present step may call, the model first."""
        return self._replicated

    def optimizers(self) -> Sequence[Any]:
        """That of the Trainer, once there is one."""
        return [*filter(None, [self.trainer.optimizer])]

    # The engine, and the modules that it replicates.

    def engine_of_the_model(self) -> ScatterOnceParallel:
        """The engine of the modules that the present step may call."""
        modules = list(dict.fromkeys(self.modules()))
        if self.engine is not None and modules == self._replicated:
            return self.engine
        # First: two engines of one model would have two copies of it on each device.
        self.close()
        self._replicated = modules
        model = modules[0]
        # accelerate compiles what it wraps, which replicas do not call.
        if self.trainer.args.torch_compile:
            backend = self.trainer.args.torch_compile_backend
            mode = self.trainer.args.torch_compile_mode
            model = torch.compile(model, backend=backend, mode=mode)
        names = [type(module).__name__ for module in modules]
        work = Modules(zip(names, [model, *modules[1:]], strict=True))
        self.engine = ScatterOnceParallel(work, 1, self.devices, buffers=self.buffers)
        if self.sharded is not None:
            self.sharded.engine = self.engine
        return self.engine

    def modules(self) -> list[Any]:
        """The modules that a step may call, the model first."""
        parts = [self.trainer.model]
        for module in modules_of(self.trainer, _NOT_LENT):
            # A metric is no part of a replica: calls write the user's own.
            has_parameters = next(module.parameters(), None) is not None
            is_of_torch = package_of(type(module)) == "torch"
            if has_parameters or is_of_torch:
                parts.append(module)
        return parts

    # The step.

    def prepared(self, inputs: Any) -> Any:
        """Inputs after ``_prepare_inputs`` of the Trainer's class.

        Those of a step stay as they are, on the host. The engine copies each
        micro-batch to its replica, whose call prepares it.
        """
        if isinstance(inputs, Step) or self._is_training():
            return inputs
        return type(self.trainer)._prepare_inputs(self.trainer, inputs)

    def num_items(self, batches: Sequence[Any], device: Any) -> Any:
        """The Trainer's number of items; ``None`` for a ``Step``: each batch has its
        own.
        """
        if batches and isinstance(batches[0], Step):
            return None
        stock = type(self.trainer)._get_num_items_in_batch
        return stock(self.trainer, batches, device)

    def _is_training(self) -> Any:
        """Whether a ``training_step`` runs, which may have a batch of its own."""
        return (
            self.trainer.is_in_train
            and self.trainer.model.training
            and torch.is_grad_enabled()
        )

    def loss_of_inputs(
        self, model: nn.Module, inputs: Any, *args: Any, **options: Any
    ) -> Any:
        """``compute_loss`` in training: the loss of all rows, by all replicas.

        A number of items is the user's own, which the calls get in the place of the
        Trainer's.
        """
        if not isinstance(inputs, Step) and not self._is_training():
            stock = type(self.trainer).compute_loss
            return stock(self.trainer, model, inputs, *args, **options)
        returns_outputs = options.get("return_outputs", args[:1] == (True,))
        conflicts = {"return_outputs=True in training_step": returns_outputs}
        reason = "the outputs stay on the replicas; compute what needs them there"
        refuse("ScatterOnceMixin", conflicts, reason)
        own_items = options.get("num_items_in_batch")
        if len(args) > 1:
            own_items = args[1]
        # Of a batch that is no ``Step`` the Trainer has counted them.
        is_own = isinstance(inputs, Step)
        return self.loss_of_step(inputs, own_items if is_own else None)

    def loss_of_step(self, step: Any, own_items: Any = None) -> Any:
        """The loss of all rows of a step. Adds what the calls kept and logged.

        ``own_items`` are the user's items of all batches, if the user counts them.
        """
        batches = step_batches.batches_of(step)
        is_collated = isinstance(step, Step)
        batch = Rows(step, FIRST) if is_collated else self._divisible_batch(step)
        # Each replica has at most one micro-batch per collated batch.
        accum = len(step) if is_collated else self.num_batches
        inputs: dict[str, Any] = {"work": self.call, "batch": batch}
        inputs |= {"items": None, "is_added": False}  # candidates say them
        # A batch with fewer rows has a micro-batch per row.
        self._num_calls = (
            accum if is_collated else min(len(self.devices) * accum, num_rows(step))
        )
        candidates = self._candidates(batches, own_items)
        select = itemgetter("beside")
        was_ending = self._is_ending()
        # By their order: of two that fit the first is taken.
        loss, outputs = self.train(
            inputs, accum, candidates=list(candidates), return_outputs=select
        )
        assert self.engine is not None
        # Before callbacks get what calls have logged.
        if self._is_ending() and not was_ending and self._num_calls > 1:
            warn(
                "compute_loss has ended the training by self.control in a step, from "
                f"one of its {self._num_calls} calls; the optimizer takes this step "
                "still, which one device leaves out unless it was the last call. A "
                "callback's on_step_end ends it between steps"
            )
        calls = [call for call in nested.atoms(outputs) if call is not None]
        chosen = self.engine.chosen
        assert chosen is not None
        how = candidates[chosen]
        self._collect(calls, how)
        # Not if ``count=`` or ``reduction=`` say otherwise.
        is_sum = self._says_scaled and SUM in self.hows()
        if is_sum and how != SUM and self._told.mark("loss_is_scaled_for_ga"):
            warn(
                "loss_is_scaled_for_ga is True, but compute_loss is no sum over the "
                f"batches of a step: they are combined as {chosen.words}. That is what "
                "the stock loop computes, which adds them, if compute_loss divides by "
                "the number of batches itself"
            )
        return loss

    @property
    def _says_scaled(self) -> Any:
        """What the user says of the loss; ``None`` if nothing."""
        # Trainers before transformers 5.19 do not have it.
        return getattr(self.trainer, "loss_is_scaled_for_ga", None)

    def _is_scaled(self, items: Any) -> bool:
        """Whether the stock loop adds losses of batches, and does not divide them by
        their number, if calls get these ``items``.
        """
        trainer = self.trainer
        if self._says_scaled is not None:
            return bool(self._says_scaled)
        is_divided_by_items = trainer.model_accepts_loss_kwargs and items is not None
        return is_divided_by_items or trainer.compute_loss_func is not None

    def _is_ending(self) -> bool:
        """Whether the loop is to end, or its epoch."""
        control = self.trainer.control
        return bool(control.should_training_stop or control.should_epoch_stop)

    def train(self, inputs: Any, accum: int, *args: Any, **options: Any) -> Any:
        """A step of ``engine.loss``, by replicas that call a function of the user's in
        turn.
        """
        engine = self.engine_of_the_model()
        # The number of batches differs from step to step: the last has fewer.
        engine.accum = accum
        self._choose_turns(OF_LOOP | OF_PREDICTIONS)
        # A criterion of all rows knows more of the step than a few outputs.
        is_checked = self.is_checked and not options.get("whole_batch")
        scaler = self.trainer.accelerator.scaler
        modules = [inner for module in self._replicated for inner in module.modules()]
        self._modes = [(module, module.training) for module in modules]
        return self.step(inputs, *args, scaler=scaler, is_checked=is_checked, **options)

    def _candidates(self, batches: Sequence[Any], own_items: Any) -> dict[Any, How]:
        """Ways in which losses of the batches may combine, the likeliest first."""
        items = own_items
        hows = self.hows()
        if SUM in hows and items is None:
            items = self.num_items(list(batches), self.trainer.args.device)
        # A row whose own loss is NaN looks like a sum.
        if items is None and self.count is None and not self._says_scaled:
            hows = [how for how in hows if how != SUM]
        candidates: dict[Any, How] = {}
        for how in hows:
            # Of one batch alone nobody knows the user's items.
            of_call = items if how == SUM else own_items
            candidates[step_batches.candidate(how, of_call)] = how
        return candidates

    def hows(self) -> Sequence[How]:
        """How losses of batches may combine, the likeliest way first."""
        # Its own compute_loss: a subclass of the user's may combine otherwise.
        is_of_trl = package_of(loss_class(self.trainer)) == "trl"
        if self.count is not None:
            return [self.count]
        if is_of_trl and self._says_scaled is False:
            return [ROWS]
        of_labels = [LABELS, SHIFTED]
        if self._is_shifted():
            of_labels.reverse()
        if self.is_mean:
            return [*of_labels, ROWS]
        # First the items: the stock loop divides by them if the model takes them.
        return [SUM, *of_labels, ROWS]

    def _is_shifted(self) -> bool:
        """Whether the stock Trainer counts labels without the first of each row."""
        # Older ones, such as transformers 5.2, count all labels of any model.
        return getattr(self.trainer, "_loss_shifts_labels", False)

    def divided(self, inputs: dict[str, Any]) -> dict[str, Any]:
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
        return self.is_of_trl and loss_class(self.trainer, "trl").__name__ in _OF_PAIRS

    # Who takes turns.

    def _choose_turns(self, outside: Collection[str]) -> None:
        """Let replicas call functions of the user's in turn.

        ``outside`` are names of functions that no call of this step runs.
        """
        self.let_take_turns([*filter(is_user_function, self._functions(outside))])

    def _functions(self, outside: Collection[str]) -> list[Any]:
        """What calls may run: hooks of modules, functions in attributes, and all
        methods under the names of a library's.

        A library's method may call any other one by its name, and finds that of a
        user's class. Which ones it calls is not asked.
        """
        trainer = self.trainer
        functions = hooks_in(self._replicated)
        for name, value in vars(trainer).items():  # such as compute_loss_func
            is_function = callable(value) and not isinstance(value, nn.Module)
            if is_function and name not in outside:
                functions.append(value)
        classes = type(trainer).__mro__
        names: set[str] = set()
        for base in classes:
            if not is_user_class(base):
                names |= vars(base).keys()
        # All classes, not the first: a method may call that of its base.
        for base in classes:
            for name, attribute in vars(base).items():
                is_of_library = name in names and not name.startswith("__")
                function = function_of(attribute)
                if is_of_library and name not in outside and function is not None:
                    functions.append(function)
        return functions

    # Calls on replicas, and what they leave.

    def call(self, work: Any, batch: Any, items: Any, is_added: bool) -> dict[str, Any]:
        """The loss of a Trainer that refers to a replica's modules.

        ``is_added`` says that losses of batches are added, and not averaged.
        """
        # Averaged losses that the stock loop adds are divided by user code.
        finds_steps = is_added or not self._is_scaled(items)
        has_own_items = False
        if items is None:
            items = self.num_items([batch], self.device_of(work))
            has_own_items = items is not None  # so that the batch is a step by itself
        is_accumulated = (
            self.takes_turns and self.count != SUM and finds_steps and not has_own_items
        )
        with (
            self._standing_in(work) as (trainer, record),
            overridden(trainer, _get_num_items_in_batch=lambda *_: items),
            self._accumulating() if is_accumulated else contextlib.nullcontext(),
        ):
            record.batch = batch
            # A copy, because compute_loss may take labels out of the batch.
            inputs = trainer._prepare_inputs(copy.copy(batch))
            model = self._model_of(work) if self.takes_turns else trainer.model
            if self.takes_turns:
                self._set_modes()
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=items)
        # A captured sub-step returns tensors alone.
        is_needed = self.takes_turns or record.has_entries()
        return {"loss": loss, "beside": record if is_needed else None}

    @contextlib.contextmanager
    def _accumulating(self) -> Iterator[None]:
        """In the body, a call in turn, the Trainer has the numbers of gradient
        accumulation on one device.
        """
        trainer = self.trainer
        num_batches = len(self.devices) * self.num_batches
        # ``auto_find_batch_size`` makes it smaller than the arguments say.
        rows = math.ceil(vars(trainer)[_ROWS_OF_STEP] / num_batches)
        calls = self.lending.calls_of_step()
        is_last = is_look() or calls == self._num_calls
        numbers = {
            "per_device_train_batch_size": changed_number(rows, rows),
            "gradient_accumulation_steps": changed_number(
                num_batches, self.num_batches
            ),
        }
        with (
            overridden(trainer.args, **numbers),
            overridden(
                trainer,
                current_gradient_accumulation_steps=self._num_calls,
                **{_ROWS_OF_STEP: rows},
            ),
            overridden(trainer.accelerator.gradient_state, sync_gradients=is_last),
        ):
            yield

    def _set_modes(self) -> None:
        """Set modules to the modes with which the step began.

        The stock ``training_step`` does so for each micro-batch, by ``model.train()``.
        """
        if is_look():  # which has set modes of its own
            return
        for part, mode in self._modes:
            if part.training is not mode:
                part.training = mode

    @contextlib.contextmanager
    def _standing_in(
        self, work: Any, copies: CopiesOnReplica | None = None
    ) -> Iterator[tuple[Any, _CallRecord]]:
        """Yields a Trainer that refers to a replica's modules, and the record of what
        the body logs and measures there.

        In a turn it is this Trainer, otherwise a copy: one of ``copies``, if they are
        kept from call to call.
        """
        device = self.device_of(work)
        record = _CallRecord()
        attributes = self.attributes_on_replica(work, device, record)
        with contextlib.ExitStack() as stack:
            trainer = self.trainer
            args = trainer.args
            if self.takes_turns:
                stack.enter_context(self.in_turn(self.loan_of(work), device))
                # what ``args.device`` reads, a cached property
                stack.enter_context(overridden(args, _setup_devices=device))
            else:
                trainer = (copies or self._copies_on(work)).copy()
                copied = object.__new__(type(args))  # with this Trainer's numbers
                vars(copied).update(vars(args), _setup_devices=device)
                attributes["args"] = copied
            for step in _STEPS:  # in the place of the methods of this step
                method = getattr(type(trainer), step)
                attributes[step] = types.MethodType(method, trainer)
            stack.enter_context(overridden(trainer, **attributes))
            yield trainer, record
            # In a turn it is this Trainer's number, which stays as it was: calls of a
            # look count tokens, too.
            record.tokens = vars(trainer).get(_TOKENS, 0) - attributes.get(_TOKENS, 0)

    def _copies_on(self, work: Any) -> CopiesOnReplica:
        """Copies of the Trainer that refer to the modules of a replica, ``work``."""
        pairs = zip(self._replicated, work.children(), strict=True)
        return CopiesOnReplica(self.trainer, pairs, _NOT_LENT)

    def _model_of(self, work: Any) -> Any:
        """The model that a call on a replica gets: in turns the user's own, which may
        be compiled.
        """
        assert self.engine is not None
        module: Any = self.engine.module
        return module[0] if self.takes_turns else work[0]

    def attributes_on_replica(
        self, work: Any, device: torch.device, record: _CallRecord
    ) -> dict[str, Any]:
        """What a Trainer on a replica has in the place of this one's attributes."""
        gather = Gathered.of if self.is_of_trl else _unchanged
        logs = record.logs
        attributes = {
            "accelerator": _Recording(self.trainer.accelerator, device, logs, gather),
            "log": partial(_record, logs, self.trainer.log),
            "model_wrapped": self._model_of(work),
        }
        if self.is_of_trl:
            record.metrics = {mode: defaultdict(list) for mode in self.trainer._metrics}
            attributes[_METRICS] = record.metrics
            attributes[_TOKENS] = self.trainer._total_train_tokens
        return attributes

    def _collect(self, calls: Sequence[_CallRecord], how: How) -> None:
        """Add what calls of ``compute_loss`` counted, logged and measured, as if it had
        been one call.
        """
        self.transfer(calls)
        if not self.is_of_trl:
            return
        # The stock loop divides this sum by the number of labels.
        if how == SUM and self.count is None:
            how = SHIFTED if self._is_shifted() else LABELS
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
        own_metrics = self.trainer._metrics[mode]
        # The number of tokens of the whole run stands in a list of one entry.
        if metrics.pop("num_tokens", None) is not None:
            own_metrics["num_tokens"] = [self.trainer._total_train_tokens]
        for name, value in metrics.items():
            own_metrics[name].append(value)

    def transfer(self, calls: Sequence[_CallRecord]) -> None:
        """Add the tokens that calls counted to this Trainer, and log what they logged.

        Here, because some loggers know the run by the thread that has started it.
        """
        for call in calls:
            if call.tokens:
                self.trainer._total_train_tokens += call.tokens
            for log, *arguments in call.logs:
                args, options = values_on_device(arguments, self.trainer.args.device)
                log(*args, **options)

    # Evaluation and prediction: each replica computes a batch of the stock loop.

    def prediction_in(
        self, ahead: BatchesAhead, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """``prediction_step`` in an evaluation.

        The user's takes turns on the devices. With a library's, replicas compute the
        next batches at the same time, unless they write state.
        """
        # The model may be one that the Trainer has compiled.
        is_replicated = unwrapped(model)[0] is self.trainer.model
        evaluation: Evaluation | None = None
        if is_replicated and ahead.has(inputs):
            evaluation = ahead.evaluation or self._begin_evaluation(ahead, args, kwargs)
        if evaluation is None:
            stock = type(self.trainer).prediction_step
            return stock(self.trainer, model, inputs, *args, **kwargs)
        result = ahead.result()
        if result is None:
            return self._predict_in_turn(evaluation, model, inputs, *args, **kwargs)
        record = result["record"]
        self.transfer([record])
        if self.is_of_trl:
            self._append_metrics("eval", [record], [1.0])
        return result["output"]

    def _begin_evaluation(
        self, ahead: BatchesAhead, args: Sequence[Any], options: Mapping[str, Any]
    ) -> Evaluation | None:
        """The evaluation by this Trainer's own ``prediction_step``.

        Returns ``None`` if the loader has one batch, which needs no replicas.
        """
        # Modules and functions are searched once: that takes longer than a batch.
        engine = self.engine_of_the_model()
        self._choose_turns(OF_LOOP)
        engine.loop = self.options()
        if not self.takes_turns and len(ahead.read(2)) == 1:
            return None
        ahead.evaluation = Evaluation(
            engine, self._replicated, self.lent_roots, _NOT_LENT
        )
        if not self.takes_turns:
            copies: dict[Any, CopiesOnReplica] = {}
            predict = partial(
                self._predict_on_replica, copies=copies, args=args, options=options
            )
            ahead.evaluation.begin_groups(predict)
        return ahead.evaluation

    def _predict_in_turn(
        self, evaluation: Evaluation, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The Trainer's own ``prediction_step``, on the device of the next batch."""
        device = evaluation.next_device()
        with contextlib.ExitStack() as stack:
            stack.enter_context(evaluation.turn(device))
            if device != evaluation.home:
                # Not every library's function asks the Trainer to place its inputs.
                inputs = values_on_device(inputs, physical(device))
                placed = _Placed(self.trainer.accelerator, physical(device))
                stack.enter_context(overridden(self.trainer, accelerator=placed))
                here = overridden(self.trainer.args, _setup_devices=physical(device))
                stack.enter_context(here)
            stock = type(self.trainer).prediction_step
            output = stock(self.trainer, model, inputs, *args, **kwargs)
        return evaluation.brought_home(output, device)

    def _predict_on_replica(
        self,
        work: Any,
        batch: Any,
        copies: dict[Any, CopiesOnReplica],
        args: Sequence[Any],
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The Trainer's own ``prediction_step`` for one batch, on a replica.

        Those of the replica are added to ``copies``, unless they are there. Returns the
        output, and the record of what the call has logged and measured.
        """
        # Not on this object: what one call keeps there, a capture of another replica's
        # call would find written.
        if work not in copies:
            copies[work] = self._copies_on(work)
        with self._standing_in(work, copies[work]) as (trainer, record):
            output = trainer.prediction_step(
                trainer.model, copy.copy(batch), *args, **options
            )
        return {"output": output, "record": record}


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


def loss_class(trainer: Any, package: str | None = None) -> Any:
    """The first class that defines ``compute_loss``, in this package if it is given;
    ``None`` if there is none.
    """
    for base in type(trainer).__mro__:
        is_there = package in (None, package_of(base))
        if is_there and "compute_loss" in vars(base):
            return base
    return None
