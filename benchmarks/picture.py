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
    unit = LENGTH / sum(width for _, width in blocks)
    left = 0.0
    for phase, width in blocks:
        for lane in range(REPLICAS):
            corner = (left, top - lane)
            block = Rectangle(corner, width * unit, 0.8, facecolor=COLOURS[phase])
            block.set(edgecolor="w", linewidth=0.4)
            axes.add_patch(block)
        left += width * unit


def draw(counted: dict[str, dict[str, int]]) -> Figure:
    """Two schedules, which show the order alone, and the bytes, to scale."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.7, 1])
    draw_order(left)
    draw_bytes(right, counted)
    return figure


def draw_order(axes: Any) -> None:
    """Both schedules, one above the other, and what their colours mean."""
    sent = ("replicate", 0.6)
    batch = ("scatter", 0.1)
    computed = ("compute", 1.0)
    gathered = ("gather", 0.3)
    reduced = ("reduce", 0.6)
    per_call = [batch, sent, computed, gathered, reduced]
    schedules = (
        (9, "nn.DataParallel, called 16 times", per_call * ACCUM),
        (3.6, "scatterpar, accum=16", [sent, *[batch, computed] * ACCUM, reduced]),
    )
    beside = {"ha": "right", "va": "center", "fontsize": 7}
    for top, title, blocks in schedules:
        schedule(axes, top, blocks)
        axes.text(0, top + 1.1, title, weight="bold")
        for lane in range(REPLICAS):
            axes.text(-0.5, top - lane + 0.4, f"replica {lane}", **beside)
    axes.set(xlim=(-4.6, LENGTH), ylim=(-2.2, 11.2), yticks=[], xticks=[])
    axes.set_xlabel("the order of events, not their duration")
    handles = [Patch(color=COLOURS[phase], label=NAMES[phase]) for phase in COLOURS]
    axes.legend(handles=handles, loc="lower left", fontsize=8, ncols=3, frameon=False)
    hide_frame(axes)


def draw_bytes(axes: Any, counted: dict[str, dict[str, int]]) -> None:
    """A column for each contender, of one part per phase."""
    bottoms = dict.fromkeys(counted, 0.0)
    for phase in PHASES:
        colour = COLOURS["gather" if phase == "compute" else phase]
        for who, bytes_by_phase in counted.items():
            height = bytes_by_phase[phase] / 1e6
            axes.bar(who, height, bottom=bottoms[who], color=colour)
            bottoms[who] += height
    for position, total in enumerate(bottoms.values()):
        axes.text(position, total, f"{total:.1f} MB", ha="center", va="bottom")
    labels = ["nn.DataParallel\nx 16", "DDP,\nno_sync", "scatterpar"]
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, 1.12 * max(bottoms.values()))
    axes.set_title("copied between 4 memories, one step", fontsize=10)
    axes.set_yticks([])
    hide_frame(axes)


def hide_frame(axes: Any) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    bytes_counted = count()
    draw(bytes_counted).savefig(
        Path(__file__).parent.parent / "docs" / "step.png", dpi=110
    )
    for who, found in bytes_counted.items():
        print(who, {phase: f"{size / 1e6:.2f} MB" for phase, size in found.items()})
