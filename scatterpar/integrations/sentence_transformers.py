"""sentence-transformers' trainers with the negatives of all rows of a step, on all
devices.

A loss such as ``MultipleNegativesRankingLoss`` compares all rows that it sees. So all
rows of a step are one batch. The replicas compute its embeddings in micro-batches. Then
the user's loss runs once, unmodified; its calls of the model return the embeddings.

In an evaluation each replica computes whole batches. Evaluators call the model itself,
on the first device.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from sentence_transformers import CrossEncoderTrainer, SentenceTransformerTrainer
from sentence_transformers.base.sampler import BatchSamplers
from torch import Tensor, nn
from transformers import Trainer

from scatterpar.batch.markers import Rows
from scatterpar.devices.device_ids import DeviceLike
from scatterpar.integrations.step_batches import ROWS
from scatterpar.integrations.trainer_loop import TrainerLoop
from scatterpar.integrations.transformers import ScatterOnceMixin
from scatterpar.loops.arguments import refuse
from scatterpar.loops.modules import overridden, replaced, values_on_device
from scatterpar.loops.rows import check_rows, num_rows

__all__ = ["ScatterOnceCrossEncoderTrainer", "ScatterOnceTrainer"]

# Means over rows: the losses of batches combine into the loss of all.
_OF_ROWS = {
    "BinaryCrossEntropyLoss",
    "ContrastiveLoss",
    "CosineSimilarityLoss",
    "CrossEntropyLoss",
    "MSELoss",
    "MarginMSELoss",
    "SoftmaxLoss",
    "TripletLoss",
}
# These need more of the model than its embeddings, or train a second model.
_REFUSED = {
    "AdaptiveLayerLoss",
    "ContrastiveTensionLoss",
    "ContrastiveTensionLossInBatchNegatives",
    "DenoisingAutoEncoderLoss",
    "Matryoshka2dLoss",
}

# an entry of features: which rows of the outputs they stand for
_ROWS = "rows of outputs"
_COMPONENTS = "accum_loss_components"  # of losses that are dicts, to log


class _WholeBatchLoop(TrainerLoop):
    """One loss over the outputs for all rows of a step.

    Attributes:
        output: the entry of the model's outputs that the loss gets.
    """

    output = "sentence_embedding"

    def modules(self) -> list[Any]:
        """The model, and the losses if they run on replicas."""
        # In an evaluation the loss runs on replicas, too.
        is_on_master = not self.is_by_batches and self.trainer.model.training
        return [self.trainer.model] if is_on_master else super().modules()

    def hows(self) -> Sequence[Any]:
        """The loss is a mean over rows, unless the user says otherwise."""
        return [ROWS if self.count is None else self.count]

    def loss_of_step(self, step: Any, own_items: Any = None) -> Any:
        """The loss of all rows of a step::

        columns -> embeddings       the model, on the replicas, in micro-batches
        embeddings -> loss          the user's loss, once, on the first device
        """
        if self.is_by_batches:
            return super().loss_of_step(step, own_items)
        trainer = self.trainer
        recorded = _RecordedModel(trainer, self.output)
        # The user's loss runs there, with the labels.
        prepare = type(trainer)._prepare_inputs
        on_master = prepare(trainer, dict(step))
        # The stock one only moves the batch, which the engine copies from the host.
        is_stock = prepare is Trainer._prepare_inputs
        batch = step if is_stock else on_master
        # Before the engine's step, which needs the columns as its inputs.
        state = self.record_columns(recorded, batch, on_master)
        columns = list(recorded.columns.values())

        def criterion(outputs: tuple[Tensor, ...], _: Any) -> Any:
            # With their graph, which leads to the replicas.
            recorded.outputs = torch.cat(outputs)
            with torch.random.fork_rng((), enabled=state is not None):
                if state is not None:  # the state before the first run of the loss
                    state_of_torch, state_of_python = state
                    torch.set_rng_state(state_of_torch)
                    random.setstate(state_of_python)
                with self.standing_for_model(recorded):
                    return self._loss_of(recorded, on_master)

        inputs = self._inputs_of(columns)
        loss = self.train(inputs, self.num_batches, None, criterion, whole_batch=True)
        if not recorded.was_called:
            raise ValueError(
                f"{type(trainer).__name__} needs a loss that calls the model which is "
                "trained: this one did not; pass whole_batch=False, for the mean of "
                "the losses of the replicas' batches"
            )
        return loss

    def _inputs_of(self, columns: Sequence[Any]) -> Any:
        """The engine's inputs: all columns, or one after the other if they have
        different numbers of rows.
        """
        # No lists of columns: one as long as the batch could be a list of rows.
        groups = [tuple(columns)]
        if len({num_rows(column) for column in columns}) > 1:
            groups = [(column,) for column in columns]
        return Rows.from_batches(
            {"work": self._outputs_of, "columns": group} for group in groups
        )

    def record_columns(
        self, recorded: _RecordedModel, batch: Any, on_master: Any
    ) -> Any:
        """Record the inputs for the model. Returns the random state that the loss
        needs, if any.
        """
        features, _ = self.trainer.collect_features(dict(batch))
        for number, column in enumerate(features):
            recorded.columns[number] = _divisible(column)

    def _outputs_of(self, work: Any, columns: Sequence[Any]) -> tuple[Tensor, ...]:
        """The model's outputs for a micro-batch's rows of some columns, on a
        replica.
        """
        model = work[0]
        return tuple(model(dict(column))[self.output] for column in columns)

    # Terms of losses that are dicts, which calls on replicas add up.

    def attributes_on_replica(
        self, work: Any, device: Any, record: Any, *args: Any
    ) -> Any:
        """What a Trainer on a replica has in the place of this one's attributes."""
        attributes = super().attributes_on_replica(work, device, record, *args)
        record.components = {"train": {}, "eval": {}}
        return {**attributes, _COMPONENTS: record.components}

    def transfer(self, calls: Sequence[Any]) -> None:
        """Add what calls have logged, and the components of their losses."""
        super().transfer(calls)
        for call in calls:
            components_by_mode = values_on_device(
                call.components, self.trainer.args.device
            )
            for mode, components in components_by_mode.items():
                totals = self.trainer.accum_loss_components[mode]
                for name, value in components.items():
                    totals[name] = totals.get(name, 0) + value

    def _loss_of(self, recorded: _RecordedModel, batch: Any) -> Any:
        """The user's loss of the recorded outputs, with their graph."""
        trainer = self.trainer
        loss = type(trainer).compute_loss(trainer, trainer.model, dict(batch))
        outputs = recorded.outputs
        if outputs is None or not (loss.is_leaf and loss.requires_grad):
            return loss
        # A cached loss has no graph. In its backward pass it calls the model again.
        # A leaf, so that its gradient can be read after the backward pass.
        recorded.outputs = outputs.detach().requires_grad_()
        loss.backward()
        gradient = recorded.outputs.grad
        return _WithGradient.apply(outputs, loss.detach(), gradient)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def standing_for_model(self, recorded: _RecordedModel) -> Iterator[None]:
        """In the body, the model's methods are those of ``recorded``."""
        model = self.trainer.model
        with (
            replaced(model, forward=recorded.forward, preprocess=recorded.preprocess),
            overridden(self.trainer, _recorded_model=recorded),
        ):
            yield


class _PairsLoop(_WholeBatchLoop):
    """One loss over the scores of all pairs, which it names in a run of its own."""

    output = "scores"

    def record_columns(
        self, recorded: _RecordedModel, batch: Any, on_master: Any
    ) -> Any:
        """Record the pairs that the loss passes to the model. Returns the random state
        before.
        """
        trainer = self.trainer
        state = torch.get_rng_state(), random.getstate()
        # The loss adds to what is logged, and will do so again in its second run.
        components = copy.deepcopy(trainer.accum_loss_components)
        with (
            torch.no_grad(),
            overridden(trainer, accum_loss_components=components),
            self.standing_for_model(recorded),
        ):
            type(trainer).compute_loss(trainer, trainer.model, dict(on_master))
        return state


class _WholeBatchTrainer(ScatterOnceMixin):
    """The base of both trainers, which asks whether a loss needs all rows of a step."""

    _kind_of_loop = _WholeBatchLoop
    _recorded_model: _RecordedModel | None = None  # while the loss runs

    def __init__(
        self,
        *args: Any,
        device_ids: Sequence[DeviceLike] | None = None,
        whole_batch: bool | None = None,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        super().__init__(*args, device_ids=device_ids, **kwargs)
        # Now: the stock constructor has made the losses.
        losses = [self.loss]
        if isinstance(self.loss, dict):  # one for each data set
            losses = list(self.loss.values())
        kinds = {type(part).__name__ for part in nn.ModuleList(losses).modules()}
        reason = (
            "it needs more of the model than its outputs; use the stock trainer "
            "on one device"
        )
        refuse(name, dict.fromkeys(sorted(kinds & _REFUSED), True), reason)
        # The user asks for the mean of batches, also if these compare rows.
        self._loop.is_checked = whole_batch is not False
        if whole_batch is None:
            whole_batch = self._needs_all_rows(losses)
        self._loop.is_by_batches = not whole_batch
        is_counted = whole_batch and self._loop.count is not None
        reason = (
            "the loss sees all rows of a step; pass whole_batch=False if losses of "
            "batches combine like this, or leave it out"
        )
        refuse(name, {"count= or reduction= here": is_counted}, reason)

    def _needs_all_rows(self, losses: Sequence[nn.Module]) -> bool:
        """Whether a step depends on which rows are in a batch."""
        if self.args.batch_sampler != BatchSamplers.BATCH_SAMPLER:
            return True
        if isinstance(self.train_dataset, dict):  # each batch is of one data set
            return True
        return not all(map(_is_mean_over_rows, losses))


class ScatterOnceTrainer(_WholeBatchTrainer, SentenceTransformerTrainer):  # type: ignore[misc]
    """``SentenceTransformerTrainer`` on all devices of one process, with negatives of
    all rows.

    With N replicas, ``per_device_train_batch_size=b`` and
    ``gradient_accumulation_steps=k``, an optimizer step is that of the stock trainer on
    one device with batches of b * N * k rows: the loss sees all of them. Embeddings are
    computed in micro-batches of b rows. With k > 1 every micro-batch except a replica's
    last one is computed twice, so that only one graph is in memory.

    Args:
        args: as in ``SentenceTransformerTrainer``, like ``kwargs``. The loss object is
            not changed.
        device_ids: as in ``ScatterOnceParallel``; the first is the trainer's device.
        whole_batch: ``True``: the loss sees all rows at once. ``False``: it sees b
            rows, as with the stock trainer, and the losses are averaged. ``None``:
            ``False`` for losses that are means over rows, otherwise ``True``.

    Raises:
        ValueError: as ``scatterpar.integrations.transformers.ScatterOnceTrainer``, or a
            loss that needs more of the model than its embeddings.
    """

    def collect_features(self, inputs: Any) -> Any:
        """The trainer's features; while the loss runs, with the numbers of their output
        rows.
        """
        features, labels = super().collect_features(inputs)
        if self._recorded_model is not None:
            row_numbers = self._recorded_model.rows().values()
            for column, rows in zip(features, row_numbers, strict=True):
                column[_ROWS] = rows
        return features, labels


class ScatterOnceCrossEncoderTrainer(_WholeBatchTrainer, CrossEncoderTrainer):  # type: ignore[misc]
    """``CrossEncoderTrainer`` on all devices of one process, with losses over all rows
    of a step.

    As ``ScatterOnceTrainer``, but the loss runs twice: first to record the pairs that
    it passes to the model, then with the scores of these pairs, which the replicas have
    computed.

    Args:
        args: as in ``CrossEncoderTrainer``, like ``kwargs``.
        device_ids: as in ``ScatterOnceTrainer``, like ``whole_batch``.

    Raises:
        ValueError: as ``ScatterOnceTrainer``, or if the loss passes other pairs in its
            second run.
    """

    _kind_of_loop = _PairsLoop


class _RecordedModel:
    """The methods of a model while the loss runs: they return outputs of the replicas.

    ``outputs`` are those of all ``columns``, one after the other. Without outputs,
    ``preprocess`` records the columns, and ``forward`` returns zeros.
    """

    def __init__(self, trainer: Any, output: str) -> None:
        self._model = trainer.model
        self._output = output
        self._preprocess = trainer.model.preprocess
        self.columns: dict[Any, Any] = {}  # by number, or by their texts
        self.outputs: Tensor | None = None
        self.was_called = False

    def rows(self) -> dict[Any, Tensor]:
        """For each column, the numbers of its rows in ``outputs``."""
        sizes = [num_rows(column) for column in self.columns.values()]
        numbers = torch.arange(sum(sizes), device=self._model.device)
        numbers_of_columns = numbers.split(sizes)
        return dict(zip(self.columns, numbers_of_columns, strict=True))

    def preprocess(self, inputs: Any, **options: Any) -> dict[str, Any]:
        """Preprocess and record a column, once. Returns the numbers of its rows."""
        # A loss may ask for the same pairs twice, and texts have no other key.
        key = repr((inputs, options))
        if key not in self.columns:
            if self.outputs is not None:
                raise ValueError(
                    "the loss asked for the scores of other pairs the second time "
                    "that it ran: it "
                    "draws from a generator of its own; use the stock trainer on one "
                    "device"
                )
            self.columns[key] = dict(self._preprocess(inputs, **options))
        return {_ROWS: self.rows()[key]}

    def forward(self, features: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        """The outputs of the rows that ``features`` name, or zeros."""
        self.was_called = True
        rows = features[_ROWS]
        if self.outputs is None:
            zeros = rows.new_zeros(len(rows), self._model.num_labels).float()
            return _Outputs({self._output: zeros})
        return _Outputs({**features, self._output: self.outputs[rows]})


class _WithGradient(torch.autograd.Function):
    """A loss whose gradient with respect to the outputs has been computed."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return factors[0] * gradient, None, None


class _Outputs(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise ValueError(
            f"the loss asks for {name!r} of the model's outputs, but the replicas "
            "have computed "
            f"{sorted(self)}; use the stock trainer on one device"
        )


def _is_mean_over_rows(loss: nn.Module) -> bool:
    """Whether ``loss`` and all losses of torch in it are unweighted means over rows."""
    if type(loss).__name__ not in _OF_ROWS or not getattr(loss, "size_average", True):
        return False
    for part in loss.modules():
        if type(part).__module__ != "torch.nn.modules.loss":
            continue
        is_weighted = getattr(part, "weight", None) is not None
        if part.reduction != "mean" or is_weighted:
            return False
    return True


def _divisible(column: Mapping[str, Any]) -> Any:
    """A column whose rows can be divided. Bags of words become ``Rows``, one tensor per
    bag.
    """
    if "offsets" in column:
        bags = column["input_ids"].tensor_split(column["offsets"][1:])
        return Rows(bags, _joined_bags)
    check_rows(column, "use the stock trainer on one device, or whole_batch=False")
    return dict(column)


def _joined_bags(bags: Sequence[Tensor]) -> dict[str, Tensor]:
    """Bags of words as ``nn.EmbeddingBag`` takes them: joined, with their offsets."""
    sizes = [0]
    for bag in bags[:-1]:
        sizes.append(len(bag))
    offsets = torch.tensor(sizes, device=bags[0].device).cumsum(0)
    words = torch.cat(list(bags))
    return {"input_ids": words, "offsets": offsets}
