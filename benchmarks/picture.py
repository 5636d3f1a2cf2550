"""Draws the README's picture: what crosses in one step, drawn and counted.

``python -m benchmarks.picture`` prints its bytes and writes ``runs/step.png``, and with
``--write`` the page's own, ``docs/step.png``. The bytes are those that ``python -m
benchmarks traffic`` has counted in one step of the small CNN, with 4096
images, four replicas with memories of their own, and 16 sub-steps. The left half shows
an order and no time: both rows are drawn equally long.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from scatterpar.devices.transfers import PHASES

REPLICAS = 4
ACCUM = 16
LENGTH = 46.0  # of a row of the left half
HERE = Path(__file__).parent
TRAFFIC = HERE / "traffic" / "cnn.json"
DOCS = HERE.parent / "docs"
COLOURS = {
    "scatter": "#4c78a8",
    "replicate": "#f2a541",
    "compute": "#b9c4cc",
    "gather": "#9d6bb0",
    "reduce": "#d1495b",
}
BytesByPhase = dict[str, dict[str, int]]  # of each contender
NAMES = {
    "scatter": "the batch out",
    "replicate": "parameters out",
    "compute": "forward and backward",
    "gather": "outputs in, their gradients out",
    "reduce": "gradients back",
}


def count() -> BytesByPhase:
    """Bytes by phase: the schedule of ``nn.DataParallel``, DDP, and the engine."""
    counts = json.loads(TRAFFIC.read_text(encoding="utf-8"))["counts"]
    by_contender = counts[str(REPLICAS)]
    contenders = (f"nn.DataParallel x {ACCUM}", "DDP, no_sync", "engine")
    return {name: by_contender[name]["bytes"] for name in contenders}


def draw(counted: BytesByPhase) -> Figure:
    """Two schedules, which show the order alone, and the bytes, to scale."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.7, 1])
    draw_order(left)
    draw_bytes(right, counted)
    return figure


def draw_order(axes: Any) -> None:
    """Both schedules, one above the other, and what their colours mean."""
    replicate = ("replicate", 0.6)
    scatter = ("scatter", 0.1)
    compute = ("compute", 1.0)
    gather = ("gather", 0.3)
    reduce = ("reduce", 0.6)
    call = [scatter, replicate, compute, gather, reduce]
    draw_schedule(axes, 9, "nn.DataParallel, called 16 times", call * ACCUM)
    step = [replicate, *[scatter, compute] * ACCUM, reduce]
    draw_schedule(axes, 3.6, "scatterpar, accum=16", step)
    axes.set(xlim=(-4.6, LENGTH), ylim=(-2.2, 11.2), yticks=[], xticks=[])
    axes.set_xlabel("the order of events, not their duration")
    handles = [Patch(color=COLOURS[phase], label=NAMES[phase]) for phase in COLOURS]
    axes.legend(handles=handles, loc="lower left", fontsize=8, ncols=3, frameon=False)
    hide_frame(axes)


def draw_schedule(
    axes: Any, top: float, title: str, blocks: Sequence[tuple[str, float]]
) -> None:
    """A title and a lane per replica, with blocks from one edge to the other.

    Args:
        top: of the first lane.
        blocks: phases and widths, from left to right.
    """
    axes.text(0, top + 1.1, title, weight="bold")
    for lane in range(REPLICAS):
        middle = top - lane + 0.4
        name = f"replica {lane}"
        axes.text(-0.5, middle, name, ha="right", va="center", fontsize=7)
    unit = LENGTH / sum(width for _, width in blocks)
    left = 0.0
    for phase, width in blocks:
        for lane in range(REPLICAS):
            corner = (left, top - lane)
            block = Rectangle(corner, width * unit, 0.8, facecolor=COLOURS[phase])
            block.set(edgecolor="w", linewidth=0.4)
            axes.add_patch(block)
        left += width * unit


def draw_bytes(axes: Any, counted: BytesByPhase) -> None:
    """A column for each contender, of one part per phase."""
    bottoms = dict.fromkeys(counted, 0.0)
    for phase in PHASES:
        colour = COLOURS["gather" if phase == "compute" else phase]
        for name, bytes_by_phase in counted.items():
            height = bytes_by_phase[phase] / 1e6
            axes.bar(name, height, bottom=bottoms[name], color=colour)
            bottoms[name] += height
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


def main() -> None:
    """Write the picture, and print its numbers."""
    counted = count()
    folder = DOCS if "--write" in sys.argv else Path("runs")
    folder.mkdir(exist_ok=True)
    draw(counted).savefig(folder / "step.png", dpi=110)
    for name, bytes_by_phase in counted.items():
        sizes = {
            phase: f"{size / 1e6:.2f} MB" for phase, size in bytes_by_phase.items()
        }
        print(name, sizes)


if __name__ == "__main__":
    main()
