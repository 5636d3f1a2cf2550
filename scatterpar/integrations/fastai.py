"""fastai's ``Learner`` on all devices of one process: a callback that replaces
``to_parallel()``.

One step of the engine computes the predictions and the loss of a training batch. The
Learner keeps its model and loss function, so that saving, freezing, showing and
exporting them work as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.losses import BaseLoss
from fastai.torch_core import to_float
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.joining import join_rows
from scatterpar.batch.markers import Rows
from scatterpar.devices.device_ids import DeviceLike, physical
from scatterpar.engine import ScatterOnceParallel
from scatterpar.errors import warn
from scatterpar.integrations import kept, loop
from scatterpar.integrations.changes import Change, ChangeKind, KeptState, apply_changes
from scatterpar.integrations.elsewhere import explained
from scatterpar.integrations.evaluation import RowLooks, rows_of
from scatterpar.integrations.loop import refuse
from scatterpar.integrations.steps import FIRST
from scatterpar.integrations.turns import Turns
from scatterpar.pair.pair import gather
from scatterpar.step.loss_weights import is_cross_entropy, terms_of_rows
from scatterpar.step.request import Accum, Count, Reduction

__all__ = ["ScatterOnce"]

# Callbacks that replicate the model, or that compute a part of the loss from
# predictions.
_REFUSED = {
    "DistributedTrainer",
    "GANTrainer",
    "NonNativeMixedPrecision",
    "ParallelTrainer",
    "RNNCallback",
    "RNNRegularizer",
}
# Attributes of every module: they are no state of the user's.
_OF_TORCH = {*vars(nn.Module())}
_ELSEWHERE = (
    "make it an attribute of the loss function (an nn.Module, or an object with "
    "__call__), and each replica gets a copy on its device"
)
_REMEDIES = (
    "In fastai pass ScatterOnce(…, count=lambda inputs, targets: …), the number of "
    "terms that the mean averages over, such as lambda inputs, targets: "
    "targets[0].ne(-100).sum() for labels of which some are ignored, or "
    'reduction="sum" for a sum. If it compares rows with each other, or is a ratio of '
    "sums, train it on one device without this callback, or in a loop of your own "
    "with engine.loss(inputs, targets, criterion, whole_batch=True). "
    "verify=False does not check."
)


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
        TypeError: ``count`` takes other arguments.
        ValueError: at the start of training, if the Learner has a callback that does
            not work with this one; in a step, if a callback replaces ``learn.pred``.
    """

    _stateattrs = ("_engine", "_criterion")  # not pickled
    _engine: Any = None
    _criterion: Any = None

    def __init__(
        self,
        device_ids: Sequence[DeviceLike] | None = None,
        accum: Accum = 1,
        *,
        count: Count | None = None,
        reduction: Reduction | None = None,
        **options: Any,
    ) -> None:
        loop.refuse_whole_batch("ScatterOnce", options)
        loop.check_count(count, ["inputs", "targets"], "targets[0]")
        self._options = {"device_ids": device_ids, "accum": accum, **options}
        self._count = count
        self._reduction = reduction
        self._turns = Turns()
        self._row_looks = RowLooks()
        # Places that calls set to different values. A warning has told of each.
        self._told: set[str] = set()

    def before_fit(self) -> None:
        """Replace the Learner's method that processes a batch."""
        self.learn._do_one_batch = partial(self._do_one_batch, self.learn)

    def before_train(self) -> None:
        """Refuse callbacks by name."""
        names: set[str] = set()
        for callback in self.learn.cbs:
            names.update(kind.__name__ for kind in type(callback).__mro__)
        refuse(
            "ScatterOnce",
            dict.fromkeys(sorted(names & _REFUSED), True),
            "it replicates the model, or replaces the prediction, itself; remove the "
            "callback",
        )

    def after_fit(self) -> None:
        """Restore the Learner's own method, and close the engine."""
        self.learn.__dict__.pop("_do_one_batch", None)
        self._close()

    def _do_one_batch(self, learn: Any) -> None:
        """Do what ``Learner._do_one_batch`` does, with the engine::

        learn.pred = model(*xb)              by the engine
        learn("after_pred")
        learn.loss = loss_func(pred, *yb)    by the engine, with pred, if it trains
        learn("after_loss")
        learn._do_grad_opt()
        """
        if self.learn is not learn:  # the callback was removed after an error in a fit
            del vars(learn)["_do_one_batch"]
            learn._do_one_batch()
            return
        trains = learn.training and len(learn.yb) > 0
        self._make_engine(learn.model)
        loss = None
        if trains:
            learn.pred, loss = self._train(learn)
        else:
            learn.pred = self._predict(learn)
        predicted = nested.tensors(learn.pred)
        learn("after_pred")
        if trains and _places(predicted) != _places(learn.pred):
            raise ValueError(
                "a callback replaced learn.pred in after_pred, when the loss had been "
                "computed; change the prediction in the model or in the loss function"
            )
        if len(learn.yb):
            learn.loss_grad = loss if trains else learn.loss_func(learn.pred, *learn.yb)
            learn.loss = learn.loss_grad.clone()
        learn("after_loss")
        if trains:
            learn._do_grad_opt()

    def _make_engine(self, model: nn.Module) -> None:
        """Make an engine of the Learner's model, unless there is one."""
        if self._engine is not None and self._engine.module is model:
            return
        self._close()
        self._engine = ScatterOnceParallel(model, **self._options)
        self._engine.loop.remedies = _REMEDIES

    def _train(self, learn: Any) -> tuple[Any, Tensor]:
        """The predictions of all rows, and the loss, which carries the gradient."""
        mixes = any(isinstance(callback, MixedPrecision) for callback in learn.cbs)
        if getattr(self._criterion, "loss_func", None) is not learn.loss_func:
            self._criterion = _Criterion(learn.loss_func, mixes)
        criterion = self._criterion
        count = self._count or criterion.count
        options: dict[str, Any] = {"return_outputs": True}
        options["scaler"] = vars(learn).get("scaler")  # MixedPrecision's
        if isinstance(getattr(learn.loss_func, "__self__", None), Callback):
            # the loss of MixUp, for example, refers to all rows
            options["whole_batch"] = True
        else:
            options["reduction"] = self._reduction
            if count is not None:
                options["count"] = _Count(count)
        inputs = tuple(learn.xb)
        targets = tuple(learn.yb)
        # So that calls tell which rows they had.
        row_numbers = Rows(range(loop.num_rows((inputs, targets))))
        targets_of_step = (*targets, row_numbers)
        criterion.calls.clear()
        with self._turns.in_step(self._engine, learn, {}, criterion.func, criterion):
            loss, outputs = self._engine.loss(
                inputs, targets_of_step, criterion, **options
            )
        weights = partial(self._weights, count, inputs, targets)
        criterion.transfer(loss.device, weights, self._tell)
        prediction = gather(outputs, physical(self._engine.device_ids[0]))
        return to_float(prediction) if mixes else prediction, loss

    def _predict(self, learn: Any) -> Any:
        """The predictions of all rows of a batch in validation."""
        in_step = self._turns.in_step(self._engine, learn, {}, learn.loss_func)
        with torch.no_grad(), in_step:
            return self._predicted(tuple(learn.xb))

    def _predicted(self, inputs: tuple[Any, ...]) -> Any:
        """The predictions of replicas, or of the first device, joined."""
        name = type(self.learn.model).__name__
        num_rows = loop.num_rows(inputs)
        # The loss is computed afterwards. It may read what hooks have kept of all rows.
        is_whole = self._turns.is_hooked
        is_checked = self._options.get("verify", True) and not is_whole
        if is_checked and self._row_looks.is_due(name, num_rows):
            results = partial(self._results_of, inputs, num_rows)
            with loop.undone(self.learn.model, [self.learn.model.forward]):
                self._row_looks.look(name, num_rows, results)
        if is_whole or name in self._row_looks.undivided:
            (prediction,) = self._predictions_of(inputs, num_rows, [range(num_rows)])
            return prediction
        return self._engine(*inputs)

    def _predictions_of(
        self, inputs: tuple[Any, ...], num_rows: int, parts: Sequence[Sequence[int]]
    ) -> list[Any]:
        """The predictions of each of these parts of a batch."""
        inputs_of_parts = [rows_of(inputs, part, num_rows) for part in parts]
        marked = Rows(inputs_of_parts, FIRST)
        calls = nested.atoms(self._engine.map(_called, inputs=marked))
        device = physical(self._engine.device_ids[0])
        return [loop.moved(call.output, device) for call in calls]

    def _results_of(
        self, inputs: tuple[Any, ...], num_rows: int, parts: Sequence[Sequence[int]]
    ) -> Any:
        """The predictions of these parts, joined. Buffers are as before."""
        buffers = {buffer: buffer.clone() for buffer in self.learn.model.buffers()}
        predictions = self._predictions_of(inputs, num_rows, parts)
        # The engine commits the buffers of replica 0, as for any forward pass.
        for buffer, values in buffers.items():
            buffer.copy_(values)
        sizes = [len(part) for part in parts]
        weights = [float(size) for size in sizes]
        try:
            return join_rows(predictions, 0, weights, sizes)
        except ValueError:  # outputs without rows
            return predictions

    def _weights(
        self, count: Any, inputs: Any, targets: Any, rows: Sequence[Sequence[int]]
    ) -> list[float]:
        """The weights of the losses of micro-batches that have these ``rows``."""
        reduction = self._reduction or self._criterion.reduction
        if reduction == "sum":
            return [1.0] * len(rows)
        counts = []
        for numbers in rows:
            terms: Any = len(numbers)
            if count is not None:
                select = partial(_selected, list(numbers))
                terms = count(*nested.map_tensors(select, (inputs, targets)))
            counts.append(float(terms))
        total = sum(counts) or 1.0  # zero if all labels are ignored
        return [terms_of_call / total for terms_of_call in counts]

    def _tell(self, place: str) -> None:
        """Warn once that calls of the loss function set ``place`` to other values."""
        if place in self._told:
            return
        self._told.add(place)
        warn(
            f"the loss function sets {place} to another value for each micro-batch, "
            "so that of learn.loss_func stays as it was; keep a tensor without "
            "dimensions, whose weighted mean it gets, or append to a list"
        )

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._criterion = None


def _called(model: nn.Module, inputs: tuple[Any, ...]) -> SimpleNamespace:
    """A replica's prediction; no tensor, so that the engine does not join it."""
    return SimpleNamespace(output=model(*inputs))


def _selected(rows: list[int], tensor: Tensor) -> Tensor:
    """These rows of a tensor; a tensor without dimensions itself."""
    return tensor[rows] if tensor.ndim else tensor


class _Count:
    """``count`` of the targets without the numbers of their rows."""

    def __init__(self, count: Callable[[Any, Any], Any]) -> None:
        self._count = count

    def __call__(self, inputs: Any, targets: tuple[Any, ...]) -> Any:
        return self._count(inputs, targets[:-1])


class _LossCall(NamedTuple):
    """What one call of the loss function left in its attributes.

    Attributes:
        rows: the numbers of the rows of the call.
        values: numbers and tensors that it set, by the path of the part of the loss
            function, and the attribute's name.
        changes: all else that it changed, by the path of the part.
    """

    rows: Sequence[int]
    values: Mapping[tuple[str, str], Any]
    changes: Mapping[str, Sequence[Change]]


class _Criterion(nn.Module):
    """A Learner's loss function as a module, so that its tensors are replicated, too.

    Attributes:
        func: the module or function that computes; of fastai's losses torch's module.
        reduction: how the loss combines, by the loss function's attribute.
        count: the number of terms, if the loss is cross entropy.
        calls: what calls of it left in the loss function's attributes.
    """

    def __init__(self, loss_func: Any, mixes: bool) -> None:
        super().__init__()
        self.loss_func = loss_func
        self.mixes = mixes
        self.func = loss_func
        if isinstance(loss_func, BaseLoss):
            self.func = loss_func.func
        func = self.func
        self.reduction = getattr(func, "reduction", "mean")
        self.count = None
        if is_cross_entropy(func):
            self.count = lambda _, targets: terms_of_rows(func, targets[0], 0).sum()
        self.calls = _LossCalls()

    def forward(self, output: Any, targets: tuple[Any, ...]) -> Any:
        """Return the loss; under MixedPrecision, of predictions in single precision."""
        *targets_of_rows, rows = targets
        loss_func = self._loss_func_of_call(output)
        parts = _parts_of(loss_func)
        states = {}
        for path, part in parts.items():
            states[path] = KeptState(part, _OF_TORCH)
        if self.mixes:
            output = to_float(output)
        device = nested.tensors(output)[0].device
        with explained(device, _ELSEWHERE):
            loss = loss_func(output, *targets_of_rows)
        values: dict[tuple[str, str], Any] = {}
        changes: dict[str, list[Change]] = {}
        for path, state in states.items():
            changes[path] = []
            for change in state.changes():
                name = getattr(change.path[0], "name", "")
                value = vars(parts[path]).get(name)
                is_value = len(change.path) == 1 and isinstance(value, (Tensor, float))
                if is_value and change.kind is not ChangeKind.APPENDED:
                    values[path, name] = nested.map_tensors(Tensor.detach, value)
                else:
                    changes[path].append(change)
        self.calls.add(_LossCall(rows, values, changes))
        return loss

    def _loss_func_of_call(self, output: Any) -> Any:
        """The replica's loss function, with copies of objects and tensors that replicas
        share.
        """
        copies = kept.CallCopies(nested.tensors(output)[0].device)
        if isinstance(self.func, nn.Module):
            for part in self.func.modules():
                attributes = kept.kept_attributes(part, _OF_TORCH)
                for name, value in attributes.items():
                    vars(part)[name] = copies.of(value)
        if isinstance(self.loss_func, BaseLoss):
            loss_func = copy.copy(self.loss_func)
            loss_func.func = self.func
            return loss_func
        if isinstance(self.func, nn.Module):
            return self.func
        return copies.of(self.func)

    def transfer(
        self,
        device: torch.device,
        weights_of: Callable[[Sequence[Sequence[int]]], Sequence[float]],
        tell: Callable[[str], None],
    ) -> None:
        """Transfer what the calls of a step left to the user's loss function.

        Numbers and tensors without dimensions are averaged with the losses' weights,
        tensors with rows are joined. What is added to lists or counted is added.

        Args:
            device: where the user's loss function gets its tensors.
            weights_of: returns the weights of losses of calls with these rows.
            tell: gets the places of values that cannot be joined.
        """
        calls = self.calls.of_step()
        user_parts = _parts_of(self.loss_func)
        if isinstance(self.loss_func, BaseLoss):
            user_parts = {"": self.loss_func}
        for path, part in user_parts.items():
            changes = [call.changes.get(path, ()) for call in calls]
            apply_changes(part, changes, device, tell)
        places: dict[tuple[str, str], None] = {}
        for call in calls:
            places.update(dict.fromkeys(call.values))
        if not places:
            return
        weights = weights_of([call.rows for call in calls])
        for path, name in places:
            try:
                joined = _joined_value((path, name), calls, weights, device)
            except (RuntimeError, TypeError, ValueError):
                tell(f"self.{path}.{name}" if path else f"self.{name}")
                continue
            setattr(user_parts[path], name, joined)


def _joined_value(
    place: tuple[str, str],
    calls: Sequence[_LossCall],
    weights: Sequence[float],
    device: torch.device,
) -> Any:
    """The value of all rows that calls set at ``place``.

    Raises:
        RuntimeError, TypeError, ValueError: the values are no numbers or tensors that
            can be averaged or joined.
    """
    values = [call.values.get(place) for call in calls]
    tensors = [torch.as_tensor(value).to(device) for value in values]
    sizes = [len(call.rows) for call in calls]
    joined = join_rows(tensors, 0, weights, sizes)
    is_sum = sum(weights) > 1.5  # the weights of means add up to one
    if is_sum and not joined.ndim:
        joined = torch.stack(tensors).sum()
    if all(isinstance(value, float) for value in values):
        return float(joined)
    return joined


class _LossCalls:
    """The calls of a loss function in one step, those of looks before it included.

    It is shared by all replicas, whose threads only append to it.
    """

    def __init__(self) -> None:
        self._calls: list[_LossCall] = []

    def clear(self) -> None:
        """Forget the calls of the last step."""
        self._calls.clear()

    def add(self, call: _LossCall) -> None:
        """Record a call."""
        self._calls.append(call)

    def of_step(self) -> list[_LossCall]:
        """The calls for micro-batches of the step, in the order of their rows.

        They are the last ones, and no two have a row in common.
        """
        chosen: list[_LossCall] = []
        seen: set[int] = set()
        for call in reversed(self._calls):
            if seen.isdisjoint(call.rows):
                seen.update(call.rows)
                chosen.append(call)
        return sorted(chosen, key=_first_row)


def _first_row(call: _LossCall) -> int:
    """The number of the call's first row: calls are sorted by it."""
    return call.rows[0]


def _parts_of(loss_func: Any) -> dict[str, Any]:
    """The objects of a loss function that may have attributes of the user's."""
    if isinstance(loss_func, nn.Module):
        return dict(loss_func.named_modules())
    is_object = isinstance(loss_func, BaseLoss) or kept.is_object(loss_func)
    return {"": loss_func} if is_object else {}


def _places(value: Any) -> list[Any]:
    """What tells the tensors of ``value`` from others: their memory and shape."""
    return [(tensor.data_ptr(), tensor.shape) for tensor in nested.tensors(value)]
