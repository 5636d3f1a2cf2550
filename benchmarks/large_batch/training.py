"""One training: a network on all of Fashion-MNIST, through the engine."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from scatterpar import ScatterOnceParallel
from scatterpar.recipe import gradual_warmup, linear_scaled_lr, weight_decay_groups
from scatterpar.train.data import load
from scatterpar.train.loop import Batches
from scatterpar.train.models import SmallCNN

EPOCHS = 20
BASE_BATCH = 256
BASE_LR = 0.05
MICRO_BATCH = 64  # what batch normalisation sees, whatever the batch
WEIGHT_DECAY = 1e-4


@dataclass(frozen=True)
class Recipe:
    """A row of the table: how large the batch is, and how its learning rate is found."""

    name: str
    batch: int
    scaled: bool = True
    warmup_epochs: int = 0
    epochs: int = EPOCHS
    base_lr: float = BASE_LR

    @property
    def rate(self) -> float:
        """The learning rate after the warm-up, if any."""
        if not self.scaled:
            return self.base_lr
        return linear_scaled_lr(self.base_lr, self.batch, BASE_BATCH)


def train(network: str, recipe: Recipe, seed: int) -> dict[str, object]:
    """Train from scratch; the training loss and the test error, in percent, of each epoch."""
    train_images, train_labels, test_images, test_labels = fashion_mnist()
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    groups = weight_decay_groups(model, WEIGHT_DECAY)
    optimizer = torch.optim.SGD(groups, lr=recipe.rate, momentum=0.9, nesterov=True)
    batches = Batches(len(train_images), recipe.batch, seed)
    scheduler = schedule(optimizer, recipe, batches.steps_per_epoch)
    criterion = nn.CrossEntropyLoss()
    losses, errors = [], []
    with ScatterOnceParallel(
        model, device_ids=["cpu"] * 2, micro_batch_size=MICRO_BATCH, buffers="mean"
    ) as engine:
        for _ in range(recipe.epochs):
            engine.train()
            total = 0.0
            for rows in batches.rest_of_epoch():
                optimizer.zero_grad()
                loss = engine.forward_backward(train_images[rows], train_labels[rows], criterion)
                optimizer.step()
                scheduler.step()
                total += loss.item() * len(rows)
            batches.consumed += len(train_images)
            losses.append(total / len(train_images))
            errors.append(test_error(model, test_images, test_labels))
    return {
        "recipe": recipe.name,
        "seed": seed,
        "updates": batches.steps_per_epoch * recipe.epochs,
        "rate": recipe.rate,
        "losses": losses,
        "errors": errors,
    }


def schedule(optimizer: torch.optim.Optimizer, recipe: Recipe, steps: int) -> LRScheduler:
    """A cosine to zero, update by update; before it a gradual warm-up from the base rate.

    Args:
        optimizer: with the recipe's rate.
        recipe: says whether to warm up, and how long the training is.
        steps: updates of an epoch.

    """
    warmup = recipe.warmup_epochs * steps
    left = recipe.epochs * steps - warmup
    cosine = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / left)))
    return gradual_warmup(optimizer, warmup, recipe.base_lr, cosine) if warmup else cosine


def tiny_cnn() -> nn.Module:
    """Two convolutions with strides and a hidden layer, all with batch normalisation."""
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


@cache
def fashion_mnist() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All images to train and to test on, standardised, with their labels."""
    data = load("fashion-mnist")
    train_images, test_images = (data.standardise(s.images) for s in (data.train, data.test))
    return train_images, data.train.labels, test_images, data.test.labels
