"""A picture of a run's curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw_curves(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the loss by step and the test accuracy by epoch, from `Metrics.records`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6))
    loss, accuracy = figure.subplots(1, 2)
    steps = [record for record in records if record["kind"] == "step"]
    epochs = [r for r in records if r["kind"] == "epoch" and r["test_loss"] is not None]
    loss.plot([r["step"] for r in steps], [r["loss"] for r in steps], label="training, each step")
    loss.plot(
        [r["step"] for r in epochs],
        [r["test_loss"] for r in epochs],
        "o-",
        label="test, each epoch",
    )
    loss.set(xlabel="step", ylabel="loss")
    loss.legend()
    accuracy.plot([r["epoch"] for r in epochs], [100 * r["test_accuracy"] for r in epochs], "o-")
    accuracy.set(xlabel="epoch", ylabel="test accuracy (%)")
    for axes in (loss, accuracy):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
