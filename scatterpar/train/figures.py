"""The pictures of a run: its curves, its confusion matrix, and its first batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from scatterpar.train.records import Metrics, written
from scatterpar.train.results import Mistake

_TILES = 48  # images of a mosaic
_TILES_PER_LINE = 8
_TILE_INCHES = 1.5
_GAP = 0.06  # between tiles, of an image's width
_NAME_HEIGHT = 0.14  # of the line below an image
_NAMED_CLASSES = 40  # of a confusion matrix; with more, names would overlap
_COUNTED_CLASSES = 20  # with more, the numbers in its cells would overlap
_LONGEST_NAME = 16  # letters below an image
_DPI = 120


def _save(figure: Figure, path: Path) -> None:
    with written(path) as file, warnings.catch_warnings():
        # Letters that matplotlib's font lacks are drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(file, dpi=_DPI)


def draw_curves(
    metrics: Metrics, path: Path, *, images: int, tested: str, has_top5: bool
) -> None:
    """Draw loss and accuracy over epochs.

    Args:
        metrics: the records of the run.
        path: the file.
        images: the number of images of an epoch.
        tested: the part that each epoch was tested on, as in the names of records.
        has_top5: whether top-5 accuracy is drawn.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    steps = metrics.of_kind("step")
    consumed = accumulate(step["images"] for step in steps)
    epochs_of_steps = [number / images for number in consumed]
    loss.plot(epochs_of_steps, _heights(steps, "loss"), label="training loss")
    epochs = metrics.of_kind("epoch")
    numbers = [record["epoch"] for record in epochs]
    heights = _heights(epochs, f"{tested}_loss")
    loss.plot(numbers, heights, "o-", label=f"{tested} loss", markersize=4)
    loss.set(title="Loss", xlabel="Epoch")
    heights = _heights(epochs, f"{tested}_accuracy")
    accuracy.plot(numbers, heights, "o-", label="top-1 accuracy", markersize=4)
    if has_top5:
        heights = _heights(epochs, f"{tested}_accuracy_top5")
        accuracy.plot(numbers, heights, "o:", label="top-5 accuracy", markersize=4)
    accuracy.set(title=f"{tested.capitalize()} accuracy", xlabel="Epoch")
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (loss, accuracy):
        # Whole epochs, from the start on.
        axes.set_xlim(0, max([1, *numbers, *epochs_of_steps]) * 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    _save(figure, path)


def _heights(records: Sequence[dict[str, Any]], name: str) -> list[float]:
    values = [record[name] for record in records]
    return [math.nan if value is None else value for value in values]


def draw_confusion(
    confusion: Tensor, class_names: Sequence[str], title: str, path: Path
) -> None:
    """Draw which classes were predicted: a row per true class, with its images."""
    classes = len(class_names)
    side = min(4 + 0.35 * classes, 14)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    per_row = confusion.sum(1, keepdim=True).clamp(min=1)
    parts = confusion / per_row
    image = axes.imshow(parts.numpy(), cmap="Blues", vmin=0, vmax=1)
    bar = figure.colorbar(image, shrink=0.8)
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(title=title, xlabel="predicted", ylabel="true")
    if classes <= _NAMED_CLASSES:
        places = range(classes)
        names = [_escaped(name) for name in class_names]
        axes.set_xticks(places, names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(places, names)
    if classes <= _COUNTED_CLASSES:
        for row in range(classes):
            for column in range(classes):
                _write_count(axes, confusion, parts, row, column)
    _save(figure, path)


def _write_count(
    axes: Any, confusion: Tensor, parts: Tensor, row: int, column: int
) -> None:
    """Write the number of images into a cell, unless it is zero."""
    number = int(confusion[row, column])
    if number:
        colour = "white" if parts[row, column] > 0.5 else "black"
        axes.text(
            column, row, number, ha="center", va="center", color=colour, fontsize=8
        )


def draw_first_batch(
    images: Tensor, labels: Tensor, class_names: Sequence[str], path: Path
) -> None:
    """Draw the first images of a batch as the network sees them, above their
    classes.
    """
    names = _names_of(labels[:_TILES], class_names)
    _draw_images(list(images[:_TILES]), names, path)


def draw_mistakes(
    mistakes: Sequence[Mistake], class_names: Sequence[str], path: Path
) -> None:
    """Draw the images whose wrong class has the highest scores."""
    texts = []
    for mistake in mistakes:
        true = _short(class_names[mistake.true])
        predicted = _short(class_names[mistake.predicted])
        texts.append(f"true {true}\npredicted {predicted} {mistake.score:.0%}")
    _draw_images([mistake.image for mistake in mistakes], texts, path)


def _draw_images(images: Sequence[Tensor], texts: Sequence[str], path: Path) -> None:
    """Draw images above texts.

    All images are in one pair of axes, because 48 pairs take twice as long to draw. An
    image is 1 wide, and its tile is larger by a gap and the lines of its text.
    """
    lines_of_text = 1 + texts[0].count("\n")
    columns = _TILES_PER_LINE // lines_of_text  # longer texts need wider tiles
    columns = min(columns, len(images))
    lines = -(-len(images) // columns)
    height = images[0].shape[-2] / images[0].shape[-1]
    tile_width = 1 + _GAP
    tile_height = height + _GAP + _NAME_HEIGHT
    width = _TILE_INCHES * lines_of_text
    size = width * columns * tile_width, width * lines * tile_height
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for number, (image, text) in enumerate(zip(images, texts, strict=True)):
        line, column = divmod(number, columns)
        left = column * tile_width
        bottom = -line * tile_height - height
        pixels = image.cpu().permute(1, 2, 0)
        axes.imshow(
            pixels.squeeze(2).numpy(),  # of one channel
            cmap="gray",
            vmin=0,
            vmax=255,
            extent=(left, left + 1, bottom, bottom + height),
        )
        style: dict[str, Any] = {
            "ha": "center",
            "va": "top",
            "fontsize": 8,
            "parse_math": False,
        }
        axes.text(left + 0.5, bottom - _GAP / 2, text, **style)
    axes.set_axis_off()
    axes.set_xlim(-_GAP, columns * tile_width)
    axes.set_ylim(-lines * tile_height, _GAP)
    _save(figure, path)


def _names_of(labels: Tensor, class_names: Sequence[str]) -> list[str]:
    """Return the name of each image's class, or the names of both if it is mixed."""
    if labels.ndim == 1:
        return [_short(class_names[label]) for label in labels.tolist()]
    names = []
    for parts in labels:
        mixed = [_short(class_names[label]) for label in parts.nonzero().flatten()]
        names.append(" + ".join(mixed))
    return names


def _short(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    return name[: _LONGEST_NAME - 1] + "…"


def _escaped(name: str) -> str:
    """Return a name that matplotlib does not read as a formula."""
    return name.replace("$", r"\$")
