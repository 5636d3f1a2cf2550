"""sentence-transformers' trainers with the negatives of all rows of a step, on all devices.

A loss such as ``MultipleNegativesRankingLoss`` compares all rows that it sees. So the rows of a
step are one batch; the replicas compute its embeddings, micro-batch by micro-batch; and the user's
loss, unmodified, runs once, with a model in place of its own that has these embeddings to give.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from sentence_transformers import CrossEncoderTrainer, SentenceTransformerTrainer
from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.sampler import BatchSamplers
from torch import Tensor, nn

from scatterpar.devices.verbs import DeviceLike
from scatterpar.integrations.all_replicas import ROWS, standing_in
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
    _whole = False
    _stand_in: _StandIn | None = None
    accum_loss_components: dict[str, Any]

    def __init__(
        self,
        *args: Any,
        device_ids: Sequence[DeviceLike] | None = None,
        whole_batch: bool | None = None,
        **kwargs: Any,
    ) -> None:
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
        self._tell()

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

    def _of_all_replicas(self, asked: dict[str, Any], n: int) -> dict[str, Any]:
        told = super()._of_all_replicas(asked, n)
        if self._whole:
            told["per_device_train_batch_size"] *= told["gradient_accumulation_steps"]
            told["gradient_accumulation_steps"] = 1
        return told

    def _evaluates_on_all(self) -> bool:
        return False

    def _held(self) -> dict[str, Any]:
        return {"model": self.model} if self._whole else super()._held()

    def _how_losses_combine(self, window: Sequence[Any], items: Any, pieces: Sequence[Any]) -> str:
        return ROWS

    def _step_of(self, window: Sequence[Any], items: Any) -> Tensor:
        if not self._whole:
            return super()._step_of(window, items)
        (batch,) = window
        stand_in = _StandIn(self._module(), self._output, self.args.device)
        columns = self._columns(batch, stand_in)
        sizes = [_rows_of(column) for column in columns]
        inputs: Any = {"work": self._answers, "columns": columns}
        if len(set(sizes)) > 1:
            each = [{"work": self._answers, "columns": [column]} for column in columns]
            inputs = Rows.from_batches(each)

        def criterion(outputs: tuple[Tensor, ...], _: Any) -> Any:
            stand_in.answers = outputs if len(outputs) > 1 else outputs[0].split(sizes)
            return self._loss_with(stand_in, self._prepare_inputs(dict(batch)))

        engine = self._engine_of_the_model()
        engine.accum = self._asked["gradient_accumulation_steps"]
        with self.compute_loss_context_manager():
            loss: Tensor = engine.forward_backward(
                inputs, None, criterion, scaler=self.accelerator.scaler, whole_batch=True
            )
        if not stand_in.was_asked:
            raise ValueError(_UNASKED.format(type(self).__name__))
        return loss

    def _columns(self, batch: Mapping[str, Any], stand_in: _StandIn) -> list[Any]:
        """What the model is to be asked, with the same rows in each: the batch's columns."""
        features, _ = self.collect_features(dict(batch))
        return [_divisible(column) for column in features]

    def _answers(self, work: Any, columns: Sequence[Any]) -> tuple[Tensor, ...]:
        model = work.parts[0]
        return tuple(model(dict(column))[self._output] for column in columns)

    def _loss_with(self, stand_in: _StandIn, batch: dict[str, Any]) -> Any:
        """The user's loss, whose model is the stand-in while it runs."""
        places: list[tuple[Any, str, nn.Module]] = [
            (part, name, stand_in)
            for loss in self._losses()
            for part in loss.modules()
            for name, child in part._modules.items()
            if child is self.model or (name == "model" and isinstance(child, BaseModel))
        ]
        with standing_in(places), _as_before(stand_in):
            self._stand_in = stand_in
            try:
                return self.compute_loss(stand_in, batch)
            finally:
                self._stand_in = None

    def collect_features(self, inputs: Any) -> Any:
        """The trainer's own; for the stand-in, with what says which of its answers is meant."""
        features, labels = super().collect_features(inputs)  # type: ignore[misc]
        if self._stand_in is not None and self._output == "sentence_embedding":
            for number, column in enumerate(features):
                answers = self._stand_in.answers[number]
                column["answer"] = number
                column["answer_row"] = torch.arange(len(answers), device=answers.device)
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
        args: as in ``CrossEncoderTrainer``. The loss object is yours, unmodified.
        device_ids: one entry per replica, as in ``ScatterOnceParallel``; the first is the trainer's
            own device. By default every visible accelerator, or one CPU replica.
        whole_batch: as in ``ScatterOnceTrainer``.
        kwargs: as in ``CrossEncoderTrainer``.

    Raises:
        ValueError: as ``ScatterOnceTrainer``; pairs that are others the second time.
    """

    _output = "scores"

    def _columns(self, batch: Mapping[str, Any], stand_in: _StandIn) -> list[Any]:
        """The pairs that the loss makes of the batch, tokenized on the host."""
        components = copy.deepcopy(self.accum_loss_components)
        stand_in.before = torch.get_rng_state(), random.getstate()
        device, stand_in.device = stand_in.device, torch.device("cpu")
        with torch.no_grad():
            self._loss_with(stand_in, dict(batch))
        self.accum_loss_components = components
        stand_in.device = device
        return stand_in.columns


class _StandIn(nn.Module):
    """In the place of a loss's model: it gives the outputs that the replicas have computed.

    Before it has any, it notes what it is asked to tokenize, on the host, and gives zeros.

    Attributes:
        answers: the outputs of each column.
        columns: what it has tokenized.
        device: where the loss computes.
        before: the random state in which the loss began, so that it asks for the same again.
        was_asked: whether the loss has called it.
    """

    def __init__(self, model: nn.Module, output: str, device: torch.device) -> None:
        super().__init__()
        vars(self)["_model"] = model  # not as a part of it
        self._output = output
        self._numbers: dict[Any, int] = {}
        self.answers: Sequence[Tensor] = ()
        self.columns: list[Any] = []
        self.device = device
        self.before: tuple[Tensor, Any] | None = None
        self.was_asked = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["_model"], name)

    def __getitem__(self, index: Any) -> Any:
        return vars(self)["_model"][index]

    def preprocess(self, inputs: Any, **options: Any) -> dict[str, Any]:
        """The model's own, once; then what says which answers are meant."""
        key = repr((inputs, options))
        if key not in self._numbers:
            if self.answers:
                raise ValueError(
                    "the loss asked for the scores of other pairs the second time that it ran: it "
                    "draws from a random generator of its own; use the stock trainer on one device"
                )
            self._numbers[key] = len(self.columns)
            self.columns.append(dict(vars(self)["_model"].preprocess(inputs, **options)))
        number = self._numbers[key]
        rows = _rows_of(self.columns[number])
        return {"answer": number, "answer_row": torch.arange(rows, device=self.device)}

    def forward(self, features: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        self.was_asked = True
        if not self.answers:
            rows = len(features["answer_row"])
            return _Answer({self._output: torch.zeros(rows, vars(self)["_model"].num_labels)})
        answer = self.answers[features["answer"]][features["answer_row"]]
        return _Answer({**features, self._output: answer})


class _Answer(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise ValueError(
            f"the loss asks for {name!r} of the model's outputs, but the replicas have computed "
            f"{sorted(self)}; use the stock trainer on one device"
        )


@contextlib.contextmanager
def _as_before(stand_in: _StandIn) -> Iterator[None]:
    """The random state in which the loss began, where it runs a second time."""
    if stand_in.before is None or not stand_in.answers:
        yield
        return
    state = torch.get_rng_state(), random.getstate()
    _set_random(*stand_in.before)
    try:
        yield
    finally:
        _set_random(*state)


def _set_random(of_torch: Tensor, of_python: Any) -> None:
    torch.set_rng_state(of_torch)
    random.setstate(of_python)


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


def _rows_of(column: Any) -> int:
    """The rows of what a model is asked."""
    if isinstance(column, Rows):
        return len(column.entries)
    return next(len(v) for v in column.values() if isinstance(v, Tensor) and v.ndim)


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
    "{} needs a loss that has the model as an attribute, and calls that: this one did not; pass "
    "whole_batch=False, for the mean of the losses of the replicas' batches"
)
