"""A Trainer on all replicas: devices, batches, ``compute_loss``, and what a loss is a mean of."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import transformers
from torch import Tensor, nn

from scatterpar.devices.verbs import DeviceLike, physical, resolve
from scatterpar.engine import ScatterOnceParallel
from scatterpar.replicas.compiled import checked_how
from scatterpar.sharded import ShardedOptimizer
from scatterpar.step import nested
from scatterpar.step.markers import Rows

__all__ = [
    "DIVIDED",
    "ROWS",
    "SUM",
    "AllReplicas",
    "Collected",
    "each_row",
    "rows_of",
    "standing_in",
    "weight_of",
]

# How the losses of batches make up that of all, the likeliest mean first.
DIVIDED = "sum of parts, each divided by num_items_in_batch"
LABELS = "mean over labels"
SHIFTED = "mean over labels without the first of each row"
ROWS = "mean over rows"
SUM = "sum"

_OFTEN = 8  # so many steps with an open question are looked at, then steps 8, 16, 32 … alone

_IGNORED = -100

# The prepared model is the model; reward models judge what is generated, before a step.
_NOT_HELD = ("_engine", "_parts", "model_wrapped", "reward_funcs")

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
_RANDOM_STATES = "rng_state_replicas.pth"

# What stands in front of a Trainer: the Trainer, which its other bases bring along.
if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class AllReplicas(_Base):
    """Makes a Trainer believe in one device, which accumulates the batches of all replicas.

    Its arguments are a copy of the user's, and say so. Its ``compute_loss`` is called on copies of
    it that hold the replicas' modules.
    """

    _engine: ScatterOnceParallel | None = None
    _kinds: Sequence[str] = (LABELS, SHIFTED, ROWS, SUM)  # those that may be, unless it is ...
    _divided = False
    _looks = _turn = 0
    _fits = True
    _parts: Sequence[nn.Module] = ()
    _sharded: ShardedOptimizer | None = None

    def __init__(
        self,
        *args: Any,
        device_ids: Sequence[DeviceLike] | None = None,
        shard_optimizer: bool = False,
        **kwargs: Any,
    ) -> None:
        self._device_ids = device_ids
        self._shard_optimizer = shard_optimizer
        super().__init__(*map(_own, args), **{name: _own(v) for name, v in kwargs.items()})
        _refuse_of_trl(self)
        kind = str(getattr(self.model, "loss_type", None))
        if "Detection" in kind and self.args.gradient_accumulation_steps > 1:
            raise ValueError(
                f"ScatterOnceTrainer does not go together with {type(self.model).__name__} "
                f"(loss_type={kind!r}) on several replicas or with accumulated batches: its loss "
                f"is divided by the boxes of a whole batch; use the stock Trainer"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's own, for one process that, to its knowledge, has one device."""
        _refuse(self.args, self.model)
        self._asked = {
            name: getattr(self.args, name) for name in _SIZES if hasattr(self.args, name)
        }
        self._tell()
        self.args._n_gpu = min(self.args.n_gpu, 1)  # so that it does not wrap in nn.DataParallel
        super().create_accelerator_and_postprocess()

    def _hp_search_setup(self, trial: Any) -> None:
        """The Trainer's own, in which a trial sets some arguments anew, as for one replica."""
        for name, number in self._asked.items():
            setattr(self.args, name, number)
        super()._hp_search_setup(trial)
        self._tell()

    def _tell(self) -> None:
        """Let the arguments say what one device with the batches of all replicas has."""
        for name, number in self._of_all_replicas(self._asked, len(self._replicas())).items():
            setattr(self.args, name, number)
        self._train_batch_size = self.args.train_batch_size

    def _of_all_replicas(self, asked: dict[str, Any], n: int) -> dict[str, Any]:
        """The arguments for one device with the batches of ``n``, each as ``asked``."""
        told = {name: number and number * n for name, number in asked.items()}
        told["per_device_train_batch_size"] = asked["per_device_train_batch_size"]
        if not self._evaluates_on_all():
            told["per_device_eval_batch_size"] = asked["per_device_eval_batch_size"]
        return told

    def _evaluates_on_all(self) -> bool:
        """Whether the replicas evaluate together: TRL's trainers compute more than outputs."""
        return not any(base.__module__.startswith("trl.") for base in type(self).__mro__)

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
        placing, self.accelerator.device_placement = self.accelerator.device_placement, False
        try:
            return super().get_train_dataloader(*args, **kwargs)
        finally:
            self.accelerator.device_placement = placing

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any) -> Any:
        """The Trainer's own. With ``dataloader_drop_last`` the last step of an epoch is whole.

        As on one device whose batches have the rows of a step.
        """
        if args.dataloader_drop_last and isinstance(dataloader, Sized):
            dataloader = _WholeSteps(dataloader, args.gradient_accumulation_steps)
        return super().set_initial_training_values(args, dataloader, *more)

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
        parts = list(dict.fromkeys([self._module(), *_modules(self._held().values())]))
        if self._engine is not None and list(map(id, parts)) != list(map(id, self._parts)):
            self._let_go()
        if self._engine is None:
            self._parts = parts
            work = _Work([self._compiled(parts[0]), *parts[1:]])
            # How losses combine is found out here: verify would refuse what the Trainer warns of.
            self._engine = ScatterOnceParallel(work, device_ids=self._replicas(), verify=False)
            if self._sharded is not None:
                self._sharded.engine = self._engine
        return self._engine

    def _held(self) -> dict[str, Any]:
        """The Trainer's modules by its attributes' names, where they stand alone, or together."""
        return {
            name: value
            for name, value in vars(self).items()
            if name not in _NOT_HELD and any(True for _ in _modules([value]))
        }

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

    def _twin(self, work: _Work) -> Self:
        """A copy of the Trainer that holds a replica's modules, and what it collects itself."""
        twin, model = copy.copy(self), work.parts[0]
        replicas = dict(zip(map(id, self._parts), work.parts, strict=True))
        for name, value in self._held().items():
            vars(twin)[name] = nested.transform(lambda one: replicas.get(id(one), one), value)
        device = next((p.device for p in model.parameters()), self.args.device)
        vars(twin).update(model_wrapped=model, accelerator=_Elsewhere(self.accelerator, device))
        if "_metrics" in vars(self):  # what TRL's trainers collect in compute_loss
            vars(twin)["_metrics"] = {mode: defaultdict(list) for mode in vars(self)["_metrics"]}
        return twin

    def _loss_of(self, work: _Work, batch: Any, items: Any, is_sum: bool) -> dict[str, Any]:
        """The loss of one batch by the Trainer's own ``compute_loss``, and what that collected.

        A sum is given the window's number of items. A mean gets that of the batch, so that it is
        the batch's own mean, whatever it does with the number.
        """
        twin = self._twin(work)
        items = items if is_sum or items is None else self._terms(batch)
        loss: Any = twin.compute_loss(twin._module(), _plain(batch), num_items_in_batch=items)
        return {"loss": loss, "collected": Collected(twin, self)}

    def _collect(self, collected: Sequence[Collected], weights: Sequence[float]) -> None:
        """What the calls of ``compute_loss`` counted and measured, as if it had been one call."""
        for name in dict.fromkeys(chain.from_iterable(one.counted for one in collected)):
            more = sum(one.counted.get(name, 0) for one in collected)
            setattr(self, name, getattr(self, name) + more)
        measured: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for one, weight in zip(collected, weights, strict=True):
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

    def _is_scaled(self) -> bool | None:
        """Whether ``compute_loss`` divides by the window already, where the Trainer says so."""
        return getattr(self, "loss_is_scaled_for_ga", None)  # since transformers 5.19

    def _how_losses_combine(self, window: Sequence[Any], items: Any, pieces: Sequence[Any]) -> str:
        """How the losses of ``pieces`` do, which are the window's batches or cut from them."""
        scaled = self._is_scaled()
        if _is_trl(self) and scaled is not None:
            return SUM if scaled else ROWS
        step = self.state.global_step + 1
        is_turn = step >= _OFTEN and not step & (step - 1) and step != self._turn
        self._turn = step
        if len(pieces) > 1 and (is_turn or (self._looks < _OFTEN and self._is_open(pieces, items))):
            self._look(window, items)
            if self._is_open(pieces, items):
                _say(self, _UNTOLD)
        return DIVIDED if self._divided and items is not None else self._kinds[0]

    def _is_open(self, pieces: Sequence[Any], items: Any) -> bool:
        """Whether it matters for these which of the kinds it is."""
        if self._divided and items is not None:
            return False
        found = set()
        for kind in self._kinds:
            counts = [1.0] * len(pieces)
            if kind != SUM:
                counts = [float(self._count_of(kind)({"batch": piece})) for piece in pieces]
                counts = [round(count / (sum(counts) or 1.0), 9) for count in counts]
            found.add(tuple(counts))
        return len(found) > 1

    def _look(self, window: Sequence[Any], items: Any) -> None:
        """Strike out what the losses of a handful of rows are not."""
        self._looks += 1
        batch = next((b for b in window if self._is_open(each_row(b), None)), window[0])
        self._divided = items is not None and self._divides(batch)
        if rows_of(batch) == 1:
            return
        self._divided = self._divided and self._off_on(batch, items, DIVIDED) == 0
        if self._divided:
            return
        off = {kind: self._off_on(batch, items, kind) for kind in self._kinds}
        exact = [kind for kind in off if off[kind] == 0]
        if exact:
            self._kinds = exact
        self._fits = bool(exact) or not any(off.values())
        if not self._fits:
            if _is_trl(self):
                raise ValueError(_refusal(self, "the losses of batches do not make up that of all"))
            self._kinds = [LABELS]
            _say(self, _UNKNOWN.format(max(o for o in off.values() if o)))

    def _divides(self, batch: Any) -> bool:
        """Whether the loss divides by the number of items: with twice that, it is half of it."""
        inputs = {"work": self._halved, "batch": Rows([batch] * 2), "row": torch.arange(2)}
        return self._off(inputs, SUM) == 0

    def _off_on(self, batch: Any, items: Any, kind: str) -> float | None:
        rows, is_sum = rows_of(batch), kind in (SUM, DIVIDED)
        lists = {n: Rows(v) for n, v in batch.items() if isinstance(v, list) and len(v) == rows}
        inputs = {"work": self._loss_of, "items": items, "is_sum": is_sum}
        return self._off({**inputs, "batch": {**batch, **lists}}, kind)

    def _halved(self, work: _Work, batch: Sequence[Any], row: Tensor) -> Any:
        """The loss of a batch for two rows, and for one of them that with twice the items."""
        twin, items = self._twin(work), 2 // row.unique().numel() * self._terms(batch[0])
        return twin.compute_loss(twin._module(), _plain(batch[0]), num_items_in_batch=items)

    def _off(self, inputs: dict[str, Any], kind: str) -> float | None:
        """How far a handful of rows are from combining so; ``None`` where they do not tell."""
        how: Any = {"count": self._count_of(kind)}
        if kind in (SUM, DIVIDED):
            how = {"reduction": "sum"}
        model = self._module()
        training = model.training
        model.eval()
        try:
            return self._engine_of_the_model()._rehearse(inputs, **how)
        except ValueError:  # such as tensors that disagree in their rows
            return None
        finally:
            model.train(training)

    def _module(self) -> nn.Module:
        assert isinstance(self.model, nn.Module)
        return self.model


class _WholeSteps:
    """A loader without the batches at its end that make no whole step."""

    def __init__(self, loader: Any, batches: int) -> None:
        self._loader = loader
        self._batches = batches

    def __len__(self) -> int:
        return len(self._loader) // self._batches * self._batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _own(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, transformers.TrainingArguments) else value


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


class _Work(nn.Module):
    """Calls what it is given with itself: replicas of the Trainer's modules, its model first."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, work: Any, **kwargs: Any) -> Any:
        return work(self, **kwargs)


class _Elsewhere:
    """An accelerator, as if its device were a replica's."""

    def __init__(self, accelerator: Any, device: torch.device) -> None:
        self._accelerator = accelerator
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


class Collected:
    """What one call of ``compute_loss`` left on its copy of the Trainer.

    No dataclass, which the engine would join field by field.

    Attributes:
        counted: by how much it raised numbers.
        measured: the mean of each of TRL's metrics, by mode and name.
    """

    def __init__(self, twin: Any, trainer: Any) -> None:
        before, after = vars(trainer), vars(twin)
        self.counted = {
            name: value - before[name]
            for name, value in after.items()
            if type(value) in (int, float) and type(before.get(name)) in (int, float)
            if value != before[name]
        }
        self.measured = {
            (mode, name): sum(values) / len(values)
            for mode, metrics in after.get("_metrics", {}).items()
            for name, values in metrics.items()
            if values
        }


def _joined(name: str, values: Sequence[tuple[float, float]]) -> float:
    """A metric of several batches as that of all: the weighted mean, or what its name says."""
    if name.startswith(("min_", "max_")):
        return (min if name.startswith("min_") else max)(value for value, _ in values)
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else math.nan


def _modules(values: Iterable[Any]) -> Iterable[nn.Module]:
    """Those among ``values``, and in lists and mappings there."""
    for value in values:
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (one for one in value if isinstance(one, nn.Module))
        elif isinstance(value, dict):
            yield from (one for one in value.values() if isinstance(one, nn.Module))


@contextlib.contextmanager
def standing_in(places: Sequence[tuple[Any, str, nn.Module]]) -> Iterator[None]:
    """Others in the place of modules' children, each by its parent and name."""
    before = [(parent, name, parent._modules[name]) for parent, name, _ in places]
    for parent, name, module in places:
        parent._modules[name] = module
    try:
        yield
    finally:
        for parent, name, module in before:
            parent._modules[name] = module


def _plain(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch


def _owner(trainer: Any) -> type:
    """The class whose ``compute_loss`` it is."""
    return next(base for base in type(trainer).__mro__ if "compute_loss" in vars(base))


def _is_trl(trainer: Any) -> bool:
    return _owner(trainer).__module__.startswith("trl.")


def _refuse_of_trl(trainer: Any) -> None:
    """Refuse, by name, TRL's trainers and losses that are no sum of their batches' losses."""
    if not _is_trl(trainer):
        return
    name = _owner(trainer).__name__
    if name not in _OF_TRL:
        raise ValueError(_refusal(trainer, "its loss is not known to be made up of its batches'"))
    types = getattr(trainer, "loss_types", None) or [getattr(trainer, "loss_type", None)]
    for one in types:
        if one in _OF_TRL[name]:
            raise ValueError(_refusal(trainer, f"loss_type={one!r} has terms over a whole batch"))
    found = {
        "the auxiliary loss of a mixture of experts": getattr(trainer, "aux_loss_enabled", False),
        "an entropy bonus": getattr(trainer, "_entropy_bonus_enabled", False),
        "top_entropy_quantile": getattr(trainer, "top_entropy_quantile", 1.0) < 1.0,
    }
    for what, given in found.items():
        if given:
            raise ValueError(_refusal(trainer, f"{what} is a term over a batch"))


def _refusal(trainer: Any, why: str) -> str:
    return (
        f"ScatterOnceMixin does not go together with {_owner(trainer).__name__} here: {why}; use "
        f"the stock class on one device"
    )


def rows_of(batch: Mapping[str, Any]) -> int:
    """The rows of a Trainer's batch: the first tensor's size, or the longest list's."""
    tensors = (len(v) for v in batch.values() if isinstance(v, Tensor) and v.ndim)
    lists = (len(v) for v in batch.values() if isinstance(v, list))
    return next(tensors, None) or max(lists, default=1)


def weight_of(inputs: Mapping[str, Any], _: Any = None, *, kind: str, shifts: bool) -> Any:
    """How much the mean of ``inputs["batch"]`` counts: its labels, or rows where there are none.

    Args:
        inputs: those of one call.
        kind: how losses combine.
        shifts: the loss leaves out the first label of each row, and the Trainer knows that.
    """
    batch = inputs["batch"]
    labels = batch.get("shift_labels")
    if not isinstance(labels, Tensor):
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or not labels.ndim:
            return rows_of(batch)
        labels = labels[..., 1:] if shifts or kind == SHIFTED else labels
    return rows_of(batch) if kind == ROWS else labels.ne(_IGNORED).sum()


def each_row(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What of each row tells how much it counts."""
    rows = rows_of(batch)
    named = {n: batch[n] for n in ("shift_labels", "labels") if isinstance(batch.get(n), Tensor)}
    if any(labels.ndim == 0 or len(labels) != rows for labels in named.values()):
        return []
    return [{"row": [i], **{n: t[i : i + 1] for n, t in named.items()}} for i in range(rows)]


def _say(trainer: Any, words: str) -> None:
    """Warn once."""
    said = vars(trainer).setdefault("_said", set())
    if words[:40] not in said:
        warnings.warn(words, stacklevel=4)
    said.add(words[:40])


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
