"""A picture of a run's curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Records = list[dict[str, Any]]


def draw_curves(records: Records, path: Path) -> None:
    """Draw loss and accuracy, and the noise scale if it was measured, from `Metrics.records`."""
    from matplotlib.figure import Figure

    steps = [record for record in records if record["kind"] == "step"]
    tested = [r for r in records if r["kind"] == "epoch" and r["test_loss"] is not None]
    measured = [r for r in steps if r.get("noise_scale") is not None]
    figure = Figure(figsize=(13.5 if measured else 9, 3.6))
    loss, accuracy, *noise = figure.subplots(1, 2 + bool(measured))
    _draw_loss(loss, steps, tested)
    accuracy.plot([r["epoch"] for r in tested], [100 * r["test_accuracy"] for r in tested], "o-")
    accuracy.set(xlabel="epoch", ylabel="test accuracy (%)")
    accuracy.xaxis.get_major_locator().set_params(integer=True)
    if noise:
        _draw_noise(noise[0], measured)
    for axes in (loss, accuracy, *noise):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _draw_loss(axes: Any, steps: Records, tested: Records) -> None:
    axes.plot([r["step"] for r in steps], [r["loss"] for r in steps], label="training, each step")
    numbers, losses = [r["step"] for r in tested], [r["test_loss"] for r in tested]
    axes.plot(numbers, losses, "o-", label="test, each epoch")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()


def _draw_noise(axes: Any, steps: Records) -> None:
    numbers = [r["step"] for r in steps]
    axes.plot(numbers, [r["noise_scale"] for r in steps], label="noise scale of the gradient")
    axes.plot(numbers, [r["images"] for r in steps], label="batch")
    axes.set(xlabel="step", ylabel="images", yscale="log")
    axes.legend()
