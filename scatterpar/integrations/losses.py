"""The engine that a Trainer works with, and how the losses of its micro-batches combine."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

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
    Combination,
    rows_of,
    terms_of,
    try_out,
)
from scatterpar.replicas.compiled import checked_how, unwrapped
from scatterpar.step.markers import Rows
from scatterpar.verify.untouched import untouched

__all__ = ["Losses"]

_TRIES = 10  # steps in which how losses combine is looked at again, while it is not decided


class Losses(AllReplicas):
    """A Trainer's ``compute_loss`` on replicas of its model, and what each loss is a mean of."""

    _engine: ScatterOnceParallel | None = None
    _combination: Combination | None = None
    _tries = 0

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

    def _how_losses_combine(self, window: Sequence[Mapping[str, Any]], items: Any) -> Combination:
        """What two rows told, once; looked at again while the rows did not tell it."""
        known = self._combination
        if known is None or not (known.decisive or self._tries >= _TRIES):
            self._tries += 1
            found = self._try_out(next((b for b in window if rows_of(b) > 1), window[0]))
            if found is not None and not found.exact and (known is None or known.exact):
                warnings.warn(_unknown(found), stacklevel=2)
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

        with untouched([model], [self.args.device]), torch.no_grad():
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


class _Work(nn.Module):
    """Calls whatever it is given on the replica of the Trainer's model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Any, **kwargs: Any) -> Any:
        return work(self.model, **kwargs)


def _unknown(found: Combination) -> str:
    """What is said of losses that combine in none of the ways."""
    words = "how the losses of micro-batches combine is not known: "
    if math.isinf(found.deviation):
        return (
            f"{words}that of one row alone is NaN or infinite, and that of two rows is not. A "
            f"micro-batch of such rows alone makes the loss of the whole step NaN or infinite"
        )
    return (
        f"{words}those of two rows, as a {found.kind}, are {found.deviation:.2g} off the loss of "
        f"both (relative). A loss that compares rows with each other, or an auxiliary one of the "
        f"whole batch, is computed per micro-batch"
    )


def _plain(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {key: v.entries if isinstance(v, Rows) else v for key, v in batch.items()}
