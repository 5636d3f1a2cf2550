"""sentence-transformers' trainers with the negatives of all rows of a step, on all
devices.

A loss such as ``MultipleNegativesRankingLoss`` compares all rows that it sees. So all
rows of a step are one batch. The replicas compute its embeddings in micro-batches. Then
the user's loss runs once, unmodified; its calls of the model return the embeddings.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sentence_transformers import CrossEncoderTrainer, SentenceTransformerTrainer
from sentence_transformers.base.sampler import BatchSamplers
from torch import Tensor, nn

from scatterpar.batch.markers import Rows
from scatterpar.devices.device_ids import DeviceLike
from scatterpar.integrations.loop import num_rows, overridden, refuse, replaced
from scatterpar.integrations.steps import ROWS
from scatterpar.integrations.transformers import ScatterOnceMixin

__all__ = ["ScatterOnceCrossEncoderTrainer", "ScatterOnceTrainer"]

# Means over rows: the losses of batches combine into the loss of all.
_OF_ROWS = {
    "BinaryCrossEntropyLoss",
    "ContrastiveLoss",
    "CosineSimilarityLoss",
    "CrossEntropyLoss",
}
_OF_ROWS |= {"MSELoss", "MarginMSELoss", "SoftmaxLoss", "TripletLoss"}
# These need more of the model than its embeddings, or train a second model.
_REFUSED = {"AdaptiveLayerLoss", "DenoisingAutoEncoderLoss", "Matryoshka2dLoss"}
_REFUSED |= {"ContrastiveTensionLoss", "ContrastiveTensionLossInBatchNegatives"}

# an entry of features: which rows of the outputs they stand for
_ROWS = "rows of outputs"


class _WholeBatch(ScatterOnceMixin):
    """The base of both trainers: one loss over the outputs for all rows of a step."""

    _output = "sentence_embedding"
    _recorded_model: _RecordedModel | None = None  # while the loss runs

    def __init__(
        self,
        *args: Any,
        device_ids: Sequence[DeviceLike] | None = None,
        whole_batch: bool | None = None,
        **kwargs: Any,
    ) -> None:
        name, has_cost = type(self).__name__, kwargs.get("micro_batch_cost") is not None
        reason = "its loss may compare all rows of a batch; leave micro_batch_cost out"
        refuse(name, {"micro_batch_cost": has_cost}, reason)
        super().__init__(*args, device_ids=device_ids, **kwargs)
        losses = [*self.loss.values()] if isinstance(self.loss, dict) else [self.loss]
        reason = (
            "it needs more of the model than its outputs; use the stock trainer "
            "on one device"
        )
        parts = [type(part).__name__ for loss in losses for part in loss.modules()]
        refuse(name, {part: part in _REFUSED for part in parts}, reason)
        # True if a sampler, a choice of data sets or a loss depends on it
        if whole_batch is None:
            is_sampled = self.args.batch_sampler != BatchSamplers.BATCH_SAMPLER
            is_chosen = is_sampled or isinstance(self.train_dataset, dict)
            whole_batch = is_chosen or not all(map(_is_mean_over_rows, losses))
        self._sees_all = whole_batch

    def _modules(self) -> list[Any]:
        return [self.model] if self._sees_all else super()._modules()

    def _step_collator(self, collate: Any) -> Any:
        return collate if self._sees_all else super()._step_collator(collate)

    def _how_losses_combine(self, step: Any) -> str:
        return ROWS

    def _loss_of_step(self, model: Any, step: Any, **options: Any) -> Any:
        if not self._sees_all:
            return super()._loss_of_step(model, step, **options)
        recorded, on_master = _RecordedModel(self), self._prepare_input(dict(step))
        state = self._record_columns(recorded, step, on_master)
        columns = [*recorded.columns.values()]
        groups = (
            [[c] for c in columns] if len({*map(num_rows, columns)}) > 1 else [columns]
        )
        inputs = Rows.from_batches(
            {"work": self._outputs_of, "columns": g} for g in groups
        )

        def criterion(outputs: tuple[Tensor, ...], _: Any) -> Any:
            recorded.outputs = torch.cat(outputs)
            with torch.random.fork_rng((), enabled=state is not None):
                if state is not None:  # the state before the first run of the loss
                    torch.set_rng_state(state[0])
                    random.setstate(state[1])
                return self._loss_with(recorded, on_master)

        accum = self._user_args["gradient_accumulation_steps"]
        loss = self._engine_loss(inputs, accum, None, criterion, whole_batch=True)
        if not recorded.was_called:
            reason = (
                "needs a loss that calls the model which is trained: this one "
                "did not; pass"
            )
            remedy = (
                "whole_batch=False, for the mean of the losses of the replicas' batches"
            )
            raise ValueError(f"{type(self).__name__} {reason} {remedy}")
        return loss

    def _record_columns(
        self, recorded: _RecordedModel, batch: Any, on_master: Any
    ) -> Any:
        """Record the inputs for the model. Returns the random state that the loss
        needs, if any.
        """
        features, _ = self.collect_features(dict(batch))
        recorded.columns |= enumerate(map(_divisible, features))

    def _outputs_of(self, work: Any, columns: Sequence[Any]) -> tuple[Tensor, ...]:
        return tuple(work[0](dict(column))[self._output] for column in columns)

    def _loss_with(self, recorded: _RecordedModel, batch: Any) -> Any:
        """The user's loss, computed with ``recorded`` as the model."""
        own = replaced(
            self.model, forward=recorded.forward, preprocess=recorded.preprocess
        )
        with own, overridden(self, _recorded_model=recorded):
            return type(self).compute_loss(self, self.model, dict(batch))


class ScatterOnceTrainer(_WholeBatch, SentenceTransformerTrainer):  # type: ignore[misc]
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
            for column, rows in zip(
                features, self._recorded_model.rows().values(), strict=True
            ):
                column[_ROWS] = rows
        return features, labels


class ScatterOnceCrossEncoderTrainer(_WholeBatch, CrossEncoderTrainer):  # type: ignore[misc]
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

    _output = "scores"

    def _record_columns(
        self, recorded: _RecordedModel, batch: Any, on_master: Any
    ) -> Any:
        """Record the pairs that the loss passes to the model. Returns the random state
        before.
        """
        # to log: the loss adds to them
        components = copy.deepcopy(self.accum_loss_components)
        state = torch.get_rng_state(), random.getstate()
        with torch.no_grad(), overridden(self, accum_loss_components=components):
            self._loss_with(recorded, on_master)
        return state


class _RecordedModel:
    """The methods of a model while the loss runs: they return outputs of the replicas.

    ``outputs`` are those of all ``columns``, one after the other. Without outputs,
    ``preprocess`` records the columns, and ``forward`` returns zeros.
    """

    def __init__(self, trainer: Any) -> None:
        self._model, self._output = trainer.model, trainer._output
        self._preprocess = trainer.model.preprocess
        self.columns: dict[Any, Any] = {}  # by number, or by their texts
        self.outputs: Tensor | None = None
        self.was_called = False

    def rows(self) -> dict[Any, Tensor]:
        """For each column, the numbers of its rows in ``outputs``."""
        sizes = [*map(num_rows, self.columns.values())]
        numbers = torch.arange(sum(sizes), device=self._model.device)
        return dict(zip(self.columns, numbers.split(sizes), strict=True))

    def preprocess(self, inputs: Any, **options: Any) -> dict[str, Any]:
        """Preprocess and record a column, once. Returns the numbers of its rows."""
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
        self.was_called, rows = True, features[_ROWS]
        if self.outputs is None:
            zeros = rows.new_zeros(len(rows), self._model.num_labels).float()
            return _Outputs({self._output: zeros})
        return _Outputs({**features, self._output: self.outputs[rows]})


class _Outputs(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise ValueError(
            f"the loss asks for {name!r} of the model's outputs, but the replicas "
            "have computed "
            f"{sorted(self)}; use the stock trainer on one device"
        )


def _is_mean_over_rows(loss: nn.Module) -> bool:
    """Whether ``loss`` and all losses of torch in it are unweighted means over rows."""
    is_mean = type(loss).__name__ in _OF_ROWS and getattr(loss, "size_average", True)
    parts = [
        part
        for part in loss.modules()
        if type(part).__module__ == "torch.nn.modules.loss"
    ]
    plain = [
        p.reduction == "mean" and getattr(p, "weight", None) is None for p in parts
    ]
    return is_mean and all(plain)


def _divisible(column: Mapping[str, Any]) -> Any:
    """A column whose rows can be divided. Bags of words become ``Rows``, one tensor per
    bag.
    """
    if "offsets" in column:
        return Rows(column["input_ids"].tensor_split(column["offsets"][1:]), _bags)
    sizes = {
        name: len(v) for name, v in column.items() if isinstance(v, Tensor) and v.ndim
    }
    if len(set(sizes.values())) > 1:
        reason = (
            f"the rows of a batch cannot be divided: its tensors have {sizes} of them"
        )
        raise ValueError(
            f"{reason}; use the stock trainer on one device, or whole_batch=False"
        )
    return dict(column)


def _bags(words: Sequence[Tensor]) -> dict[str, Tensor]:
    sizes = torch.tensor([0, *(len(bag) for bag in words[:-1])], device=words[0].device)
    return {"input_ids": torch.cat(list(words)), "offsets": sizes.cumsum(0)}
