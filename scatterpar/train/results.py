"""What a test counts, and what a run says of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scatterpar.report import StepReport
from scatterpar.tables import as_text
from scatterpar.train.processes import Processes

TOP_5_CLASSES = 10  # with fewer, top-5 accuracy says little
CONFUSION_CLASSES = 1000  # with more, the matrix would take more than 8 MB
_SHOWN_CLASSES = 20
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
        mistakes: the mistakes with the highest scores, the highest first.
        confusion: the number of images by class and by the class that the model chose;
            None for very many classes.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.confusion: Tensor | None = None
        if classes <= CONFUSION_CLASSES:
            self.confusion = torch.zeros(classes, classes, dtype=torch.int64)
        self.mistakes: list[Mistake] = []
        self.images = 0
        self._sums = torch.zeros(3, dtype=torch.float64)  # loss, right, right in top 5

    def add(self, scores: Tensor, labels: Tensor, images: Tensor) -> None:
        """Add the images of a batch, with their scores and labels."""
        chosen = scores.topk(min(5, self.classes)).indices
        right = chosen == labels[:, None]
        loss = F.cross_entropy(scores, labels, reduction="sum")
        self._sums += torch.stack([loss.double(), right[:, 0].sum(), right.sum()])
        self.images += len(labels)
        if self.confusion is not None:
            places = labels * self.classes + chosen[:, 0]
            counts = torch.bincount(places, minlength=self.classes**2)
            self.confusion += counts.view(self.classes, self.classes)
        confidence = scores.softmax(1).amax(1)
        confidence[right[:, 0]] = 0
        for row in confidence.topk(min(_MISTAKES, len(labels))).indices.tolist():
            if not right[row, 0]:
                mistake = Mistake(
                    float(confidence[row]),
                    int(labels[row]),
                    int(chosen[row, 0]),
                    images[row].clone(),  # the batch is freed
                )
                self.mistakes.append(mistake)
        self._drop_smaller_mistakes()

    def add_other_processes(
        self, processes: Processes, image_shape: Sequence[int]
    ) -> None:
        """Add the images of the other processes, each of which calls this."""
        if processes.size == 1:
            return
        self._sums = processes.gathered(self._sums[None]).sum(0)
        self.images = int(processes.gathered(torch.tensor([self.images])).sum())
        if self.confusion is not None:
            self.confusion = processes.gathered(self.confusion[None]).sum(0)
        numbers = torch.tensor([mistake[:3] for mistake in self.mistakes]).view(-1, 3)
        images = torch.empty(len(self.mistakes), *image_shape, dtype=torch.uint8)
        for image, mistake in zip(images, self.mistakes, strict=True):
            image.copy_(mistake.image)
        pictures = processes.gathered(images)
        self.mistakes = []
        for row, image in zip(processes.gathered(numbers), pictures, strict=True):
            score, true, predicted = row.tolist()
            self.mistakes.append(Mistake(score, int(true), int(predicted), image))
        self._drop_smaller_mistakes()

    def _drop_smaller_mistakes(self) -> None:
        self.mistakes.sort(key=lambda mistake: -mistake.score)
        del self.mistakes[_MISTAKES:]

    @property
    def loss(self) -> float:
        """The mean loss of an image."""
        return self._mean(0)

    @property
    def accuracy(self) -> float:
        """The part of the images whose class was chosen."""
        return self._mean(1)

    @property
    def accuracy_top5(self) -> float:
        """The part of the images whose class has one of the five highest scores."""
        return self._mean(2)

    def _mean(self, number: int) -> float:
        return float(self._sums[number]) / max(1, self.images)


def accuracy_per_class(
    confusion: Tensor, class_names: Sequence[str]
) -> dict[str, float | None]:
    """Return the accuracy of each class, the lowest first; None, at the end, of classes
    that have no images.
    """
    images = confusion.sum(1)
    right = confusion.diagonal()
    accuracies: dict[str, float | None] = {}
    for row in (right / images).nan_to_num(nan=2.0).argsort(stable=True).tolist():
        has_images = bool(images[row])
        accuracy = float(right[row] / images[row]) if has_images else None
        accuracies[class_names[row]] = accuracy
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


# The copies of a step, as `StepReport` calls them, and in words.
_PHASES = {
    "scatter": "scatter of the batch",
    "replicate": "broadcast of the model",
    "reduce": "reduction of the gradients",
}


def sub_steps(report: StepReport) -> int:
    """Return the largest number of sub-steps that a replica made."""
    return max(len(share.micro_batches) for share in report.plan.shares)


def traffic(report: StepReport) -> str:
    """Return a table of what a step copied between memories, beside `nn.DataParallel`.

    `nn.DataParallel` is called once per sub-step. Each call scatters its rows, and
    broadcasts the whole model and reduces all gradients again.
    """
    calls = sub_steps(report)
    title = f"nn.DataParallel, {calls} sub-steps"
    table: list[tuple[str, ...]] = [("copied per step, bytes", "scatterpar", title)]
    total = 0
    total_of_calls = 0
    for phase, words in _PHASES.items():
        size = report.bytes[phase]
        # The rows of all calls are the batch.
        size_per_call = size // calls if phase == "scatter" else size
        happened = report.messages[phase] > 0
        once = f"{int(happened)} x {size:,}"
        repeated = f"{calls * happened} x {size_per_call:,}"
        table.append((words, once, repeated))
        total += size
        total_of_calls += calls * size_per_call
    table.append(("in all", f"{total:,}", f"{total_of_calls:,}"))
    return as_text(table)
