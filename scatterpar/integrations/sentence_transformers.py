"""sentence-transformers' trainers with the negatives of all rows of a step, on all devices.

A loss such as ``MultipleNegativesRankingLoss`` compares all rows that it sees. So the rows of a
step are one batch; the replicas compute its embeddings, micro-batch by micro-batch; and the user's
loss, unmodified, runs once, with a model in place of its own that has these embeddings to give.
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

from scatterpar.devices.runtime import DeviceLike
from scatterpar.integrations.loop import num_rows
from scatterpar.integrations.trainer_base import ROWS, override_methods
from scatterpar.integrations.transformers import ScatterOnceMixin
from scatterpar.step.markers import Rows

__all__ = ["ScatterOnceCrossEncoderTrainer", "ScatterOnceTrainer"]

# Means over rows, of which the batches' losses make up that of all.
_OF_ROWS = (
    "BinaryCrossEntropyLoss",
    "ContrastiveLoss",
    "CosineSimilarityLoss",
    "CrossEntropyLoss",
    "MSELoss",
    "MarginMSELoss",
    "SoftmaxLoss",
    "TripletLoss",
)

# They need more of the model than its embeddings, or a second one that they train.
_REFUSED = (
    "AdaptiveLayerLoss",
    "ContrastiveTensionLoss",
    "ContrastiveTensionLossInBatchNegatives",
    "DenoisingAutoEncoderLoss",
    "Matryoshka2dLoss",
)


class _WholeBatch(ScatterOnceMixin):
    """What both trainers have in common."""

    _output = "sentence_embedding"
    _recorded_model: _RecordedModel | None = None
    accum_loss_components: dict[str, Any]

    def __init__(
        self,
        *args: Any,
        device_ids: Sequence[DeviceLike] | None = None,
        whole_batch: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("micro_batch_cost") is not None:
            raise ValueError(
                f"{type(self).__name__} does not go together with micro_batch_cost: its loss may "
                f"compare all rows of a batch; leave micro_batch_cost out"
            )
        super().__init__(*args, device_ids=device_ids, **kwargs)
        for loss in self._losses():
            for module in loss.modules():
                if type(module).__name__ in _REFUSED:
                    raise ValueError(
                        f"{type(self).__name__} does not go together with "
                        f"{type(module).__name__}: it needs more of the model than its outputs; "
                        f"use the stock trainer on one device"
                    )
        self._whole = self._needs_whole() if whole_batch is None else whole_batch
        self._set_single_device_args()

    def _losses(self) -> list[nn.Module]:
        loss: Any = vars(self)["loss"]
        return list(loss.values()) if isinstance(loss, dict) else [loss]

    def _needs_whole(self) -> bool:
        """Whether something looks at a whole batch: a loss, a sampler, a choice of data sets."""
        args: Any = self.args
        plain = args.batch_sampler == BatchSamplers.BATCH_SAMPLER
        return isinstance(self.train_dataset, dict) or not (
            plain and all(map(_is_of_rows, self._losses()))
        )

    # One batch with the rows of a step, where a whole batch is wanted.

    def _module_attributes(self) -> dict[str, Any]:
        return {"model": self.model} if self._whole else super()._module_attributes()

    def _how_losses_combine(self, window: Sequence[Any], items: Any, pieces: Sequence[Any]) -> str:
        return ROWS

    def _step_of(self, window: Sequence[Any], items: Any) -> Tensor:
        if not self._whole:
            return super()._step_of(window, items)
        (batch,) = window
        asked = _RecordedModel(self._module(), self._output)
        its = self._prepare_inputs(dict(batch))
        columns, state = self._columns(batch, its, asked)
        asked.sizes = [num_rows(column) for column in columns]
        inputs: Any = {"work": self._answers, "columns": columns}
        if len(set(asked.sizes)) > 1:
            each = [{"work": self._answers, "columns": [column]} for column in columns]
            inputs = Rows.from_batches(each)

        def criterion(outputs: tuple[Tensor, ...], _: Any) -> Any:
            asked.answers = torch.cat(outputs)
            with torch.random.fork_rng((), enabled=state is not None):
                if state is not None:  # in which the loss began, the first time
                    torch.set_rng_state(state[0])
                    random.setstate(state[1])
                return self._loss_with(asked, its)

        loss = self._step_of_all_rows(
            inputs, self._user_args["gradient_accumulation_steps"], criterion
        )
        if not asked.was_asked:
            raise ValueError(_UNASKED.format(type(self).__name__))
        return loss

    def _columns(self, batch: Any, its: Any, asked: _RecordedModel) -> tuple[list[Any], Any]:
        """What the model is to be asked: the batch's columns; no random state to go back to."""
        features, _ = self.collect_features(dict(batch))
        return [_divisible(column) for column in features], None

    def _answers(self, work: Any, columns: Sequence[Any]) -> tuple[Tensor, ...]:
        model = work.parts[0]
        return tuple(model(dict(column))[self._output] for column in columns)

    def _loss_with(self, asked: _RecordedModel, batch: Any) -> Any:
        """The user's loss, whose model gives the answers that there are while it runs."""
        model = self._module()
        with override_methods(model, forward=asked.forward, preprocess=asked.preprocess):
            self._recorded_model = asked
            try:
                return self.compute_loss(model, dict(batch))
            finally:
                self._recorded_model = None

    def collect_features(self, inputs: Any) -> Any:
        """The trainer's own; while answers are given, with what says which of them are meant."""
        features, labels = super().collect_features(inputs)  # type: ignore[misc]
        if self._recorded_model is not None and self._output == "sentence_embedding":
            for column, rows in zip(features, self._recorded_model.rows(), strict=True):
                column["answer"] = rows
        return features, labels


class ScatterOnceTrainer(_WholeBatch, SentenceTransformerTrainer):  # type: ignore[misc]
    """``SentenceTransformerTrainer`` on all devices of one process, with negatives of all rows.

    With N replicas, ``per_device_train_batch_size=b`` and ``gradient_accumulation_steps=k``, an
    optimizer step is that of the stock trainer on one device with batches of b * N * k rows: the
    loss sees all of them. Embeddings are computed in micro-batches of b rows. With k > 1 all but a
    replica's last micro-batch are computed twice, so that the memory is that of one.

    Args:
        args: as in ``SentenceTransformerTrainer``. The loss object is yours, unmodified.
        device_ids: one entry per replica, as in ``ScatterOnceParallel``; the first is the trainer's
            own device. By default every visible accelerator, or one CPU replica.
        whole_batch: ``None``: the loss sees all rows at once, unless it is a mean over rows.
            ``True``: it does always. ``False``: it sees b rows, as under the stock trainer, and its
            values are averaged.
        kwargs: as in ``SentenceTransformerTrainer``.

    Raises:
        ValueError: as ``scatterpar.integrations.transformers.ScatterOnceTrainer``; a loss that
            needs more of the model than its embeddings, by name.

    Example::

        trainer = ScatterOnceTrainer(
            model, args, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model)
        )
        trainer.train()
    """


class ScatterOnceCrossEncoderTrainer(_WholeBatch, CrossEncoderTrainer):  # type: ignore[misc]
    """``CrossEncoderTrainer`` on all devices of one process, with losses over all rows of a step.

    With N replicas, ``per_device_train_batch_size=b`` and ``gradient_accumulation_steps=k``, an
    optimizer step is that of the stock trainer on one device with batches of b * N * k rows. The
    loss runs twice: first to see which pairs it asks the model about, then with their scores, which
    the replicas have computed.

    Args:
        args: as in ``CrossEncoderTrainer``, and so are ``kwargs``.
        device_ids: as in ``ScatterOnceTrainer``, and so is ``whole_batch``.

    Raises:
        ValueError: as ``ScatterOnceTrainer``; pairs that are others the second time.
    """

    _output = "scores"

    def _columns(self, batch: Any, its: Any, asked: _RecordedModel) -> tuple[list[Any], Any]:
        """The pairs that the loss makes of the batch, and the random state in which it began."""
        components = copy.deepcopy(self.accum_loss_components)
        state = torch.get_rng_state(), random.getstate()
        with torch.no_grad():
            self._loss_with(asked, its)
        self.accum_loss_components = components
        return asked.columns, state


class _RecordedModel:
    """What a loss asks its model, and the answers that the replicas have computed for it.

    ``answers`` are those of all ``columns``, one after the other, of ``sizes`` rows each. Before
    there are any it notes what is tokenized, on the host, and gives zeros.
    """

    def __init__(self, model: Any, output: str) -> None:
        self._model, self._output, self._preprocess = model, output, model.preprocess
        self._numbers: dict[str, int] = {}
        self.answers: Tensor | None = None
        self.columns: list[Any] = []
        self.sizes: list[int] = []
        self.was_asked = False

    def rows(self) -> Sequence[Tensor]:
        """Of each column, where its answers are."""
        places = torch.arange(sum(self.sizes), device=self._model.device)
        return torch.split(places, self.sizes)

    def preprocess(self, inputs: Any, **options: Any) -> dict[str, Any]:
        """The model's own, once; then what says which answers are meant."""
        key = repr((inputs, options))
        if key not in self._numbers:
            if self.answers is not None:
                raise ValueError(
                    "the loss asked for the scores of other pairs the second time that it ran: it "
                    "draws from a random generator of its own; use the stock trainer on one device"
                )
            self._numbers[key] = len(self.columns)
            self.columns.append(dict(self._preprocess(inputs, **options)))
            self.sizes.append(num_rows(self.columns[-1]))
        return {"answer": self.rows()[self._numbers[key]]}

    def forward(self, features: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        """The model's answers, or zeros."""
        self.was_asked, rows = True, features["answer"]
        if self.answers is None:
            return _Answer(
                {self._output: rows.new_zeros(len(rows), self._model.num_labels).float()}
            )
        return _Answer({**features, self._output: self.answers[rows]})


class _Answer(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise ValueError(
            f"the loss asks for {name!r} of the model's outputs, but the replicas have computed "
            f"{sorted(self)}; use the stock trainer on one device"
        )


def _is_of_rows(loss: nn.Module) -> bool:
    """A mean over rows, up to what it is made of: torch's losses without weights of classes."""
    return (
        type(loss).__name__ in _OF_ROWS
        and getattr(loss, "size_average", True)
        and all(
            getattr(part, "reduction", "mean") == "mean" and getattr(part, "weight", None) is None
            for part in loss.modules()
            if type(part).__module__ == "torch.nn.modules.loss"
        )
    )


def _divisible(column: Mapping[str, Any]) -> Any:
    """A column whose rows can be divided: those of bags of words lie in one row of words."""
    if "offsets" in column:
        words = column["input_ids"].tensor_split(column["offsets"][1:])
        return Rows(list(words), _bags)
    sizes = {name: len(v) for name, v in column.items() if isinstance(v, Tensor) and v.ndim}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the rows of a batch cannot be divided: its tensors have {sizes} of them; use the "
            f"stock trainer on one device, or whole_batch=False"
        )
    return dict(column)


def _bags(words: Sequence[Tensor]) -> dict[str, Tensor]:
    sizes = torch.tensor([0, *(len(few) for few in words[:-1])], device=words[0].device)
    return {"input_ids": torch.cat(list(words)), "offsets": sizes.cumsum(0)}


_UNASKED = (
    "{} needs a loss that calls the model which is trained: this one did not; pass "
    "whole_batch=False, for the mean of the losses of the replicas' batches"
)
