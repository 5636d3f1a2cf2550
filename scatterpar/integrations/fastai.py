"""fastai's ``Learner`` on all devices of one process: a callback that replaces
``to_parallel()``.

One step of the engine computes the predictions and the loss of a training batch. The
Learner keeps its model and loss function, so that saving, freezing, showing and
exporting them work as before::

    training      learn.pred, loss = engine.loss(xb, yb, loss_func)   rows are divided
    evaluation    learn.pred = model(*xb)            each replica has a batch of its own

Callbacks run once per batch, on the Learner itself. So does the loss function in an
evaluation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.losses import BaseLoss
from fastai.torch_core import to_float
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.devices.device_ids import DeviceLike
from scatterpar.devices.virtual_devices import physical
from scatterpar.devices.write_counters import versions
from scatterpar.engine import ScatterOnceParallel
from scatterpar.libraries import package_of
from scatterpar.loops.arguments import check_count, refuse
from scatterpar.loops.evaluation import BatchesAhead, Evaluation
from scatterpar.loops.lending import Loan, copy_on_replica, modules_of
from scatterpar.loops.loop import Loop
from scatterpar.loops.modules import overridden, values_on_device
from scatterpar.loops.user_functions import hooks_in
from scatterpar.objects.whose import is_user_function
from scatterpar.pair.pair import gather
from scatterpar.step.loop_options import LoopOptions
from scatterpar.step.loss_weights import is_cross_entropy, terms_of_rows
from scatterpar.step.request import Accum, CountFunction, Reduction
from scatterpar.step.turns import Scope

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
_REMEDIES = (
    "In fastai pass ScatterOnce(…, count=lambda inputs, targets: …), the number of "
    "terms that the mean averages over, such as lambda inputs, targets: "
    "targets[0].ne(-100).sum() for labels of which some are ignored, or "
    'reduction="sum" for a sum. If it compares rows with each other, or is a ratio of '
    "sums, pass ScatterOnce(…, whole_batch=True), which calls it once with all rows. "
    "verify=False does not check."
)


class ScatterOnce(Callback):  # type: ignore[misc]
    """Trains a ``Learner`` on all devices of one process, with the gradient of one
    device.

    Each batch of the ``DataLoaders`` is divided among the replicas. In validation and
    ``get_preds`` each replica predicts a batch of its own. ``learn.model`` and
    ``learn.loss_func`` stay as they are.

    A loss function that you have defined is called for one micro-batch at a time, in
    the order of the rows: what it writes is what it writes under
    ``GradientAccumulation`` on one device. The losses of fastai and torch are called
    on all replicas at once.

    Args:
        device_ids: as in ``ScatterOnceParallel``, like ``accum``; the first is the
            device of the ``DataLoaders``.
        count: ``count(inputs, targets)`` returns the number of terms that a mean loss
            averages over; both arguments are tuples, ``learn.xb`` and ``learn.yb``. By
            default the number of rows; cross entropy, torch's or fastai's, counts by
            its ``ignore_index`` and ``weight``.
        reduction: ``"sum"`` if the loss function returns the sum of its terms. By
            default its attribute ``reduction``, or ``"mean"`` without one.
        whole_batch: call the loss function once per batch, with the predictions of all
            rows, as in ``ScatterOnceParallel.forward_backward``. For losses that
            compare rows with each other.
        options: further arguments of ``ScatterOnceParallel``, such as
            ``buffers="batch"``.

    Raises:
        TypeError: ``count`` takes other arguments.
        ValueError: ``whole_batch`` with ``count`` or ``reduction``; at the start of
            training, if the Learner has a callback that does not work with this one; in
            a step, if a callback replaces ``learn.pred``.
    """

    _stateattrs = ("_loop", "_ahead")  # not pickled
    _loop: _LearnerLoop | None = None
    _ahead: BatchesAhead | None = None

    def __init__(
        self,
        device_ids: Sequence[DeviceLike] | None = None,
        accum: Accum = 1,
        *,
        count: CountFunction | None = None,
        reduction: Reduction | None = None,
        whole_batch: bool = False,
        **options: Any,
    ) -> None:
        check_count(count, ["inputs", "targets"], "targets[0]")
        if whole_batch:
            terms = {"count": count is not None, "reduction": reduction is not None}
            refuse("whole_batch=True", terms, "the loss is that of all rows; drop it")
        self._options = {"device_ids": device_ids, "accum": accum, **options}
        self._count = count
        self._reduction = reduction
        self._whole_batch = whole_batch
        # Of an evaluation: whether the model gets the loader's batches; the places of
        # a group's inputs, from the batch on at which the loop is.
        self._reads_ahead = True
        self._places: deque[Any] = deque()

    def before_train(self) -> None:
        """Refuse callbacks by name, and begin to process batches."""
        names: set[str] = set()
        for callback in self.learn.cbs:
            names.update(kind.__name__ for kind in type(callback).__mro__)
        refuse(
            "ScatterOnce",
            dict.fromkeys(sorted(names & _REFUSED), True),
            "it replicates the model, or replaces the prediction, itself; remove the "
            "callback",
        )
        # A fit that failed in an evaluation has left a group.
        self._ahead = None
        self._begin()

    def before_validate(self) -> None:
        """Begin to process batches, and read one per replica ahead."""
        self._begin()
        self._ahead = None
        devices = self._engine.device_ids
        self._engine.loop = LoopOptions()  # as a step has left it
        # A hook writes what the loss may read, so the model itself is called.
        if len(devices) > 1 and not _hooks_of_user(self.learn.model):
            self._ahead = BatchesAhead(self.learn.dl, self.learn._set_device)
            self._ahead.begin(self._evaluation())
            self.learn.dl = self._ahead
            self._reads_ahead = True

    def after_validate(self) -> None:
        """Give the Learner its own loader back."""
        if self._ahead is not None:
            # The Learner keeps it until the next fit, and users read it.
            self.learn.dl = self._ahead.loader
            self._ahead = None

    def after_fit(self) -> None:
        """Restore the Learner's own method, and close the engine."""
        # A pickled Learner must not have a method of this callback.
        self.learn.__dict__.pop("_do_one_batch", None)
        self._close()

    def _begin(self) -> None:
        """Replace the Learner's method that processes a batch, and make an engine of
        its model, unless there is one.
        """
        learn = self.learn
        # With the Learner: a callback that was removed from it has none.
        learn._do_one_batch = partial(self._do_one_batch, learn)
        if self._loop is None:
            self._loop = _LearnerLoop()
        # Training and validation begin in turns, and share the replicas.
        if self._engine is not None and self._engine.module is learn.model:
            return
        self._close()
        engine = ScatterOnceParallel(learn.model, **self._options)
        self._loop.engine = engine
        self._loop.begin(physical(engine.device_ids[0]))

    def _follow_model(self) -> None:
        """Replicate another model, which a callback has put into the Learner, such as
        averaged weights that are validated.
        """
        ahead = self._ahead
        self._begin()
        if ahead is not None:
            ahead.begin(self._evaluation())
            self._places.clear()
            self._ahead = ahead

    @property
    def _engine(self) -> Any:
        return None if self._loop is None else self._loop.engine

    def _close(self) -> None:
        self._ahead = None
        if self._loop is not None:
            self._loop.close()

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
        if self._engine.module is not learn.model:
            self._follow_model()
        trains = learn.training and len(learn.yb) > 0
        loss = None
        if trains:
            learn.pred, loss = self._train(learn)
        else:
            learn.pred = self._predict(learn)
        # A callback may change predictions in place, too, so versions are compared.
        predicted = _places(learn.pred)
        learn("after_pred")
        if trains and predicted != _places(learn.pred):
            raise ValueError(
                "a callback replaced learn.pred in after_pred, when the loss had been "
                "computed; change the prediction in the model or in the loss function"
            )
        if len(learn.yb):
            learn.loss_grad = loss if trains else learn.loss_func(learn.pred, *learn.yb)
            # As fastai does: callbacks scale loss_grad, and loss is what is shown.
            learn.loss = learn.loss_grad.clone()
        learn("after_loss")
        if trains:
            learn._do_grad_opt()

    # Training: the engine divides each batch.

    def _train(self, learn: Any) -> tuple[Any, Tensor]:
        """The predictions of all rows, and the loss, which carries the gradient."""
        mixes = any(isinstance(callback, MixedPrecision) for callback in learn.cbs)
        # The loss of MixUp, for example, refers to all rows.
        owner = getattr(learn.loss_func, "__self__", None)
        is_whole = self._whole_batch or isinstance(owner, Callback)
        options: dict[str, Any] = {"return_outputs": True}
        options["scaler"] = vars(learn).get("scaler")  # MixedPrecision's
        assert self._loop is not None
        criterion = self._loop.criterion_of(learn.loss_func, mixes)
        if is_whole:
            options["whole_batch"] = True
        else:
            options["reduction"] = self._reduction
            options["count"] = self._count or criterion.count
        self._loop.choose_turns()
        loss, outputs = self._loop.step(
            tuple(learn.xb), tuple(learn.yb), criterion, **options
        )
        # Callbacks and metrics of the training read the predictions of all rows.
        prediction = gather(outputs, physical(self._engine.device_ids[0]))
        return to_float(prediction) if mixes else prediction, loss

    # Evaluation: each replica predicts a batch of the loop.

    def _evaluation(self) -> Evaluation:
        """An evaluation of the Learner's present model, in groups."""
        evaluation = Evaluation(self._engine, [self._engine.module])
        evaluation.begin_groups(_prediction)
        return evaluation

    def _predict(self, learn: Any) -> Any:
        """The model's prediction for a batch, computed with those of the next ones,
        unless the model does not get the loader's batch.
        """
        ahead = self._ahead
        if ahead is None or not self._reads_ahead:
            return learn.model(*learn.xb)
        evaluation = ahead.evaluation
        assert evaluation is not None
        inputs: Any = None
        if ahead.is_at_group and evaluation.has_groups:
            batches = ahead.read(evaluation.group_size)
            inputs = [self._inputs_of(learn, batch) for batch in batches[1:]]
            inputs.insert(0, learn.xb)
            self._places = deque(map(_places, inputs))
            # A callback of fastai's makes plain tensors of images and categories.
            if {*map(type, nested.tensors(learn.xb))} == {Tensor}:
                inputs = nested.map_tensors(_plain, inputs)
        prediction = ahead.result(inputs)
        if prediction is None:
            return _prediction_in_turn(evaluation, learn.model, tuple(learn.xb))
        if self._places.popleft() != _places(learn.xb):
            self._reads_ahead = False  # a callback changes batches
            return learn.model(*learn.xb)
        return prediction

    def _inputs_of(self, learn: Any, batch: Any) -> tuple[Any, ...]:
        """The inputs of a batch that the loop has not reached."""
        # fastai knows how many of a batch's entries are inputs.
        with overridden(learn, xb=None, yb=None):
            learn._split(batch)
            return tuple(learn.xb)


class _LearnerLoop(Loop):
    """The training of a Learner, whose loss function replicas call.

    Attributes:
        criterion: that of the present loss function, of which replicas have copies.
    """

    function = "learn.loss_func"
    remedies = _REMEDIES
    once_per_batch = "whole_batch=True calls it once per batch"
    lends = False  # replicas call their own models
    criterion: _LossFunction | None = None

    def owners(self) -> list[Any]:
        """The loss function."""
        assert self.criterion is not None
        return [self.criterion.user.loss_func]

    def criterion_of(self, loss_func: Any, mixes: bool) -> _LossFunction:
        """The criterion of the present loss function."""
        criterion = _LossFunction(loss_func, mixes, self)
        if self.criterion is not None and self.criterion.key == criterion.key:
            criterion = self.criterion  # replicas have copies of it
        self.criterion = criterion
        return criterion

    def choose_turns(self) -> None:
        """Let replicas call functions of the user's in turn."""
        assert self.engine is not None
        assert self.criterion is not None
        hooks = _hooks_of_user(self.engine.module)
        functions = [*hooks]
        if self.criterion.takes_turns:
            functions += self.owners()
        self.let_take_turns(functions)
        # The loss may read what hooks write.
        self.turn = Scope.FUNCTION if hooks else Scope.LOSS

    def close(self) -> None:
        """Close the engine, and drop the criterion, of which it has copies."""
        super().close()
        self.criterion = None


def _hooks_of_user(model: nn.Module) -> list[Any]:
    """The hooks on a model that may write what others read: all except torch's own."""
    hooks: list[Any] = []
    for hook in hooks_in([model]):
        if package_of(hook) != "torch":
            hooks.append(hook)
    return hooks


@dataclass
class _OfUser:
    """What replicas share: objects are not replicated.

    Looks of the engine do not restore it either, because those of the loop do.
    """

    loss_func: Any
    parts: list[Any]


class _LossFunction(nn.Module):
    """A Learner's loss function as a module, so that its tensors are replicated, too.

    Attributes:
        parts: what is replicated: the modules to which the loss function leads, or, if
            it takes turns, their parameters. A call in turn writes the user's modules.
        user: the loss function, and the ``parts`` of the user's.
        loop: lends the loss function a replica's ``parts``.
        key: equal for criteria that compute the same.
        reduction: how the loss combines, by the loss function's attribute.
        count: the number of terms, if the loss is cross entropy.
    """

    def __init__(self, loss_func: Any, mixes: bool, learner_loop: _LearnerLoop) -> None:
        super().__init__()
        # A module that is the loss function has its modules inside.
        modules = modules_of(loss_func)
        if isinstance(loss_func, nn.Module):
            modules = [loss_func]
        self.mixes = mixes
        # A partial of torch's function may bind tensors, which are lent.
        is_of_user = is_user_function(loss_func)
        self.takes_turns = is_of_user or isinstance(loss_func, partial)
        self.parts: nn.ModuleList | nn.ParameterList
        if self.takes_turns:
            # Each once, also if two modules share it.
            self.parts = nn.ParameterList(nn.ModuleList(modules).parameters())
        else:
            self.parts = nn.ModuleList(modules)
        # By identity: criteria with the same key compute the same.
        ids = [id(value) for value in (loss_func, *self.parts)]
        self.key = (mixes, self.takes_turns, *ids)
        # Replicas exchange parts by their order.
        self.user = _OfUser(loss_func, [*self.parts])
        self.loop = learner_loop
        func = loss_func
        if isinstance(loss_func, BaseLoss):
            func = loss_func.func
        # Refusals name the criterion by this.
        kind = type(loss_func)
        self.__qualname__ = getattr(loss_func, "__qualname__", kind.__qualname__)
        self.reduction = getattr(func, "reduction", "mean")
        self.count = None
        if is_cross_entropy(func):
            self.count = lambda _, targets: terms_of_rows(func, targets[0], 0).sum()

    def forward(self, output: Any, targets: tuple[Any, ...]) -> Any:
        """Return the loss; under MixedPrecision, of predictions in single precision."""
        if self.mixes:
            output = to_float(output)
        device = nested.tensors(output)[0].device
        loss_func = self.user.loss_func
        pairs = zip(self.user.parts, self.parts, strict=True)
        if not self.takes_turns:
            loss_of_replica = copy_on_replica(loss_func, pairs)
            return loss_of_replica(output, *targets)
        with self.loop.in_turn(Loan(pairs), device):
            return loss_func(output, *targets)


def _prediction(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return model(*inputs)


def _prediction_in_turn(
    evaluation: Evaluation, model: nn.Module, inputs: tuple[Any, ...]
) -> Any:
    """The model's own prediction, on the device of the next batch."""
    device = evaluation.next_device()
    with evaluation.turn(device):
        if device != evaluation.home:
            inputs = values_on_device(inputs, physical(device))
        prediction = model(*inputs)
    return evaluation.brought_home(prediction, device)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor)


def _places(value: Any) -> list[Any]:
    """What tells the tensors of ``value`` from others: memory, shape and version."""
    tensors = nested.tensors(value)
    places = [(tensor.data_ptr(), tensor.shape) for tensor in tensors]
    return [*zip(places, versions(tensors), strict=True)]
