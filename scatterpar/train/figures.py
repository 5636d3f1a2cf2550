"""The pictures of a run: its curves, its confusion matrix, and its first batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
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
    for axes, title in ((loss, "Loss"), (accuracy, "Accuracy")):
        label = f"{tested} {title.lower()}"
        values = _values(epochs, label.replace(" ", "_"))
        axes.plot(_values(epochs, "epoch"), values, "o-", label=label, markersize=4)
        axes.set(title=title, xlabel="Epoch", xlim=(0, None))
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
    parts = confusion / confusion.sum(1, keepdim=True).clamp(min=1)
    cells = axes.imshow(parts.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(cells, shrink=0.8, format=PercentFormatter(1.0))
    axes.set(title=title, xlabel="predicted", ylabel="true")
    if classes <= _NAMED_CLASSES:
        # Names with dollars are no formulas.
        style: dict[str, Any] = {"parse_math": False, "rotation_mode": "anchor"}
        axes.set_xticks(range(classes), class_names, rotation=45, ha="right", **style)
        axes.set_yticks(range(classes), class_names, **style)
    if classes <= COUNTED_CLASSES:
        for row, column in confusion.nonzero().tolist():
            number = str(confusion[row, column].item())
            colour = "white" if parts[row, column] > 0.5 else "black"
            axes.text(column, row, number, color=colour, ha="center", va="center")
    _save(figure, path)


def draw_first_batch(
    images: Tensor, labels: Tensor, class_names: Sequence[str], path: Path
) -> None:
    """Draw the first images of a batch as the network sees them, each with its class,
    or that of its larger part if it is mixed.
    """
    if labels.ndim == 2:
        labels = labels.argmax(1)
    names = [f"{class_names[label]:.16}" for label in labels[:_TILES].tolist()]
    _draw_images(images[:_TILES], names, path)


def draw_mistakes(
    mistakes: Sequence[Mistake], class_names: Sequence[str], path: Path
) -> None:
    """Draw the images whose wrong class has the highest scores."""
    texts = []
    for mistake in mistakes:
        # With 16 letters, neighbours do not overlap.
        true = f"true {class_names[mistake.true]:.16}"
        predicted = f"predicted {class_names[mistake.predicted]:.16}"
        texts.append(f"{true}\n{predicted} {mistake.score:.0%}")
    _draw_images([mistake.image for mistake in mistakes], texts, path)


def _draw_images(images: Collection[Tensor], texts: Sequence[str], path: Path) -> None:
    """Draw images with a text above each, or an empty picture."""
    # Without images, the picture is empty.
    columns = min(_TILES_PER_LINE, len(images)) or 1
    lines = math.ceil(len(images) / columns) or 1
    size = _TILE_INCHES * columns, _TILE_INCHES * lines
    figure = Figure(figsize=size, layout="constrained")
    for number, (image, text) in enumerate(zip(images, texts, strict=True), 1):
        axes = figure.add_subplot(lines, columns, number)
        axes.set_axis_off()
        # Of grey images, matplotlib wants no axis of channels.
        pixels = image.permute(1, 2, 0).squeeze(2).numpy()
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=255)
        axes.set_title(text, fontsize=6, parse_math=False)
    _save(figure, path)
