"""``of_trainer``: a library's trainer, as its user makes it, in the place of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from scatterpar.batch.markers import Rows
from scatterpar.splitting.check import check
from scatterpar.splitting.check_report import SplitCheck
from scatterpar.splitting.library_steps import run_one_step
from scatterpar.splitting.split_arguments import Loss, SplitArguments
from scatterpar.splitting.trial import Trial

MakeTrainer = Callable[[Any, int], Any]


def of_trainer(
    make: MakeTrainer,
    model: nn.Module,
    batch: Any,
    *,
    parts: int | None = None,
    ranks: int = 1,
    equal: bool | None = True,
    loss: Loss | None = None,
    timeout: float = 240.0,
) -> SplitCheck:
    """Check a trainer as ``splitcheck`` checks a loop.

    The trainer gets the parts in the place of its loader, runs one optimizer step, and
    saves and logs nothing.

    Args:
        make: ``make(model, steps)`` returns your trainer of transformers, TRL,
            sentence-transformers, Lightning or fastai. It passes ``steps`` on as the
            number of micro-batches, such as ``gradient_accumulation_steps=steps``.
        model: the module that the trainer trains.
        batch: rows of the trainer's data set, in a list: its own collator makes the
            parts. Or a collated batch.
        parts: micro-batches of each rank: 4, or 1 with ``ranks``.
        ranks: processes, each with a trainer of its own.
        equal: whether all parts have equally many rows, as a loader gives them.
        loss: as in ``splitcheck``.
        timeout: seconds after which ranks are killed.

    Raises:
        TypeError: for a trainer of another library.
        ValueError: if the trainer ignores ``steps``, or makes its batches by itself:
            the error says what to pass.
    """
    counted = batch
    if isinstance(batch, Sequence) and not isinstance(batch, tuple):
        samples = list(batch)
        counted = as_tensors(samples)
        batch = Rows(samples, list)
    arguments = SplitArguments(
        TrainerStep(make),
        model,
        batch,
        parts=parts,
        ranks=ranks,
        equal=equal,
        loss=loss,
        timeout=timeout,
        counted=counted,
    )
    return check(Trial(arguments))


@dataclass(frozen=True)
class TrainerStep:
    """One optimizer step of the trainer that ``make`` returns."""

    make: MakeTrainer

    def __call__(self, model: nn.Module, batches: list[Any]) -> None:
        """Train on the batches."""
        trainer = self.make(model, len(batches))
        run_one_step(trainer, model, batches)


def as_tensors(samples: Sequence[Any]) -> dict[Any, Tensor]:
    """The columns of samples as padded tensors: what a loss may count in each sample.

    A text counts with its number of characters.
    """
    columns: dict[Any, list[Tensor]] = defaultdict(list)
    for sample in samples:
        fields = sample if isinstance(sample, Mapping) else {"sample": sample}
        if isinstance(sample, tuple):
            fields = dict(enumerate(sample))
        for name, value in fields.items():
            columns[name].append(_as_tensor(value))
    tensors = {}
    for name, values in columns.items():
        if len(values) < len(samples):
            continue
        # As collators of language models pad labels, which they know by this name.
        filler = -100 if "label" in str(name) else 0
        column = pad_sequence(values, True, filler)
        # One number per sample may be a length or a weight, and is no sequence.
        tensors[name] = column[:, 0] if column.shape[1] == 1 else column
        lengths = [len(value) for value in values]
        if len(set(lengths)) > 1:  # an id may be 0, as padding is
            tensors[f"len({name})"] = torch.tensor(lengths)
    return tensors


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, str):
        return torch.tensor([len(value)])
    try:
        return torch.as_tensor(value).reshape(-1)
    except (TypeError, ValueError, RuntimeError):  # an object counts as one
        return torch.ones(1)
