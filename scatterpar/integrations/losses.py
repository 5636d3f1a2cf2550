"""A Trainer's ``compute_loss`` on replicas of all its modules, and what each loss is a mean of."""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Self

import torch
import transformers
from torch import Tensor, nn

from scatterpar.engine import ScatterOnceParallel
from scatterpar.integrations.all_replicas import AllReplicas
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
from scatterpar.replicas.compiled import checked_how
from scatterpar.sharded import ShardedOptimizer
from scatterpar.step import nested
from scatterpar.verify.untouched import untouched

__all__ = ["Losses"]

_TRIES = 10  # steps in which how losses combine is looked at again, while it is not decided

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


class Losses(AllReplicas):
    """A Trainer's ``compute_loss``, called on copies of it that hold the replicas' modules."""

    _engine: ScatterOnceParallel | None = None
    _combination: Combination | None = None
    _tries = 0
    _parts: Sequence[nn.Module] = ()
    _sharded: ShardedOptimizer | None = None

    def __init__(self, *args: Any, shard_optimizer: bool = False, **kwargs: Any) -> None:
        self._shard_optimizer = shard_optimizer
        super().__init__(*args, **kwargs)
        _refuse_of_trl(self)
        kind = str(getattr(self.model, "loss_type", None))
        if "Detection" in kind and self.args.gradient_accumulation_steps > 1:
            raise ValueError(
                f"ScatterOnceTrainer does not go together with {type(self.model).__name__} "
                f"(loss_type={kind!r}) on several replicas or with accumulated batches: its loss "
                f"is divided by the boxes of a whole batch; use the stock Trainer"
            )

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

    def _loss_of(
        self, work: _Work, batch: Any, items: Any, adds_up: bool, **_: Any
    ) -> dict[str, Any]:
        """The loss of one batch by the Trainer's own ``compute_loss``, and what that collected.

        Losses that add up are given the window's number of items. Others get that of the batch, so
        that each is the batch's own mean, whatever it does with the number.
        """
        twin = self._twin(work)
        items = items if adds_up or items is None else self._terms(batch)
        loss: Any = twin.compute_loss(twin._module(), _plain(batch), num_items_in_batch=items)
        return {"loss": loss, "collected": _Collected(twin, self)}

    def _collect(self, collected: Sequence[_Collected], weights: Sequence[float]) -> None:
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
        return terms_of(batch, shifted=self._loss_shifts_labels)

    def _weight_of(self, batch: Any, kind: str) -> Any:
        """How much a batch's mean counts."""
        if kind == ROWS:
            return rows_of(batch)
        return terms_of(batch, shifted=True) if kind == SHIFTED else self._terms(batch)

    def _how_losses_combine(self, window: Sequence[Any], items: Any) -> Combination:
        """What the Trainer says, or what a few rows told; looked at again while they did not."""
        scaled = self._is_scaled()
        if _is_trl(self) and scaled is not None:
            return Combination(SUM if scaled else ROWS)
        known = self._combination
        if known is None or not (known.decisive or self._tries >= _TRIES):
            self._tries += 1
            found = self._try_out(window)
            if found is None and known is None and len(window) > 1:
                warnings.warn(_UNTOLD, stacklevel=2)
            elif found is not None and not found.exact:
                if _is_trl(self):
                    why = "the losses of batches do not make up that of all"
                    raise ValueError(_refusal(self, why))
                if known is None or known.exact:
                    warnings.warn(_unknown(found), stacklevel=2)
            self._combination = found or known or Combination(LABELS)
        assert self._combination is not None
        if self._combination.kind == PARTS and items is None:
            return Combination(LABELS)
        return self._combination

    def _is_scaled(self) -> bool | None:
        """Whether ``compute_loss`` divides by the window already, where the Trainer says so."""
        return getattr(self, "loss_is_scaled_for_ga", None)  # since transformers 5.19

    def _try_out(self, window: Sequence[Any]) -> Combination | None:
        """On the Trainer's model, in eval mode and without a trace."""
        batch = next((b for b in window if rows_of(b) > 1), window[0])
        twin = copy.copy(self)
        if "_metrics" in vars(self):
            vars(twin)["_metrics"] = copy.deepcopy(vars(self)["_metrics"])
        model = self._module()

        def loss_of(rows: Mapping[str, Any], items: Any) -> Tensor:
            rows = transformers.Trainer._prepare_inputs(twin, dict(rows))
            if not isinstance(items, int):
                items = items.to(self.args.device)
            loss: Any = twin.compute_loss(model, rows, num_items_in_batch=items)
            return torch.as_tensor(loss).detach()

        with untouched([model], [self.args.device]), torch.no_grad():
            model.eval()
            return try_out(loss_of, batch, self._terms, self._tolerance())

    def _tolerance(self) -> float:
        """What rounding may make of a loss: much in half precision."""
        floating = [p.dtype for p in self._module().parameters() if p.is_floating_point()]
        low = any(torch.finfo(dtype).bits < 32 for dtype in floating)
        return 2e-2 if low or self.accelerator.mixed_precision != "no" else 1e-5

    def _module(self) -> nn.Module:
        assert isinstance(self.model, nn.Module)
        return self.model


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


class _Collected:
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


_UNTOLD = (
    "how the losses of batches combine could not be told from this step's rows, such as one row in "
    "a batch; they are averaged, weighted by their labels, or by their rows where there are none"
)


def _unknown(found: Combination) -> str:
    """What is said of losses that combine in none of the ways."""
    words = "how the losses of batches combine is not known: "
    if math.isinf(found.deviation):
        return (
            f"{words}that of one row alone is NaN or infinite, and that of several rows is not. A "
            f"batch of such rows alone makes the loss of the whole step NaN or infinite"
        )
    return (
        f"{words}those of a few rows, as a {found.kind}, are {found.deviation:.2g} off the loss "
        f"of all of them (relative). A loss that compares rows with each other, or an auxiliary "
        f"one of the whole batch, is computed for each batch"
    )
