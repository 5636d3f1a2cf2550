"""One training: a network on Fashion-MNIST, through the engine.

::

    for each epoch:
        for rows in batches:
            optimizer.zero_grad()
            engine.forward_backward(images, labels, criterion)
            optimizer.step()
            scheduler.step()
        the training loss and the test error; a growing batch may double
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from scatterpar import ScatterOnceParallel
from scatterpar.embedded import read_split
from scatterpar.recipe import (
    gradual_warmup,
    linear_scaled_lr,
    weight_decay_groups,
)
from scatterpar.train import SmallCNN

# Debian's dataset-fashion-mnist
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
EPOCHS = 20
BASE_BATCH = 256
BASE_LR = 0.05
MICRO_BATCH = 64  # what batch normalisation sees, whatever the batch
WEIGHT_DECAY = 1e-4
SHIFT = 2  # pixels, at most, in each direction
HELD_OUT = 10_000  # of the images to train on; recipes are chosen with them


@dataclass(frozen=True)
class Recipe:
    """A row of the table: the size of the batch, and what decides its learning rate.

    Attributes:
        doubled_after: the epochs after which the batch doubles.
        augmented: images are shifted and mirrored at random.

    """

    name: str
    batch: int
    scaled: bool = True
    warmup_epochs: int = 0
    epochs: int = EPOCHS
    base_lr: float = BASE_LR
    doubled_after: Sequence[int] = ()
    augmented: bool = False

    @property
    def rate(self) -> float:
        """The learning rate after the warm-up, if any."""
        if not self.scaled:
            return self.base_lr
        return linear_scaled_lr(self.base_lr, self.batch, BASE_BATCH)


def train(network: str, recipe: Recipe, seed: int, held_out: int = 0) -> dict[str, Any]:
    """Train from scratch. Returns the training loss and the error, in percent, by epoch.

    Args:
        network: its name.
        recipe: how.
        seed: decides the first weights, the order of the images, and how they are
            varied.
        held_out: so many images are left out of training, and tested in place of the
            test images.

    """
    train_images, train_labels, test_images, test_labels = images_of(held_out)
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    groups = weight_decay_groups(model, WEIGHT_DECAY)
    optimizer = torch.optim.SGD(groups, lr=recipe.rate, momentum=0.9, nesterov=True)
    batches = Batches(len(train_images), recipe.batch, seed)
    scheduler = schedule(optimizer, recipe, batches)
    criterion = nn.CrossEntropyLoss()
    curves = Curves()
    engine = ScatterOnceParallel(
        model,
        device_ids=["cpu"] * 2,
        micro_batch_size=MICRO_BATCH,
        buffers="batch",
    )
    with engine:
        for epoch in range(recipe.epochs):
            engine.train()
            total = 0.0
            vary = variation(recipe, batches, epoch)
            for rows in batches.of_epoch():
                optimizer.zero_grad()
                images = vary(train_images, rows)
                loss = engine.forward_backward(images, train_labels[rows], criterion)
                optimizer.step()
                batches.consumed += len(rows)
                scheduler.step()
                curves.updates += 1
                total += loss.item() * len(rows)
            curves.losses.append(total / batches.rows)
            curves.errors.append(test_error(model, test_images, test_labels))
            if recipe.doubled_after:
                curves.batches.append(batches.batch)
            print(f"  epoch {epoch + 1}: {curves.last()}", flush=True)
            if epoch + 1 in recipe.doubled_after:
                batches.batch *= 2
                scheduler.step()  # its rate is scaled with the batch
    return {
        "recipe": recipe.name,
        "seed": seed,
        "updates": curves.updates,
        "rate": recipe.rate,
        **curves.measured(),
    }


@dataclass
class Curves:
    """Measurements of a training, by epoch; the last one only of a growing batch.

    Attributes:
        updates: of the optimizer, in all epochs together.
    """

    updates: int = 0
    losses: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def last(self) -> str:
        """The last epoch in words."""
        batch = f", batch {self.batches[-1]:,}" if self.batches else ""
        return f"{self.errors[-1]:.2f} %{batch}"

    def measured(self) -> dict[str, list[float]]:
        """The curves that are not empty."""
        curves = {
            "losses": self.losses,
            "errors": self.errors,
            "batches": self.batches,
        }
        return {name: curve for name, curve in curves.items() if curve}


@dataclass
class Batches:
    """The order in which rows are used, by seed and epoch, and the position in it.

    Attributes:
        rows: of an epoch.
        batch: rows of a step; may change between epochs.
        consumed: the number of rows used so far.
    """

    rows: int
    batch: int
    seed: int
    consumed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches of an epoch, including a smaller last one."""
        return -(-self.rows // self.batch)

    def of_epoch(self) -> Iterator[Tensor]:
        """Yield the row numbers of each batch of the next epoch."""
        epoch = self.consumed // self.rows
        order = torch.randperm(
            self.rows, generator=generator_of(f"{self.seed} {epoch}")
        )
        yield from order.split(self.batch)


def generator_of(words: str) -> torch.Generator:
    """A generator that these words alone decide."""
    number = random.Random(words).getrandbits(32)
    return torch.Generator().manual_seed(number)


def schedule(
    optimizer: torch.optim.Optimizer, recipe: Recipe, batches: Batches
) -> LRScheduler:
    """The recipe's learning rate, update by update."""
    if recipe.doubled_after:
        return growing_schedule(optimizer, batches, recipe)
    return fixed_schedule(optimizer, recipe, batches.steps_per_epoch)


def growing_schedule(
    optimizer: torch.optim.Optimizer, batches: Batches, recipe: Recipe
) -> LRScheduler:
    """A gradual warm-up, then a cosine to zero, by rows used; scaled with the batch."""

    def factor(_: int) -> float:
        scale = batches.batch / BASE_BATCH
        epochs = batches.consumed / batches.rows
        if epochs < recipe.warmup_epochs:
            step = batches.batch / batches.rows
            return scale * (epochs + step) / (recipe.warmup_epochs + step)
        length = recipe.epochs - recipe.warmup_epochs
        return scale * cosine((epochs - recipe.warmup_epochs) / length)

    return LambdaLR(optimizer, factor)


def cosine(part: float) -> float:
    """From one to zero, as ``part`` of the training goes from zero to one."""
    return 0.5 * (1 + math.cos(math.pi * part))


def variation(
    recipe: Recipe, batches: Batches, epoch: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of images and rows: the images of these rows, varied or as they are."""
    if recipe.augmented:
        return Variation(batches.rows, batches.seed, epoch)
    return Tensor.__getitem__


class Variation:
    """Shifts images by up to ``SHIFT`` pixels and mirrors half of them, by epoch.

    A variation depends on the seed, the epoch and the image, not on the image's batch.
    """

    def __init__(self, images: int, seed: int, epoch: int) -> None:
        generator = generator_of(f"variation {seed} {epoch}")
        self.offsets = torch.randint(0, 2 * SHIFT + 1, (2, images), generator=generator)
        self.mirrored = torch.rand(images, generator=generator) < 0.5

    def __call__(self, images: Tensor, rows: Tensor) -> Tensor:
        """The images of these rows, varied."""
        background = images[0].min().item()
        padded = nn.functional.pad(images[rows], [SHIFT] * 4, value=background)
        side = images.shape[-1]
        windows = padded.unfold(2, side, 1).unfold(3, side, 1)
        down, right = self.offsets[:, rows]
        shifted = windows[torch.arange(len(rows)), :, down, right]
        mirrored = self.mirrored[rows].view(-1, 1, 1, 1)
        return torch.where(mirrored, shifted.flip(-1), shifted)


def fixed_schedule(
    optimizer: torch.optim.Optimizer, recipe: Recipe, steps: int
) -> LRScheduler:
    """A cosine to zero, update by update, after a gradual warm-up from the base rate.

    Args:
        optimizer: with the recipe's rate.
        recipe: says whether to warm up, and how long the training is.
        steps: updates of an epoch.

    """
    warmup = recipe.warmup_epochs * steps
    length = recipe.epochs * steps - warmup
    scheduler = LambdaLR(optimizer, lambda step: cosine(step / length))
    if not warmup:
        return scheduler
    return gradual_warmup(optimizer, warmup, recipe.base_lr, scheduler)


def tiny_cnn() -> nn.Module:
    """Two convolutions with strides and a hidden layer, all with batch
    normalisation.
    """
    return nn.Sequential(
        *_convolution(1, 8, size=4, stride=4),
        *_convolution(8, 16, size=3, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64, bias=False),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def _convolution(
    channels_in: int, channels_out: int, size: int, stride: int, padding: int = 0
) -> list[nn.Module]:
    return [
        nn.Conv2d(channels_in, channels_out, size, stride, padding, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    ]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "cnn": lambda: SmallCNN((1, 28, 28), num_classes=10),
    "tiny": tiny_cnn,
}


@torch.no_grad()
def test_error(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of wrong answers, in percent."""
    model.eval()
    num_right = 0
    for rows, truth in zip(images.split(1000), labels.split(1000), strict=True):
        answers = model(rows).argmax(1)
        num_right += int((answers == truth).sum())
    return 100 * (1 - num_right / len(images))


def images_of(held_out: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images to train on with their labels, and to test on with theirs.

    The latter are the test set, or the last ``held_out`` of those to train on.
    """
    images, labels, test_images, test_labels = fashion_mnist()
    if not held_out:
        return images, labels, test_images, test_labels
    end = len(images) - held_out
    return images[:end], labels[:end], images[end:], labels[end:]


@cache
def fashion_mnist() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All images to train and to test on, standardised, with their labels."""
    train_images, train_labels = read_split(FASHION_MNIST, "train")
    test_images, test_labels = read_split(FASHION_MNIST, "t10k")
    std, mean = torch.std_mean(train_images.double(), correction=0)
    mean = mean.float()
    std = std.float()
    images = (train_images - mean) / std
    return images, train_labels, (test_images - mean) / std, test_labels
