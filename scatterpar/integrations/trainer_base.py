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
from scatterpar.integrations.loop import Additions, Modules, as_rows, copy_of, modules_in, num_rows
from scatterpar.replicas.compiled import compile_fn_from
from scatterpar.sharded import ShardedOptimizer
from scatterpar.step.costs import check_budget, plan_by_cost
from scatterpar.step.markers import Rows
from scatterpar.verify.verifier import difference

# How the losses of batches make up that of all, the likeliest mean first.
DIVIDED = "mean over labels, which divides by num_items_in_batch itself"
LABELS = "mean over labels"
SHIFTED = "mean over labels without the first of each row"
ROWS = "mean over rows"
SUM = "sum"

_OFTEN = 8  # so many steps with an open question are looked at, then steps 8, 16, 32 … alone

_IGNORED = -100

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

# Not replicated: "model_wrapped" is the model, "reward_funcs" run before a step.
_NOT_REPLICATED = "_engine _parts model_wrapped reward_funcs train_dataset eval_dataset".split()  # noqa: SIM905

# TRL's trainers whose losses of batches make up that of all; but not those of these loss types.
_OF_TRL: dict[str, tuple[str, ...]] = {
    "SFTTrainer": (),
    "RewardTrainer": (),
    "RLOOTrainer": (),
    "DPOTrainer": ("sft", "aot", "aot_unpaired", "bco_pair"),
    "KTOTrainer": ("kto",),
    "GRPOTrainer": ("bnpo",),
}


# What the arguments say of one device; the last two are of TRL's trainers that generate.
_SIZES = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
)

# What stands in front of a Trainer: the Trainer, which its other bases bring along.
if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class TrainerBase(_Base):
    """Lets a Trainer work as on one device, which accumulates the batches of all replicas.

    The arguments of the Trainer are a copy of the user's, changed accordingly. ``compute_loss`` is
    called on copies of the Trainer that have the replicas' modules.
    """

    data_collator: Any
    _engine: ScatterOnceParallel | None = None
    _kinds: Sequence[str] = (LABELS, SHIFTED, ROWS, SUM)  # those that may be; none: nothing fits
    _looked: Sequence[int] = ()  # in which steps
    _predicts_alone = False
    _window: Sequence[Any] = ()
    _window_size = 1
    _parts: Sequence[nn.Module] = ()
    _sharded: ShardedOptimizer | None = None
    _whole = False  # a batch of the loader has the rows of a step

    def __init__(
        self,
        *args: Any,
        device_ids: Sequence[DeviceLike] | None = None,
        shard_optimizer: bool = False,
        micro_batch_cost: float | None = None,
        **kwargs: Any,
    ) -> None:
        check_budget(micro_batch_cost, 1, None, False)
        self._micro_batch_cost, self._whole = micro_batch_cost, micro_batch_cost is not None
        self._device_ids = device_ids
        self._shard_optimizer = shard_optimizer
        super().__init__(*map(_own, args), **{name: _own(v) for name, v in kwargs.items()})
        _refuse_losses(self)
        _warn_of_overrides(type(self))

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's own, for one process that, to its knowledge, has one device."""
        _refuse(self.args, self.model)
        self._user_args = {
            name: getattr(self.args, name) for name in _SIZES if hasattr(self.args, name)
        }
        self._set_single_device_args()
        self.args._n_gpu = min(self.args.n_gpu, 1)  # so that it does not wrap in nn.DataParallel
        super().create_accelerator_and_postprocess()

    def _hp_search_setup(self, trial: Any) -> None:
        """The Trainer's own, in which a trial sets some arguments anew, as for one replica."""
        vars(self.args).update(self._user_args)
        super()._hp_search_setup(trial)
        self._set_single_device_args()

    def _set_single_device_args(self) -> None:
        """Let the arguments say what one device with the batches of all replicas has."""
        told = self._of_all_replicas(self._user_args, len(self._replicas()))
        vars(self.args).update(told)
        self._train_batch_size = self.args.train_batch_size

    def _of_all_replicas(self, asked: dict[str, Any], n: int) -> dict[str, Any]:
        """The arguments for one device with the batches of ``n``, each as ``asked``."""
        kept = ["per_device_train_batch_size"]
        if not self._evaluates_on_all():
            kept.append("per_device_eval_batch_size")
        told = {k: v if k in kept or v is None else v * n for k, v in asked.items()}
        if self._whole:
            told["per_device_train_batch_size"] *= told["gradient_accumulation_steps"]
            told["gradient_accumulation_steps"] = 1
        return told

    def _evaluates_on_all(self) -> bool:
        """Whether the replicas evaluate together: other trainers compute more than outputs."""
        others = ("trl.", "sentence_transformers.")
        return not any(base.__module__.startswith(others) for base in type(self).__mro__)

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

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, with batches left on the host, from where they are scattered."""
        placing, collate = self.accelerator.device_placement, self.data_collator
        self.accelerator.device_placement = False
        if self._micro_batch_cost is not None:
            name = getattr(self.model, "main_input_name", "input_ids")
            self.data_collator = _CutByCost(collate, name, self._micro_batch_cost, self._replicas())
        try:
            return super().get_train_dataloader(*args, **kwargs)
        finally:
            self.accelerator.device_placement, self.data_collator = placing, collate

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any) -> Any:
        """The Trainer's own. With ``dataloader_drop_last`` the last step of an epoch is whole.

        As on one device whose batches have the rows of a step.
        """
        if args.dataloader_drop_last and isinstance(dataloader, Sized):
            k = args.gradient_accumulation_steps
            dataloader = _Proxy(dataloader, _length=len(dataloader) // k * k)
        return super().set_initial_training_values(args, dataloader, *more)

    # The engine, and the modules that it replicates.

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, sharded over the replicas' devices if that was asked for."""
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
            # How losses combine is found out here: verify would refuse what the Trainer warns of.
            self._engine = ScatterOnceParallel(work, device_ids=self._replicas(), verify=False)
            if self._sharded is not None:
                self._sharded.engine = self._engine
        return self._engine

    def _module_attributes(self) -> dict[str, Any]:
        """The Trainer's modules by its attributes' names, where they stand alone, or together."""
        held = {name: value for name, value in vars(self).items() if name not in _NOT_REPLICATED}
        return {name: value for name, value in held.items() if modules_in(value)}

    def _compiled(self, model: nn.Module) -> Any:
        """The model, compiled where ``torch_compile`` asks for it."""
        args = self.args
        options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        how = compile_fn_from(options if args.torch_compile else None)
        return model if how is None else how(model)

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def _trainer_copy(self, work: Modules) -> Self:
        """A copy of the Trainer that holds a replica's modules, and what it collects itself."""
        replicas = dict(zip(map(id, self._parts), work.parts, strict=True))
        trainer, model = copy_of(self, replicas, _NOT_REPLICATED), work.parts[0]
        device = next((p.device for p in model.parameters()), self.args.device)
        accelerator = _Proxy(self.accelerator, device=device)
        vars(trainer).update(model_wrapped=model, accelerator=accelerator)
        if "_metrics" in vars(self):  # what TRL's trainers collect in compute_loss
            vars(trainer)["_metrics"] = {mode: defaultdict(list) for mode in vars(self)["_metrics"]}
        return trainer

    def _loss_of(self, work: Modules, batch: Any, items: Any) -> dict[str, Any]:
        """The loss of one batch by the Trainer's own ``compute_loss``, and what that collected.

        ``items`` is the window's number of them, for a sum, or ``True``: the batch's own, with
        which it is the batch's mean, whatever it does with the number.
        """
        trainer, items = self._trainer_copy(work), self._terms(batch) if items is True else items
        collected = Collected(trainer)
        loss: Any = trainer.compute_loss(trainer._module(), _plain(batch), num_items_in_batch=items)
        return {"loss": loss, "collected": collected.end(trainer)}

    def _collect(self, collected: Sequence[Collected], weights: Sequence[float]) -> None:
        """What the calls of ``compute_loss`` counted and measured, as if it had been one call."""
        measured: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for one, weight in zip(collected, weights, strict=True):
            one.add_to(self)
            for key, value in one.measured.items():
                measured[key].append((value, weight))
        metrics = vars(self).get("_metrics", {})
        for (mode, name), values in measured.items():
            if name == "num_tokens":  # so far
                metrics[mode][name] = [vars(self)["_total_train_tokens"]]
            else:
                metrics[mode][name].append(_joined(name, values))

    def _terms(self, batch: Any) -> Any:
        return weight_of({"batch": batch}, kind=LABELS, shifts=self._loss_shifts_labels)

    def _count_of(self, kind: str) -> Callable[..., Any]:
        """How much a batch's mean counts, as a function of a step's inputs."""
        return partial(weight_of, kind=kind, shifts=self._loss_shifts_labels)

    # How losses combine: what the Trainer says of itself, or what a handful of rows tells.

    def _how_losses_combine(self, window: Sequence[Any], items: Any, pieces: Sequence[Any]) -> str:
        """How the losses of ``pieces`` do, which are the window's batches or cut from them."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)  # since transformers 5.19
        if _is_trl(self) and scaled is not None:
            return SUM if scaled else ROWS
        step = self.state.global_step + 1
        is_turn = step >= _OFTEN and not step & (step - 1) and step not in self._looked
        is_new = len(self._looked) < _OFTEN and self._is_open(pieces)
        if len(pieces) > 1 and (is_turn or is_new):
            self._looked = [*self._looked, step]
            self._look(window, items)
            if self._is_open(pieces):
                warnings.warn(_UNTOLD, stacklevel=3)
        kind = next(iter(self._kinds), LABELS)
        return LABELS if kind == DIVIDED and items is None else kind

    def _is_open(self, pieces: Sequence[Any]) -> bool:
        """Whether it matters for these which of the kinds it is."""
        found = set()
        for kind in self._kinds:
            count = self._count_of(kind)
            counts = [1.0 if kind == SUM else float(count({"batch": piece})) for piece in pieces]
            total = 1.0 if kind == SUM else sum(counts) or 1.0
            found.add(tuple(round(count / total, 9) for count in counts))
        return len(found) > 1

    def _look(self, window: Sequence[Any], items: Any) -> None:
        """Strike out what the losses of a handful of rows are not."""
        batch = next((b for b in window if self._is_open(each_row(b))), window[0])
        # With twice the number of items, a loss that divides by it is half of it.
        twice = {"work": self._halved, "batch": Rows([batch] * 2), "row": torch.arange(2)}
        divides, rows = items is not None and self._off(twice, SUM) == 0, num_rows(batch)
        if rows > 1:
            own = {"work": self._loss_of, "items": None if items is None else True}
            inputs: dict[str, Any] = {**own, "batch": as_rows(_plain(batch))}
            off = {kind: self._off(inputs, kind) for kind in self._kinds}
            exact = [kind for kind in off if off[kind] == 0]
            divides = divides and not {DIVIDED, LABELS}.isdisjoint(exact)
            worst = max((each for each in off.values() if each), default=None)
            if exact or worst:
                self._kinds = exact
            if worst and not exact:
                if _is_trl(self):
                    why = "the losses of batches do not make up that of all"
                    raise ValueError(_refusal(self, why))
                warnings.warn(_UNKNOWN.format(worst), stacklevel=4)
        if divides:
            self._kinds = [DIVIDED]

    def _halved(self, work: Modules, batch: Sequence[Any], row: Tensor) -> Any:
        """The loss of a batch for two rows, and for one of them that with twice the items."""
        trainer, items = self._trainer_copy(work), 2 // row.unique().numel() * self._terms(batch[0])
        return trainer.compute_loss(trainer._module(), _plain(batch[0]), num_items_in_batch=items)

    def _off(self, inputs: dict[str, Any], kind: str) -> float | None:
        """How far a handful of rows are from combining so; ``None`` where they do not tell."""
        how: Any = {"reduction": "sum"} if kind == SUM else {"count": self._count_of(kind)}
        model = self._module()
        training = model.training
        model.eval()
        try:
            return difference(self._engine_of_the_model(), inputs, **how)
        except ValueError:  # such as tensors that disagree in their rows
            return None
        finally:
            model.train(training)

    def _module(self) -> nn.Module:
        assert isinstance(self.model, nn.Module)
        return self.model


def _own(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, transformers.TrainingArguments) else value


def _warn_of_overrides(cls: type) -> None:
    bases = cls.__mro__
    for base in bases[bases.index(TrainerBase) + 1 : bases.index(transformers.Trainer)]:
        # TRL's overrides do nothing else than the mixin does, too.
        if "training_step" in vars(base) and not base.__module__.startswith("trl."):
            warnings.warn(
                f"{base.__name__}.training_step is not called: ScatterOnceMixin makes one step "
                f"of the whole window of batches; move what it does to compute_loss",
                stacklevel=3,
            )


def _refuse(args: Any, model: Any) -> None:
    """Refuse, by name, what needs other processes, or another owner of the model or gradients."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    devices = {*(getattr(model, "hf_device_map", None) or {}).values()}
    found = {
        "torchrun (several processes)": args.world_size > 1,
        "DeepSpeed": args.deepspeed,
        "FSDP": args.fsdp,
        "a model spread by device_map": len(devices) > 1,
        f"the optimizer {optimizer}": "lomo" in optimizer,
    }
    for name, given in found.items():
        if given:
            raise ValueError(
                f"ScatterOnceTrainer does not go together with {name}: it trains one whole model "
                "in one process, with gradients that are complete before the optimizer's step; use "
                "the stock Trainer"
            )


def _refuse_losses(trainer: Any) -> None:
    """Refuse, by name, losses of batches that do not make up that of all: detectors', TRL's."""
    model = trainer.model
    kind = str(getattr(model, "loss_type", None))
    if "Detection" in kind and trainer.args.gradient_accumulation_steps > 1:
        raise ValueError(
            f"ScatterOnceTrainer does not go together with {type(model).__name__} "
            f"(loss_type={kind!r}) on several replicas or with accumulated batches: its loss "
            f"is divided by the boxes of a whole batch; use the stock Trainer"
        )
    of_trl = [base for base in type(trainer).__mro__ if base.__module__.startswith("trl.")]
    name = next((base.__name__ for base in of_trl if "compute_loss" in vars(base)), None)
    if name is None:
        return
    types = getattr(trainer, "loss_types", None) or [getattr(trainer, "loss_type", None)]
    bad, term = _OF_TRL.get(name, ()), "is a term over a batch"
    experts, entropy = (
        getattr(trainer, one, False) for one in ("aux_loss_enabled", "_entropy_bonus_enabled")
    )
    found = {
        "its loss is not known to be made up of its batches'": name not in _OF_TRL,
        **{f"loss_type={one!r} has terms over a whole batch": one in bad for one in types},
        f"the auxiliary loss of a mixture of experts {term}": experts,
        f"an entropy bonus {term}": entropy,
        f"top_entropy_quantile {term}": getattr(trainer, "top_entropy_quantile", 1.0) < 1.0,
    }
    for why, given in found.items():
        if given:
            raise ValueError(_refusal(trainer, why))


class _CutByCost:
    """A collator that cuts the rows of a step into micro-batches, and collates each of these.

    A row costs the length of its entry ``name``. Returns the micro-batches, replica by replica.
    """

    def __init__(
        self, collate: Callable[[Any], Any], name: str, budget: float, devices: Sequence[Any]
    ) -> None:
        self._collate, self._name, self._budget, self._devices = collate, name, budget, devices

    def __call__(self, rows: Sequence[Any]) -> list[Any]:
        try:
            costs = [len(row[self._name]) for row in rows]
        except (KeyError, TypeError):
            raise ValueError(
                f"micro_batch_cost needs the length of each row's {self._name!r}, the model's main "
                f"input, and a row is {_shown(rows[0])}; leave micro_batch_cost out"
            ) from None
        equal = [1.0] * len(self._devices)
        plan = plan_by_cost(len(rows), costs, self._devices, self._budget, equal)
        pieces = chain.from_iterable(share.row_numbers for share in plan.shares)
        return [self._collate([rows[row] for row in piece]) for piece in pieces]


class _Proxy:
    """Another object with attributes of its own: an accelerator elsewhere, a shorter loader."""

    def __init__(self, other: Any, **own: Any) -> None:
        self._other, self._length = other, 1
        vars(self).update(own)

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


def _joined(name: str, values: Sequence[tuple[float, float]]) -> float:
    """A metric of several batches as that of all: the weighted mean, or what its name says."""
    if name.startswith(("min_", "max_")):
        return (min if name.startswith("min_") else max)(value for value, _ in values)
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else math.nan


@contextlib.contextmanager
def override_methods(module: nn.Module, **methods: Callable[..., Any]) -> Iterator[None]:
    """A module with other methods, such as ``forward``, and without hooks, while it lasts."""
    own = vars(module)
    before = {name: own[name] for name in (*methods, *_HOOKS) if name in own}
    own.update({**methods, **{name: {} for name in _HOOKS}})
    try:
        yield
    finally:
        for name in methods:
            own.pop(name, None)
        own.update(before)


def _shown(row: Any) -> str:
    return f"a dict of {[*row]}" if isinstance(row, Mapping) else f"a {type(row).__name__}"


def _plain(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch


def _owner(trainer: Any) -> type:
    """The class whose ``compute_loss`` it is."""
    return next(base for base in type(trainer).__mro__ if "compute_loss" in vars(base))


def _is_trl(trainer: Any) -> bool:
    return _owner(trainer).__module__.startswith("trl.")


def _refusal(trainer: Any, why: str) -> str:
    return (
        f"ScatterOnceMixin does not go together with {_owner(trainer).__name__} here: {why}; use "
        f"the stock class on one device"
    )


def weight_of(inputs: Mapping[str, Any], _: Any = None, *, kind: str, shifts: bool) -> Any:
    """How much the mean of ``inputs["batch"]`` counts: its labels, or rows where there are none.

    With ``shifts`` without the first of each row, which the Trainer knows that the loss leaves out.
    """
    batch = inputs["batch"]
    labels = batch.get("shift_labels")
    if not isinstance(labels, Tensor):
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or not labels.ndim:
            return num_rows(batch)
        labels = labels[..., 1:] if shifts or kind == SHIFTED else labels
    return num_rows(batch) if kind == ROWS else labels.ne(_IGNORED).sum()


def each_row(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What of each row tells how much it counts."""
    rows = num_rows(batch)
    named = {n: batch[n] for n in ("shift_labels", "labels") if isinstance(batch.get(n), Tensor)}
    if any(labels.ndim == 0 or len(labels) != rows for labels in named.values()):
        return []
    return [{"row": [i], **{n: t[i : i + 1] for n, t in named.items()}} for i in range(rows)]


_UNTOLD = (
    "how the losses of batches combine could not be told from this step's rows, such as one row in "
    "a batch; they are averaged, weighted by their labels, or by their rows where there are none"
)
_UNKNOWN = (
    "how the losses of batches combine is not known: for a few rows the gradient of the mean or "
    "sum of their losses is off by up to {:.2g} (relative). A loss that compares rows with each "
    "other, one that is NaN for a row alone, or an auxiliary one of the whole batch is computed "
    "for each batch, and these are averaged"
)
