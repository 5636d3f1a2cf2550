"""Draws the README's picture: what crosses in one step, drawn and counted.

``python -m benchmarks.picture`` writes ``docs/step.png``. The bytes are those that
``python -m benchmarks traffic`` has counted in one step of the small CNN, with 4096
images, four replicas with memories of their own, and 16 sub-steps. The left half shows
an order and no time: both rows are drawn equally long.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from scatterpar.devices.transfers import PHASES

REPLICAS, ACCUM = 4, 16
LENGTH = 46.0  # of a row of the left half
TRAFFIC = Path(__file__).parent / "traffic" / "cnn.json"
COLOURS = {
    "scatter": "#4c78a8",
    "replicate": "#f2a541",
    "compute": "#b9c4cc",
    "gather": "#9d6bb0",
    "reduce": "#d1495b",
}
NAMES = {
    "scatter": "the batch out",
    "replicate": "parameters out",
    "compute": "forward and backward",
    "gather": "outputs in, their gradients out",
    "reduce": "gradients back",
}


def count() -> dict[str, dict[str, int]]:
    """Bytes by phase: the schedule of ``nn.DataParallel``, DDP, and the engine."""
    counts = json.loads(TRAFFIC.read_text(encoding="utf-8"))["counts"][str(REPLICAS)]
    who = (f"nn.DataParallel x {ACCUM}", "DDP, no_sync", "engine")
    return {name: counts[name]["bytes"] for name in who}


def schedule(axes: Any, top: float, blocks: Sequence[tuple[str, float]]) -> None:
    """Blocks from left to right on one lane per replica, from one edge to the other."""
    unit, left = LENGTH / sum(width for _, width in blocks), 0.0
    for phase, width in blocks:
        for lane in range(REPLICAS):
            box = (left, top - lane)
            axes.add_patch(
                Rectangle(
                    box,
                    width * unit,
                    0.8,
                    facecolor=COLOURS[phase],
                    edgecolor="w",
                    lw=0.4,
                )
            )
        left += width * unit


def draw(counted: dict[str, dict[str, int]]) -> Figure:
    """Two schedules, which show the order alone, and the bytes, to scale."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.7, 1])
    sent, batch, computed = ("replicate", 0.6), ("scatter", 0.1), ("compute", 1.0)
    gathered, reduced = ("gather", 0.3), ("reduce", 0.6)
    schedule(left, 9, [batch, sent, computed, gathered, reduced] * ACCUM)
    schedule(left, 3.6, [sent, *[batch, computed] * ACCUM, reduced])
    left.text(0, 10.1, "nn.DataParallel, called 16 times", weight="bold")
    left.text(0, 4.7, "scatterpar, accum=16", weight="bold")
    for top in (9, 3.6):
        for lane in range(REPLICAS):
            left.text(
                -0.5,
                top - lane + 0.4,
                f"replica {lane}",
                ha="right",
                va="center",
                fontsize=7,
            )
    left.set(xlim=(-4.6, LENGTH), ylim=(-2.2, 11.2), yticks=[], xticks=[])
    left.set_xlabel("the order of events, not their duration")
    handles = [Patch(color=COLOURS[phase], label=NAMES[phase]) for phase in COLOURS]
    left.legend(handles=handles, loc="lower left", fontsize=8, ncols=3, frameon=False)
    for side in ("top", "right", "left"):
        left.spines[side].set_visible(False)
    bottom = dict.fromkeys(counted, 0.0)
    for phase in PHASES:
        heights = {who: found[phase] / 1e6 for who, found in counted.items()}
        colour = COLOURS["gather" if phase == "compute" else phase]
        right.bar(
            list(heights),
            list(heights.values()),
            bottom=list(bottom.values()),
            color=colour,
        )
        bottom = {who: bottom[who] + heights[who] for who in bottom}
    for position, total in enumerate(bottom.values()):
        right.text(position, total, f"{total:.1f} MB", ha="center", va="bottom")
    right.set_xticks(
        range(len(bottom)), ["nn.DataParallel\nx 16", "DDP,\nno_sync", "scatterpar"]
    )
    right.set_ylim(0, 1.12 * max(bottom.values()))
    right.set_title("copied between 4 memories, one step", fontsize=10)
    right.set_yticks([])
    for side in ("top", "right", "left"):
        right.spines[side].set_visible(False)
    return figure


if __name__ == "__main__":
    bytes_counted = count()
    draw(bytes_counted).savefig(
        Path(__file__).parent.parent / "docs" / "step.png", dpi=110
    )
    for who, found in bytes_counted.items():
        print(who, {phase: f"{size / 1e6:.2f} MB" for phase, size in found.items()})
