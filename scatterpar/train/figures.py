"""The pictures of a run: its curves, its confusion matrix, and its first batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from scatterpar.train.records import Metrics, written
from scatterpar.train.results import COUNTED_CLASSES, Mistake

_TILES = 48  # images of a mosaic
_TILES_PER_LINE = 8
_TILE_INCHES = 1.5
_NAMED_CLASSES = 40  # of a confusion matrix; with more, names would overlap
_DPI = 120


def _save(figure: Figure, path: Path) -> None:
    with written(path) as file, warnings.catch_warnings():
        # Letters that matplotlib's font lacks are drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(file, dpi=_DPI)


def draw_curves(metrics: Metrics, path: Path, *, images: int, tested: str) -> None:
    """Draw loss and accuracy over epochs.

    Args:
        metrics: the records of the run.
        path: the file.
        images: the number of images of an epoch.
        tested: the part that each epoch was tested on, as in the names of records.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    steps = metrics.of_kind("step")
    epochs = metrics.of_kind("epoch")
    # Steps differ in their images, and so in their part of an epoch.
    epochs_of_steps = _values(steps, "images").cumsum() / images
    loss.plot(epochs_of_steps, _values(steps, "loss"), label="training loss")
    for axes, measured in ((loss, "loss"), (accuracy, "accuracy")):
        name = f"{tested}_{measured}"
        values = _values(epochs, name)
        label = name.replace("_", " ")
        axes.plot(_values(epochs, "epoch"), values, "o-", label=label, markersize=4)
        axes.set(title=measured.capitalize(), xlabel="Epoch", xlim=(0, None))
        # Whole epochs.
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))
    _save(figure, path)


def _values(records: Sequence[dict[str, Any]], name: str) -> Any:
    # A null, which JSON has for NaN, becomes NaN again.
    return np.array([record[name] for record in records], dtype=float)


def draw_confusion(
    confusion: Tensor, class_names: Sequence[str], title: str, path: Path
) -> None:
    """Draw which classes were predicted: a row per true class, with its images."""
    classes = len(class_names)
    side = min(4 + 0.35 * classes, 14)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    images_of_class = confusion.sum(1, keepdim=True)
    parts = confusion / images_of_class.clamp(min=1)
    cells = axes.imshow(parts.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(cells, shrink=0.8, format=PercentFormatter(1.0))
    axes.set(title=title, xlabel="predicted", ylabel="true")
    if classes <= _NAMED_CLASSES:
        _name_classes(axes, class_names)
    if classes <= COUNTED_CLASSES:
        style: dict[str, Any] = {"ha": "center", "va": "center"}
        for row, column in confusion.nonzero().tolist():
            number = confusion[row, column].item()
            is_dark = parts[row, column] > 0.5
            colour = "white" if is_dark else "black"
            axes.text(column, row, str(number), color=colour, **style)
    _save(figure, path)


def _name_classes(axes: Any, class_names: Sequence[str]) -> None:
    """Write the names of the classes below the columns and beside the rows."""
    places = range(len(class_names))
    # Names with dollars are no formulas.
    style: dict[str, Any] = {"parse_math": False, "rotation_mode": "anchor"}
    axes.set_xticks(places, class_names, rotation=45, ha="right", **style)
    axes.set_yticks(places, class_names, **style)


def draw_first_batch(
    images: Tensor, labels: Tensor, class_names: Sequence[str], path: Path
) -> None:
    """Draw the first images of a batch as the network sees them, each with its class,
    or that of its larger part if it is mixed.
    """
    if labels.ndim == 2:
        labels = labels.argmax(1)
    names = [f"{class_names[label]:.16}" for label in labels[:_TILES].tolist()]
    _draw_images(list(images[:_TILES]), names, path)


def draw_mistakes(
    mistakes: Sequence[Mistake], class_names: Sequence[str], path: Path
) -> None:
    """Draw the images whose wrong class has the highest scores."""
    texts = []
    for mistake in mistakes:
        true = class_names[mistake.true]
        predicted = class_names[mistake.predicted]
        # With 16 letters, neighbours do not overlap.
        texts.append(f"true {true:.16}\npredicted {predicted:.16} {mistake.score:.0%}")
    _draw_images([mistake.image for mistake in mistakes], texts, path)


def _draw_images(images: Sequence[Tensor], texts: Sequence[str], path: Path) -> None:
    """Draw images with a text above each, or an empty picture."""
    columns = min(_TILES_PER_LINE, max(1, len(images)))
    lines = max(1, math.ceil(len(images) / columns))
    size = _TILE_INCHES * columns, _TILE_INCHES * lines
    figure = Figure(figsize=size, layout="constrained")
    tiles = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in tiles:
        axes.set_axis_off()
    for axes, image, text in zip(tiles, images, texts, strict=False):
        pixels = image.cpu().permute(1, 2, 0)
        # Of grey images, matplotlib wants no axis of channels.
        axes.imshow(pixels.squeeze(2).numpy(), cmap="gray", vmin=0, vmax=255)
        axes.set_title(text, fontsize=6, parse_math=False)
    _save(figure, path)
