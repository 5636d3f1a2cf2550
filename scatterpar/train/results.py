"""What a test counts, and what a run says of its results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scatterpar.report import StepReport
from scatterpar.train.data_parts import TEST
from scatterpar.train.processes import Processes

TOP_5_CLASSES = 10  # with fewer, top-5 accuracy says little
CONFUSION_CLASSES = 1000  # with more, the matrix would take more than 8 MB
_SHOWN_CLASSES = 20
COUNTED_CLASSES = 20  # with more, a confusion matrix is too wide for its numbers
_MISTAKES = 24  # that are kept to be drawn


class Mistake(NamedTuple):
    """An image whose class was not predicted, and the score of the predicted one."""

    score: float
    true: int
    predicted: int
    image: Tensor


class Tally:
    """Sums over the images of a test.

    Attributes:
        part: what was tested, such as `TEST`.
        mistakes: the mistakes with the highest scores, the highest first.
        confusion: the number of images by class and by the class that the model chose;
            None for very many classes.
    """

    def __init__(self, classes: int, part: str = TEST) -> None:
        self.part = part
        self.confusion: Tensor | None = None
        if classes <= CONFUSION_CLASSES:
            self.confusion = torch.zeros(classes, classes, dtype=torch.int64)
        self.mistakes: list[Mistake] = []
        # Images, their loss, and those whose class has the highest score, or one of the
        # five highest ones.
        self._sums = torch.zeros(4, dtype=torch.float64)

    def add(self, scores: Tensor, labels: Tensor, images: Tensor) -> None:
        """Add the images of a batch, with their scores and labels."""
        best = scores.topk(min(5, scores.shape[1])).indices
        predicted = best[:, 0]
        in_top5 = best == labels[:, None]
        is_right = in_top5[:, 0]
        loss = F.cross_entropy(scores, labels, reduction="sum")
        sums = [len(labels), loss, is_right.sum(), in_top5.sum()]
        self._sums += torch.tensor(sums, dtype=torch.float64)
        if self.confusion is not None:
            places = (labels, predicted)
            self.confusion.index_put_(places, torch.tensor(1), accumulate=True)
        confidence = scores.softmax(1).amax(1).masked_fill(is_right, 0)
        wrong = min(_MISTAKES, int((~is_right).sum()))
        values, rows = confidence.topk(wrong)
        classes = labels[rows].tolist(), predicted[rows].tolist()
        # The images are a copy, because the batch is freed.
        self.mistakes += map(Mistake, values.tolist(), *classes, images[rows])
        self._drop_smaller_mistakes()

    def add_other_processes(self, processes: Processes) -> None:
        """Add the images of the other processes, each of which calls this."""
        tallies = processes.gathered(self)
        del tallies[processes.rank]
        for tally in tallies:
            self._sums += tally._sums
            self.mistakes += tally.mistakes
            if self.confusion is not None:
                self.confusion += tally.confusion
        self._drop_smaller_mistakes()

    def _drop_smaller_mistakes(self) -> None:
        self.mistakes.sort(key=lambda mistake: -mistake.score)
        del self.mistakes[_MISTAKES:]

    @property
    def images(self) -> int:
        """The number of images."""
        return int(self._sums[0])

    @property
    def loss(self) -> float:
        """The mean loss of an image."""
        return self._mean(1)

    @property
    def accuracy(self) -> float:
        """The part of the images whose class was chosen."""
        return self._mean(2)

    @property
    def accuracy_top5(self) -> float:
        """The part of the images whose class has one of the five highest scores."""
        return self._mean(3)

    def _mean(self, column: int) -> float:
        return float(self._sums[column] / max(1, self.images))


def accuracy_per_class(
    confusion: Tensor, class_names: Sequence[str]
) -> dict[str, float | None]:
    """Return the accuracy of each class, the lowest first; None, at the end, of classes
    that have no images.
    """
    measured = confusion.diagonal() / confusion.sum(1)  # NaN without images
    accuracies: dict[str, float | None] = {}
    for row in measured.argsort(stable=True).tolist():
        accuracy = float(measured[row])
        accuracies[class_names[row]] = None if math.isnan(accuracy) else accuracy
    return accuracies


def accuracies_in_words(accuracies: Mapping[str, float | None]) -> str:
    """Return a line with the accuracy of each class; of very many, the lowest ones."""
    texts = []
    for name, accuracy in accuracies.items():
        texts.append(f"{name} {'-' if accuracy is None else f'{accuracy:.1%}'}")
    title = "accuracy per class"
    if len(texts) > _SHOWN_CLASSES:
        title = f"lowest accuracies of {len(texts):,} classes"
    return f"{title}: {', '.join(texts[:_SHOWN_CLASSES])}"


def traffic(report: StepReport) -> str:
    """Return how many bytes a step copied between memories, beside `nn.DataParallel`;
    nothing if both would copy as many.
    """
    calls = max(len(share.micro_batches) for share in report.plan.shares)
    # Rows are copied once. nn.DataParallel is called for each sub-step, and each call
    # broadcasts the whole model and reduces all gradients again.
    rows = report.bytes["scatter"]
    per_call = report.bytes["replicate"] + report.bytes["reduce"]
    if calls == 1 or not per_call:
        return ""
    return (
        f"copied per step: {rows + per_call:,} bytes; nn.DataParallel, called for each "
        f"of {calls} sub-steps, copies {rows + calls * per_call:,}"
    )
