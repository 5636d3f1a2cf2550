"""One training: a network on Fashion-MNIST, through the engine."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from scatterpar import ScatterOnceParallel
from scatterpar.recipe import (
    NoiseScale,
    gradual_warmup,
    linear_scaled_lr,
    weight_decay_groups,
)
from scatterpar.train.data import read_split
from scatterpar.train.models import OnPixels, SmallCNN

# Debian's dataset-fashion-mnist
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
EPOCHS = 20
BASE_BATCH = 256
BASE_LR = 0.05
MICRO_BATCH = 64  # what batch normalisation sees, whatever the batch
WEIGHT_DECAY = 1e-4
SHIFT = 2  # pixels, at most, in each direction
HELD_OUT = 10_000  # the last images to train on, where recipes are chosen


@dataclass(frozen=True)
class Recipe:
    """A row of the table: how large the batch is, and how its learning rate is found.

    Attributes:
        grows: the batch starts at ``batch`` and follows the noise scale, as ``--batch
            auto`` does.
        augmented: images are shifted and mirrored at random.
        noise: the gradient's noise scale is measured.

    """

    name: str
    batch: int
    scaled: bool = True
    warmup_epochs: int = 0
    epochs: int = EPOCHS
    base_lr: float = BASE_LR
    grows: bool = False
    augmented: bool = False
    noise: bool = False

    @property
    def rate(self) -> float:
        """The learning rate after the warm-up, if any."""
        if not self.scaled:
            return self.base_lr
        return linear_scaled_lr(self.base_lr, self.batch, BASE_BATCH)


def train(
    network: str, recipe: Recipe, seed: int, held_out: int = 0
) -> dict[str, object]:
    """Train from scratch; the training loss and the error, in percent, of each epoch.

    Args:
        network: its name.
        recipe: how.
        seed: decides the first weights, the order of the images, and how they are
            varied.
        held_out: so many images are kept from training, and tested in place of the test
            images.

    """
    train_images, train_labels, test_images, test_labels = images_of(held_out)
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    groups = weight_decay_groups(model, WEIGHT_DECAY)
    optimizer = torch.optim.SGD(groups, lr=recipe.rate, momentum=0.9, nesterov=True)
    batches = Batches(len(train_images), recipe.batch, seed)
    if recipe.grows:
        scheduler = growing_schedule(optimizer, batches, recipe)
    else:
        scheduler = schedule(optimizer, recipe, batches.steps_per_epoch)
    noise, measured = NoiseScale(), recipe.noise or recipe.grows
    criterion = nn.CrossEntropyLoss()
    curves: dict[str, list[float]] = {
        "losses": [],
        "errors": [],
        "batches": [],
        "noise_scales": [],
    }
    updates = 0
    with ScatterOnceParallel(
        model,
        device_ids=["cpu"] * 2,
        micro_batch_size=MICRO_BATCH,
        buffers="batch",
        measure_noise=measured,
    ) as engine:
        for epoch in range(recipe.epochs):
            engine.train()
            total = 0.0
            vary = (
                Variation(batches.rows, seed, epoch)
                if recipe.augmented
                else Tensor.__getitem__
            )
            noise.decay = 1 - 1 / max(20, batches.steps_per_epoch)
            for rows in batches.of_epoch():
                optimizer.zero_grad()
                images = vary(train_images, rows)
                loss = engine.forward_backward(images, train_labels[rows], criterion)
                optimizer.step()
                batches.consumed += len(rows)
                scheduler.step()
                updates += 1
                total += loss.item() * len(rows)
                if measured:
                    noise.update(engine.last_step)
            curves["losses"].append(total / batches.rows)
            curves["errors"].append(test_error(model, test_images, test_labels))
            if measured:
                curves["batches"].append(batches.batch)
                curves["noise_scales"].append(noise.scale)
            told = (
                f"noise scale {noise.scale:,.0f}, batch {batches.batch:,}"
                if measured
                else ""
            )
            print(
                f"  epoch {epoch + 1}: {curves['errors'][-1]:.2f} % {told}", flush=True
            )
            if recipe.grows:
                twice = 2 * batches.batch
                if 8 * twice <= batches.rows and twice <= noise.scale < math.inf:
                    batches.batch = twice
                scheduler.step()  # its rate is scaled with the batch
    return {
        "recipe": recipe.name,
        "seed": seed,
        "updates": updates,
        "rate": recipe.rate,
        **{name: curve for name, curve in curves.items() if curve},
    }


@dataclass
class Batches:
    """The order in which rows are used, which depends on the seed and the epoch; the
    position.

    ``consumed`` is the number of rows used so far. Between epochs ``batch`` may change.
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
        number = random.Random(f"{self.seed} {self.consumed // self.rows}").getrandbits(
            32
        )
        generator = torch.Generator().manual_seed(number)
        yield from torch.randperm(self.rows, generator=generator).split(self.batch)


def growing_schedule(
    optimizer: torch.optim.Optimizer, batches: Batches, recipe: Recipe
) -> LRScheduler:
    """A gradual warm-up, then a cosine to zero, by rows used; scaled with the batch."""

    def factor(_: int) -> float:
        scale, done = batches.batch / BASE_BATCH, batches.consumed / batches.rows
        if done < recipe.warmup_epochs:
            step = batches.batch / batches.rows
            return scale * (done + step) / (recipe.warmup_epochs + step)
        part = (done - recipe.warmup_epochs) / (recipe.epochs - recipe.warmup_epochs)
        return scale * 0.5 * (1 + math.cos(math.pi * part))

    return LambdaLR(optimizer, factor)


class Variation:
    """Shifts images by up to ``SHIFT`` pixels and mirrors half of them; new in each
    epoch.

    It depends on the seed, the epoch and the image, not on the batch that the image is
    in.
    """

    def __init__(self, images: int, seed: int, epoch: int) -> None:
        number = random.Random(f"variation {seed} {epoch}").getrandbits(32)
        generator = torch.Generator().manual_seed(number)
        self.offsets = torch.randint(0, 2 * SHIFT + 1, (2, images), generator=generator)
        self.mirrored = torch.rand(images, generator=generator) < 0.5

    def __call__(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the rows of the images, varied."""
        side = images.shape[-1]
        padded = nn.functional.pad(
            images[rows], [SHIFT] * 4, value=float(images[0].min())
        )
        windows = padded.unfold(2, side, 1).unfold(3, side, 1)
        down, right = self.offsets[:, rows]
        found = windows[torch.arange(len(rows)), :, down, right]
        return torch.where(
            self.mirrored[rows][:, None, None, None], found.flip(-1), found
        )


def schedule(
    optimizer: torch.optim.Optimizer, recipe: Recipe, steps: int
) -> LRScheduler:
    """A cosine to zero, update by update; before it a gradual warm-up from the base
    rate.

    Args:
        optimizer: with the recipe's rate.
        recipe: says whether to warm up, and how long the training is.
        steps: updates of an epoch.

    """
    warmup = recipe.warmup_epochs * steps
    left = recipe.epochs * steps - warmup
    cosine = LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / left))
    )
    return (
        gradual_warmup(optimizer, warmup, recipe.base_lr, cosine) if warmup else cosine
    )


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
    "cnn": lambda: SmallCNN((1, 28, 28), classes=10),
    "tiny": tiny_cnn,
}


@torch.no_grad()
def test_error(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of wrong answers, in percent."""
    model.eval()
    right = sum(
        int((model(some).argmax(1) == truth).sum())
        for some, truth in zip(images.split(1000), labels.split(1000), strict=True)
    )
    return 100 * (1 - right / len(images))


def images_of(held_out: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images to train and to test on, with their labels; these are the test set, or
    held out.
    """
    train_images, train_labels, test_images, test_labels = fashion_mnist()
    if not held_out:
        return train_images, train_labels, test_images, test_labels
    kept = len(train_images) - held_out
    return (
        train_images[:kept],
        train_labels[:kept],
        train_images[kept:],
        train_labels[kept:],
    )


@cache
def fashion_mnist() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All images to train and to test on, standardised, with their labels."""
    train, test = (read_split(FASHION_MNIST, part) for part in ("train", "t10k"))
    (train_images, train_labels), (test_images, test_labels) = (
        train.tensors,
        test.tensors,
    )
    std, mean = torch.std_mean(train_images.double(), correction=0)
    standardise = OnPixels(nn.Identity(), mean, std)
    return (
        standardise(train_images),
        train_labels,
        standardise(test_images),
        test_labels,
    )
