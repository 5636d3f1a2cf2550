"""The pictures of a run have whole epochs, every class, and the images as they are."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from harness.pairwise import pairwise
from PIL import Image

from scatterpar.train import figures
from scatterpar.train.figures import draw_confusion, draw_curves, draw_first_batch
from scatterpar.train.records import Metrics


@pytest.fixture
def drawn(tmp_path):
    """The axes of each figure that is drawn; it is also written."""
    kept = []

    def save(figure, path):
        kept.append(figure.axes)
        real(figure, path)

    real = figures._save
    with mock.patch.object(figures, "_save", save):
        yield kept


def shown(path):
    return np.asarray(Image.open(path).convert("RGB"))


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 3, 90])
def test_curves_have_whole_epochs(tmp_path, drawn, epochs):
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        for step in range(1, 2 * epochs + 1):
            metrics.write(
                "step", step=step, images=50, loss=float("nan") if step == 1 else 1
            )
        for epoch in range(1, epochs + 1):
            values = {"val_loss": 1.0, "val_accuracy": 0.5}
            metrics.write("epoch", step=2 * epoch, epoch=epoch, **values)
    path = tmp_path / "curves.png"
    draw_curves(metrics, path, images=100, tested="val")
    loss, accuracy = drawn[0]
    for axes in (loss, accuracy):
        ticks = [tick for tick in axes.get_xticks() if 0 <= tick <= epochs]
        assert ticks == [round(tick) for tick in ticks]
        assert axes.get_xlim()[0] == 0
    assert loss.lines[0].get_xdata()[-1] == epochs  # of the last step
    names = [line.get_label() for line in (*loss.lines, *accuracy.lines)]
    assert names == ["training loss", "val loss", "val accuracy"]
    assert shown(path).shape[2] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["cat", "$5 or $6"], ["ü", "猫"], [str(i) for i in range(300)]]
)
def test_confusion_matrix_takes_any_names(tmp_path, drawn, names, recwarn):
    confusion = torch.eye(len(names), dtype=torch.int64) * 7
    draw_confusion(confusion, names, "title", tmp_path / "confusion.png")
    axes = drawn[0][0]
    if len(names) == 2:
        assert [text.get_text() for text in axes.texts] == ["7", "7"]
        assert [label.get_text() for label in axes.get_xticklabels()] == names
    assert shown(tmp_path / "confusion.png").any()
    assert not recwarn.list


@pairwise(number=[1, 5, 60], channels=[1, 3], quick={"number": [1, 5]})
def test_first_batch_shows_image_and_class(tmp_path, drawn, channels, number):
    images = torch.full((number, channels, 8, 8), 200, dtype=torch.uint8)
    labels = torch.arange(number) % 2
    draw_first_batch(
        images, labels, ["cat", "a name of many letters"], tmp_path / "x.png"
    )
    tiles = [axes for axes in drawn[0] if axes.images]
    assert len(tiles) == min(number, 48)
    assert tiles[0].get_title() == "cat"
    assert tiles[0].images[0].get_array().tolist()[0][0] == (
        200 if channels == 1 else [200] * 3
    )
    if number > 1:
        assert tiles[1].get_title() == "a name of many l"
    assert (shown(tmp_path / "x.png") == 200).any()


def test_mixed_image_has_name_of_larger_part(tmp_path, drawn):
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    labels = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.0, 1.0]])
    draw_first_batch(images, labels, ["a", "b", "c"], tmp_path / "x.png")
    assert [axes.get_title() for axes in drawn[0]] == ["a", "c"]
