"""The base of all Trainers: devices, batches, ``compute_loss``, and how losses combine."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import torch
import transformers
from torch import Tensor, nn

from scatterpar.devices.runtime import DeviceLike, physical, resolve
from scatterpar.engine import ScatterOnceParallel
from scatterpar.integrations.loop import (
    Additions,
    Modules,
    as_rows,
    copy_of,
    modules_in,
    num_rows,
    refuse,
)
from scatterpar.replicas.compiled import compile_fn_from
from scatterpar.sharded import ShardedOptimizer
from scatterpar.step.costs import check_budget, plan_by_cost
from scatterpar.step.markers import Rows
from scatterpar.verify.verifier import difference

# How the losses of batches combine into the loss of all batches; the most likely mean is first.
# DIVIDED differs from LABELS only in rounding: the loss itself divides, as with the stock Trainer.
DIVIDED = "mean over labels, which divides by num_items_in_batch itself"
LABELS = "mean over labels"
SHIFTED = "mean over labels without the first of each row"
ROWS = "mean over rows"
SUM = "sum"

_FIRST_CHECKS = 8  # of undecided steps; after these only steps 8, 16, 32 … are checked

_IGNORED = -100

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

# Not replicated: "model_wrapped" is the model, and "reward_funcs" run before a step.
_NOT_REPLICATED = "_engine _parts model_wrapped reward_funcs train_dataset eval_dataset".split()  # noqa: SIM905

# TRL's trainers whose losses of batches combine into that of all, except with these loss types.
_OF_TRL: dict[str, tuple[str, ...]] = {
    "SFTTrainer": (),
    "RewardTrainer": (),
    "RLOOTrainer": (),
    "DPOTrainer": ("sft", "aot", "aot_unpaired", "bco_pair"),
    "KTOTrainer": ("kto",),
    "GRPOTrainer": ("bnpo",),
}


# Arguments per device. The last two belong to TRL's trainers that generate.
_SIZES = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
)

# The subclasses have a Trainer among their other bases.
if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class TrainerBase(_Base):
    """Makes a Trainer work as on one device that accumulates the batches of all replicas.

    ``trainer.args`` is a copy of the user's arguments, changed accordingly. ``compute_loss`` is
    called on copies of the Trainer that refer to the replicas' modules.
    """

    data_collator: Any
    _engine: ScatterOnceParallel | None = None
    _combinations: Sequence[str] = (LABELS, SHIFTED, ROWS, SUM)  # not excluded yet; none: no match
    _checked_steps: Sequence[int] = ()
    _predicts_on_master = False
    _window: Sequence[Any] = ()
    _window_size = 1
    _parts: Sequence[nn.Module] = ()
    _sharded: ShardedOptimizer | None = None
    _loads_steps = False  # a batch of the loader has all rows of a step

    def __init__(
        self,
        *args: Any,
        device_ids: Sequence[DeviceLike] | None = None,
        shard_optimizer: bool = False,
        micro_batch_cost: float | None = None,
        **kwargs: Any,
    ) -> None:
        if micro_batch_cost is not None:
            check_budget(micro_batch_cost)
        self._micro_batch_cost, self._loads_steps = micro_batch_cost, micro_batch_cost is not None
        self._device_ids, self._shard_optimizer = device_ids, shard_optimizer
        kwargs = {name: _copied_if_arguments(value) for name, value in kwargs.items()}
        super().__init__(*map(_copied_if_arguments, args), **kwargs)
        _refuse_losses(self)
        _warn_of_overrides(type(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Do what the Trainer does, with arguments for one process that has one device."""
        _refuse(self.args, self.model)
        self._user_args = {
            name: getattr(self.args, name) for name in _SIZES if hasattr(self.args, name)
        }
        self._set_single_device_args()
        self.args._n_gpu = min(self.args.n_gpu, 1)  # prevents nn.DataParallel
        super().create_accelerator_and_postprocess()

    def _hp_search_setup(self, trial: Any) -> None:
        """Do what the Trainer does. A trial sets some arguments again, for one replica."""
        vars(self.args).update(self._user_args)
        super()._hp_search_setup(trial)
        self._set_single_device_args()

    def _set_single_device_args(self) -> None:
        """Set the arguments to those of one device that has the batches of all replicas."""
        n, unchanged = len(self._replicas()), {"per_device_train_batch_size"}
        if not self._evaluates_on_all():
            unchanged.add("per_device_eval_batch_size")
        sizes = {
            name: size if name in unchanged or size is None else size * n
            for name, size in self._user_args.items()
        }
        if self._loads_steps:
            sizes["per_device_train_batch_size"] *= sizes["gradient_accumulation_steps"]
            sizes["gradient_accumulation_steps"] = 1
        vars(self.args).update(sizes)
        self._train_batch_size = self.args.train_batch_size

    def _evaluates_on_all(self) -> bool:
        """Whether all replicas evaluate. Trainers that compute more than outputs use the master."""
        others = ("trl.", "sentence_transformers.")
        return not any(base.__module__.startswith(others) for base in type(self).__mro__)

    def _replicas(self) -> tuple[torch.device, ...]:
        """The device of each replica. The first one is the Trainer's device."""
        ids, main = self._device_ids, self.args.device
        if ids is None and main.type == "cpu":
            ids = ["cpu"]  # the user asked for the CPU, even if there are accelerators
        devices = resolve(ids)
        first = physical(devices[0])
        if (first.type, first.index or 0) != (main.type, main.index or 0):
            raise ValueError(
                f"device_ids must begin with the Trainer's own device, {main}, where it keeps the "
                f"model; got {devices[0]} first"
            )
        return devices

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's loader, but its batches stay on the host: the engine scatters them."""
        placing, collate = self.accelerator.device_placement, self.data_collator
        self.accelerator.device_placement = False
        if self._micro_batch_cost is not None:
            name = getattr(self.model, "main_input_name", "input_ids")
            options: dict[str, Any] = {"collate": collate, "name": name}
            options |= {"budget": self._micro_batch_cost, "devices": self._replicas()}
            self.data_collator = partial(_cut_by_cost, **options)
        try:
            return super().get_train_dataloader(*args, **kwargs)
        finally:
            self.accelerator.device_placement, self.data_collator = placing, collate

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any) -> Any:
        """The Trainer's values. ``dataloader_drop_last`` also drops an incomplete last window."""
        if args.dataloader_drop_last and isinstance(dataloader, Sized):
            window = args.gradient_accumulation_steps
            dataloader = _Proxy(dataloader, _length=len(dataloader) // window * window)
        return super().set_initial_training_values(args, dataloader, *more)

    # The engine, and the modules that it replicates.

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's optimizer; with ``shard_optimizer`` as a ``ShardedOptimizer``."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self._shard_optimizer:
            engine = self._engine_of_the_model()
            if self._sharded is None or self._sharded is not getattr(optimizer, "optimizer", None):
                self._sharded = ShardedOptimizer(engine, lambda _: optimizer)
                self.optimizer = self._sharded
        return self.optimizer

    def _engine_of_the_model(self) -> ScatterOnceParallel:
        others = chain.from_iterable(map(modules_in, self._module_attributes().values()))
        parts = list(dict.fromkeys([self._module(), *others]))
        if self._engine is not None and list(map(id, parts)) != list(map(id, self._parts)):
            self._close_engine()
        if self._engine is None:
            self._parts = parts
            work = Modules([self._compiled(parts[0]), *parts[1:]])
            # _how_losses_combine replaces verify, which would refuse what the Trainer warns of.
            self._engine = ScatterOnceParallel(work, device_ids=self._replicas(), verify=False)
            if self._sharded is not None:
                self._sharded.engine = self._engine
        return self._engine

    def _module_attributes(self) -> dict[str, Any]:
        """The attributes of the Trainer that are modules, or lists or dicts of modules, by name."""
        attributes = vars(self).items()
        return {k: v for k, v in attributes if k not in _NOT_REPLICATED and modules_in(v)}

    def _compiled(self, model: nn.Module) -> Any:
        """The model, compiled if the arguments have ``torch_compile``."""
        args = self.args
        options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        compile_fn = compile_fn_from(options if args.torch_compile else None)
        return model if compile_fn is None else compile_fn(model)

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def _trainer_copy(self, work: Modules) -> Self:
        """A copy of the Trainer that refers to a replica's modules, with empty metrics."""
        replicas = dict(zip(map(id, self._parts), work.parts, strict=True))
        trainer, model = copy_of(self, replicas, _NOT_REPLICATED), work.parts[0]
        device = next((p.device for p in model.parameters()), self.args.device)
        accelerator = _Proxy(self.accelerator, device=device)
        vars(trainer).update(model_wrapped=model, accelerator=accelerator)
        if "_metrics" in vars(self):  # TRL's trainers fill them in compute_loss
            vars(trainer)["_metrics"] = {mode: defaultdict(list) for mode in vars(self)["_metrics"]}
        return trainer

    def _loss_of(self, work: Modules, batch: Any, items: Any) -> dict[str, Any]:
        """The loss of one batch by ``compute_loss``, and what the call collected.

        ``items`` is passed as ``num_items_in_batch``. With ``True`` that is the number of the
        batch's labels, so that the loss is the mean of the batch even if it divides by the number.
        """
        trainer = self._trainer_copy(work)
        items = self._num_labels(batch) if items is True else items
        collected = Collected(trainer)
        loss: Any = trainer.compute_loss(
            trainer._module(), _as_dict(batch), num_items_in_batch=items
        )
        return {"loss": loss, "collected": collected.end(trainer)}

    def _collect(self, collected: Sequence[Collected], weights: Sequence[float]) -> None:
        """Add what calls of ``compute_loss`` counted and measured, as if it had been one call."""
        measured: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for one, weight in zip(collected, weights, strict=True):
            one.add_to(self)
            for key, value in one.measured.items():
                measured[key].append((value, weight))
        metrics = vars(self).get("_metrics", {})
        for (mode, name), values in measured.items():
            if name == "num_tokens":  # the total of the run
                metrics[mode][name] = [vars(self)["_total_train_tokens"]]
            else:
                metrics[mode][name].append(_join_metric(name, values))

    def _num_labels(self, batch: Any) -> Any:
        return self._count_of(LABELS)({"batch": batch})

    def _count_of(self, combination: str) -> Callable[..., Any]:
        """A function of a step's inputs: the weight of the mean loss of their batch."""
        return partial(loss_weight, combination=combination, shifts=self._loss_shifts_labels)

    # How losses combine: TRL's trainers say so, others are checked on a few rows.

    def _how_losses_combine(self, window: Sequence[Any], items: Any, pieces: Sequence[Any]) -> str:
        """How the losses of ``pieces`` combine: the window's batches, or parts of them."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)  # since transformers 5.19
        if _is_trl(self) and scaled is not None:
            return SUM if scaled else ROWS
        step = self.state.global_step + 1
        is_scheduled = step >= _FIRST_CHECKS and not step & (step - 1)
        is_scheduled = is_scheduled and step not in self._checked_steps
        is_new = len(self._checked_steps) < _FIRST_CHECKS and self._is_undecided(pieces)
        if len(pieces) > 1 and (is_scheduled or is_new):
            self._checked_steps = [*self._checked_steps, step]
            self._exclude_combinations(window, items)
            if self._is_undecided(pieces):
                warnings.warn(_INCONCLUSIVE, stacklevel=3)
        combination = next(iter(self._combinations), LABELS)
        return LABELS if combination == DIVIDED and items is None else combination

    def _is_undecided(self, pieces: Sequence[Any]) -> bool:
        """Whether the combinations that are not excluded give these pieces different weights."""
        weights = set()
        for combination in self._combinations:
            is_sum, count = combination == SUM, self._count_of(combination)
            counts = [1.0 if is_sum else float(count({"batch": piece})) for piece in pieces]
            total = 1.0 if is_sum else sum(counts) or 1.0
            weights.add(tuple(round(count / total, 9) for count in counts))
        return len(weights) > 1

    def _exclude_combinations(self, window: Sequence[Any], items: Any) -> None:
        """Exclude the combinations that the losses of a few rows contradict."""
        batch = next((b for b in window if self._is_undecided(split_rows(b))), window[0])
        # With twice the number of items, a loss that divides by it is half as large.
        twice = {"work": self._loss_by_items, "batch": Rows([batch] * 2), "row": torch.arange(2)}
        divides = items is not None and self._relative_error(twice, SUM) == 0
        if num_rows(batch) > 1:
            call = {"work": self._loss_of, "items": None if items is None else True}
            inputs: dict[str, Any] = {**call, "batch": as_rows(_as_dict(batch))}
            errors = {one: self._relative_error(inputs, one) for one in self._combinations}
            exact = [combination for combination, error in errors.items() if error == 0]
            divides = divides and not {DIVIDED, LABELS}.isdisjoint(exact)
            largest = max((error for error in errors.values() if error), default=None)
            if exact or largest:
                self._combinations = exact
            if largest and not exact:
                if _is_trl(self):
                    why = "the losses of batches do not combine into the loss of all"
                    raise ValueError(_refusal(self, why))
                warnings.warn(_UNKNOWN.format(largest), stacklevel=4)
        if divides:
            self._combinations = [DIVIDED]

    def _loss_by_items(self, work: Modules, batch: Sequence[Any], row: Tensor) -> Any:
        """The loss of a batch: for two rows as it is, for one row with twice the items."""
        trainer, inputs = self._trainer_copy(work), _as_dict(batch[0])
        items = 2 // row.unique().numel() * self._num_labels(inputs)
        return trainer.compute_loss(trainer._module(), inputs, num_items_in_batch=items)

    def _relative_error(self, inputs: dict[str, Any], combination: str) -> float | None:
        """How far losses of a few rows are from this combination; ``None`` if inconclusive."""
        is_sum, model = combination == SUM, self._module()
        options: Any = {"reduction": "sum"} if is_sum else {"count": self._count_of(combination)}
        training = model.training
        model.eval()
        try:
            return difference(self._engine_of_the_model(), inputs, **options)
        except ValueError:  # for example tensors that disagree in their rows
            return None
        finally:
            model.train(training)

    def _module(self) -> nn.Module:
        assert isinstance(self.model, nn.Module)
        return self.model


def _copied_if_arguments(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, transformers.TrainingArguments) else value


def _warn_of_overrides(cls: type) -> None:
    bases = cls.__mro__
    for base in bases[bases.index(TrainerBase) + 1 : bases.index(transformers.Trainer)]:
        # TRL's overrides do what the mixin does, too.
        if "training_step" in vars(base) and not base.__module__.startswith("trl."):
            warnings.warn(
                f"{base.__name__}.training_step is not called: ScatterOnceMixin makes one step "
                f"of the whole window of batches; move what it does to compute_loss",
                stacklevel=3,
            )


def _refuse(args: Any, model: Any) -> None:
    """Refuse what needs other processes, or another owner of the model or its gradients."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    devices = {*(getattr(model, "hf_device_map", None) or {}).values()}
    given = {
        "torchrun (several processes)": args.world_size > 1,
        "DeepSpeed": args.deepspeed,
        "FSDP": args.fsdp,
        "a model spread by device_map": len(devices) > 1,
        f"the optimizer {optimizer}": "lomo" in optimizer,
    }
    reason = (
        "it trains one whole model in one process, with gradients that are complete before the "
        "optimizer's step; use the stock Trainer"
    )
    refuse("ScatterOnceTrainer", given, reason)


def _refuse_losses(trainer: Any) -> None:
    """Refuse losses of batches that do not combine into that of all: detectors', some of TRL's."""
    model = trainer.model
    kind = str(getattr(model, "loss_type", None))
    several = f"{type(model).__name__} (loss_type={kind!r}) on several replicas or with accumulated"
    is_refused = "Detection" in kind and trainer.args.gradient_accumulation_steps > 1
    reason = "its loss is divided by the boxes of a whole batch; use the stock Trainer"
    refuse("ScatterOnceTrainer", {f"{several} batches": is_refused}, reason)
    of_trl = [base for base in type(trainer).__mro__ if base.__module__.startswith("trl.")]
    base = next((base.__name__ for base in of_trl if "compute_loss" in vars(base)), None)
    if base is None:
        return
    has = partial(getattr, trainer)
    types = has("loss_types", None) or [has("loss_type", None)]
    refused_types, term = _OF_TRL.get(base, ()), "is a term over a batch"
    given = {
        "its loss is not known to be made up of its batches'": base not in _OF_TRL,
        **{f"loss_type={t!r} has terms over a whole batch": t in refused_types for t in types},
        f"the auxiliary loss of a mixture of experts {term}": has("aux_loss_enabled", False),
        f"an entropy bonus {term}": has("_entropy_bonus_enabled", False),
        f"top_entropy_quantile {term}": has("top_entropy_quantile", 1.0) < 1.0,
    }
    for why, is_given in given.items():
        if is_given:
            raise ValueError(_refusal(trainer, why))


def _cut_by_cost(
    rows: Sequence[Any],
    *,
    collate: Callable[[Any], Any],
    name: str,
    budget: float,
    devices: Sequence[Any],
) -> list[Any]:
    """The rows of a step, cut into micro-batches and collated: a list, replica by replica.

    The cost of a row is the length of its entry ``name``.
    """
    try:
        costs = [len(row[name]) for row in rows]
    except (KeyError, TypeError):
        first = rows[0]
        kind = f"dict of {[*first]}" if isinstance(first, Mapping) else type(first).__name__
        raise ValueError(
            f"micro_batch_cost needs the length of each row's {name!r}, the model's main input, "
            f"and a row is a {kind}; leave micro_batch_cost out"
        ) from None
    plan = plan_by_cost(len(rows), costs, devices, budget, [1.0] * len(devices))
    numbers = chain.from_iterable(share.row_numbers for share in plan.shares)
    return [collate([rows[row] for row in part]) for part in numbers]


class _Proxy:
    """Another object with some attributes replaced, or, with ``_length``, another length."""

    def __init__(self, other: Any, **replaced: Any) -> None:
        self._other, self._length = other, 1
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)

    def __len__(self) -> int:
        return self._length


class Collected(Additions):
    """What one call of ``compute_loss`` added to its copy of the Trainer.

    ``measured`` has the mean of each of TRL's metrics, by mode and name.
    """

    def end(self, owner: Any) -> Self:
        """Keep what the call has added and measured."""
        self.measured = {
            (mode, name): sum(values) / len(values)
            for mode, metrics in vars(owner).get("_metrics", {}).items()
            for name, values in metrics.items()
            if values
        }
        return super().end(owner)


def _join_metric(name: str, values: Sequence[tuple[float, float]]) -> float:
    """The metric of all batches: the weighted mean, or the minimum or maximum, by its name."""
    if name.startswith(("min_", "max_")):
        return (min if name.startswith("min_") else max)(value for value, _ in values)
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else math.nan


@contextlib.contextmanager
def override_methods(module: nn.Module, **methods: Callable[..., Any]) -> Iterator[None]:
    """In the body, the module has these methods, such as ``forward``, and no hooks."""
    attributes = vars(module)
    before = {name: attributes[name] for name in (*methods, *_HOOKS) if name in attributes}
    attributes.update({**methods, **{name: {} for name in _HOOKS}})
    try:
        yield
    finally:
        for name in methods:
            attributes.pop(name, None)
        attributes.update(before)


def _as_dict(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch


def _loss_class(trainer: Any) -> type:
    """The class that defines the trainer's ``compute_loss``."""
    return next(base for base in type(trainer).__mro__ if "compute_loss" in vars(base))


def _is_trl(trainer: Any) -> bool:
    return _loss_class(trainer).__module__.startswith("trl.")


def _refusal(trainer: Any, why: str) -> str:
    return (
        f"ScatterOnceMixin does not go together with {_loss_class(trainer).__name__} here: {why}; "
        f"use the stock class on one device"
    )


def loss_weight(inputs: Mapping[str, Any], _: Any = None, *, combination: str, shifts: bool) -> Any:
    """The weight of the mean loss of ``inputs["batch"]``: its number of labels, or of rows.

    Ignored labels do not count, nor, with ``shifts``, the first label of each row: the Trainer
    knows that the loss leaves it out.
    """
    batch = inputs["batch"]
    labels = batch.get("shift_labels")
    if not isinstance(labels, Tensor):
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or not labels.ndim:
            return num_rows(batch)
        labels = labels[..., 1:] if shifts or combination == SHIFTED else labels
    return num_rows(batch) if combination == ROWS else labels.ne(_IGNORED).sum()


def split_rows(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One batch per row, with the entries that ``loss_weight`` reads; empty if there are none."""
    rows = num_rows(batch)
    named = {n: batch[n] for n in ("shift_labels", "labels") if isinstance(batch.get(n), Tensor)}
    if any(labels.ndim == 0 or len(labels) != rows for labels in named.values()):
        return []
    return [{"row": [i], **{n: t[i : i + 1] for n, t in named.items()}} for i in range(rows)]


_INCONCLUSIVE = (
    "this step's rows do not show how the losses of batches combine, for example because a batch "
    "has one row; the losses are averaged, weighted by the number of labels, or of rows if there "
    "are no labels"
)
_UNKNOWN = (
    "how the losses of batches combine is not known: for a few rows the gradient of the mean or "
    "sum of their losses is off by up to {:.2g} (relative), as it is if a loss compares rows, is "
    "NaN for a single row, or has an auxiliary term over the whole batch; the loss is computed for "
    "each batch, and the losses are averaged"
)
