"""fastai's ``Learner`` on all devices of one process: a callback that replaces
``to_parallel()``.

One step of the engine computes the predictions and the loss of a training batch. The
Learner keeps its model and loss function, so that saving, freezing, showing and
exporting them work as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.losses import BaseLoss
from fastai.torch_core import to_float
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.devices.device_ids import DeviceLike, physical
from scatterpar.engine import ScatterOnceParallel
from scatterpar.integrations.loop import refuse
from scatterpar.pair.pair import gather
from scatterpar.step.loss_weights import is_cross_entropy, terms_of_rows

__all__ = ["ScatterOnce"]

# Callbacks that replicate the model, or that compute a part of the loss from
# predictions.
_REFUSED = {
    "DistributedTrainer",
    "GANTrainer",
    "NonNativeMixedPrecision",
    "ParallelTrainer",
}
_REFUSED |= {"RNNCallback", "RNNRegularizer"}


class ScatterOnce(Callback):  # type: ignore[misc]
    """Trains a ``Learner`` on all devices of one process, with the gradient of one
    device.

    Each batch of the ``DataLoaders`` is divided among the replicas. Validation and
    ``get_preds`` run on all replicas, too. ``learn.model`` and ``learn.loss_func`` stay
    as they are.

    Args:
        device_ids: as in ``ScatterOnceParallel``, like ``accum``; the first is the
            device of the ``DataLoaders``.
        count: ``count(inputs, targets)`` returns the number of terms that a mean loss
            averages over; both arguments are tuples, ``learn.xb`` and ``learn.yb``. By
            default the number of rows; cross entropy, torch's or fastai's, counts by
            its ``ignore_index`` and ``weight``.
        reduction: ``"sum"`` if the loss function returns the sum of its terms. By
            default its attribute ``reduction``, or ``"mean"`` without one.
        options: further arguments of ``ScatterOnceParallel``, such as
            ``buffers="batch"``.

    Raises:
        ValueError: at the start of training, if the Learner has a callback that does
            not work with this one; in a step, if a callback replaces ``learn.pred``.
    """

    _stateattrs = ("_engine", "_criterion")  # not pickled
    _engine: Any = None
    _criterion: Any = None

    def __init__(
        self,
        device_ids: Sequence[DeviceLike] | None = None,
        accum: Any = 1,
        *,
        count: Callable[[Any, Any], Any] | None = None,
        reduction: str | None = None,
        **options: Any,
    ) -> None:
        self._options = {"device_ids": device_ids, "accum": accum, **options}
        self._count, self._reduction = count, reduction

    def before_fit(self) -> None:
        """Replace the Learner's method that processes a batch."""
        self.learn._do_one_batch = partial(self._do_one_batch, self.learn)

    def before_train(self) -> None:
        """Refuse callbacks by name."""
        names = {
            kind.__name__
            for callback in self.learn.cbs
            for kind in type(callback).__mro__
        }
        reason = (
            "it replicates the model, or replaces the prediction, itself; remove "
            "the callback"
        )
        refuse("ScatterOnce", dict.fromkeys(sorted(names & _REFUSED), True), reason)

    def after_fit(self) -> None:
        """Restore the Learner's own method, and close the engine."""
        self.learn.__dict__.pop("_do_one_batch", None)
        self._close()

    def _do_one_batch(self, learn: Any) -> None:
        """Do what ``Learner._do_one_batch`` does, but let the engine predict and
        compute losses.
        """
        if self.learn is not learn:  # the callback was removed after an error in a fit
            del vars(learn)["_do_one_batch"]
            learn._do_one_batch()
            return
        trains = learn.training and len(learn.yb) > 0
        learn.pred, loss = self._step(learn, trains)
        predicted = nested.tensors(learn.pred)
        learn("after_pred")
        if trains and _places(predicted) != _places(learn.pred):
            why = (
                "a callback replaced learn.pred in after_pred, when the loss had "
                "been computed"
            )
            raise ValueError(
                f"{why}; change the prediction in the model or in the loss function"
            )
        if len(learn.yb):
            learn.loss_grad = loss if trains else learn.loss_func(learn.pred, *learn.yb)
            learn.loss = learn.loss_grad.clone()
        learn("after_loss")
        if trains:
            learn._do_grad_opt()

    def _step(self, learn: Any, trains: bool) -> tuple[Any, Tensor | None]:
        """The predictions of all rows; if it trains, the loss, which carries the
        gradient.
        """
        if self._engine is None or self._engine.module is not learn.model:
            self._close()
            self._engine = ScatterOnceParallel(learn.model, **self._options)
        if not trains:
            with torch.no_grad():
                return self._engine(*learn.xb), None
        mixes = any(isinstance(callback, MixedPrecision) for callback in learn.cbs)
        if getattr(self._criterion, "loss_func", None) is not learn.loss_func:
            self._criterion = _Criterion(learn.loss_func, mixes)
        count = self._count or self._criterion.count
        options: dict[str, Any] = {"count": count, "reduction": self._reduction}
        if isinstance(getattr(learn.loss_func, "__self__", None), Callback):
            # the loss of MixUp, for example, refers to all rows
            options = {"whole_batch": True}
        # MixedPrecision's
        options |= {"return_outputs": True, "scaler": vars(learn).get("scaler")}
        inputs, targets = tuple(learn.xb), tuple(learn.yb)
        loss, outputs = self._engine.loss(inputs, targets, self._criterion, **options)
        pred = gather(outputs, physical(self._engine.device_ids[0]))
        return to_float(pred) if mixes else pred, loss

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._criterion = None


class _Criterion(nn.Module):
    """A Learner's loss function as a module, so that its tensors are
    replicated, too.
    """

    def __init__(self, loss_func: Any, mixes: bool) -> None:
        super().__init__()
        self.loss_func, self.mixes = loss_func, mixes
        self.func = func = (
            loss_func.func if isinstance(loss_func, BaseLoss) else loss_func
        )
        self.reduction = getattr(func, "reduction", "mean")
        self.count = None
        if is_cross_entropy(func):
            self.count = lambda _, targets: terms_of_rows(func, targets[0], 0).sum()

    def forward(self, output: Any, targets: tuple[Any, ...]) -> Any:
        """Return the loss; under MixedPrecision, of predictions in single precision."""
        loss_func = self.func  # the replica's
        if isinstance(self.loss_func, BaseLoss):
            loss_func = copy.copy(self.loss_func)
            loss_func.func = self.func
        return loss_func(to_float(output) if self.mixes else output, *targets)


def _places(value: Any) -> list[Any]:
    return [(tensor.data_ptr(), tensor.shape) for tensor in nested.tensors(value)]
