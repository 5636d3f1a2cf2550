"""Tasks that docs/recipes.md describes in a sentence give plain torch's gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness.oracle import build, randint, randn
from harness.pages import Checked
from torch import nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    one_hot,
)

IGNORED = -100  # the class of pixels that are not labelled


def network(columns):
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, columns))


def dice_and_pixels(scores, targets):
    """A Dice loss per image, and a cross entropy per labelled pixel."""
    masks = targets["masks"]
    labelled = (masks != IGNORED)[:, None]
    filled = scores.softmax(1) * labelled
    classes = masks.where(masks != IGNORED, 0)
    wanted = one_hot(classes, scores.shape[1]).movedim(-1, 1) * labelled
    overlap, area = (filled * wanted).sum((2, 3)), (filled + wanted).sum((2, 3))
    dice = (1 - (2 * overlap + 1) / (area + 1)).mean(1)
    pixels = cross_entropy(scores, masks, ignore_index=IGNORED, reduction="sum")
    return dice.sum() / targets["images"] + pixels / targets["pixels"]


def test_dice_plus_cross_entropy_with_counts(devices):
    masks = randint(3, 9, 6, 6)
    masks[2], masks[5, :4] = IGNORED, IGNORED  # images without a labelled pixel
    targets = {
        "masks": masks,
        "images": torch.tensor(len(masks)),
        "pixels": (masks != IGNORED).sum(),
    }
    model = build(lambda: nn.Conv2d(1, 3, 3, padding=1))
    with Checked(model, 2, devices(2)) as engine:
        engine.forward_backward(
            randn(9, 1, 6, 6), targets, dice_and_pixels, reduction="sum"
        )
        assert engine.compared == 1


def fooled(made, wanted, critic):
    return binary_cross_entropy_with_logits(critic(made), wanted)


@pytest.mark.draws
def test_gan_of_three_backward_passes(devices):
    generator, critic = build(lambda: network(4)), build(lambda: network(1))
    noise, images = randn(9, 4), randn(9, 4, seed=2)
    real = torch.ones(9, 1, dtype=images.dtype)
    with (
        Checked(critic, 2, devices(2)) as of_critic,
        Checked(generator, 2, devices(2)) as of_generator,
    ):
        of_critic.forward_backward(images, real, binary_cross_entropy_with_logits)
        with torch.no_grad():
            made = of_generator(noise)
        of_critic.forward_backward(made, 0 * real, binary_cross_entropy_with_logits)
        critic.zero_grad()
        of_generator.forward_backward(noise, real, partial(fooled, critic=critic))
        assert of_critic.compared == 2
        assert of_generator.compared == 1
