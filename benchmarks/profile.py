"""Draws the picture of a profile: the blocks of one step, by thread.

``python -m benchmarks.profile`` writes ``runs/profile.png``, and with ``--write`` the
page's own, ``docs/profile.png``. Two replicas compute four
sub-steps each; the second one sleeps in every forward pass.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.profiler import profile

from scatterpar import ScatterOnceParallel

DOCS = Path(__file__).parents[1] / "docs"
DEVICES = ["cpu:0", "cpu:1"]
TRIES = 30
PREFIX = "scatterpar "
COLOURS = {
    "scatter": "#4c78a8",
    "replicate": "#f2a541",
    "compute": "#b9c4cc",
    "arrival": "#4c78a8",
    "forward": "#72a98f",
    "backward": "#9d6bb0",
    "reduce": "#d1495b",
    "commit": "#333333",
}


class Slow(nn.Module):
    """Sleeps on the second device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        """The scores of images, whose first row says whether to sleep."""
        if bool(images[0, 0] == 1):
            time.sleep(0.02)
        scores: Tensor = self.layers(images)
        return scores


def blocks() -> list[dict[str, Any]]:
    """The blocks of one step, as the file for viewers has them."""
    images = torch.randn(1024, 256)
    images[:, 0] = torch.arange(1024) >= 512  # the rows of the second replica
    labels = torch.randint(10, (1024,))
    batch = images, labels, nn.CrossEntropyLoss()
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with ScatterOnceParallel(Slow(), 4, DEVICES) as engine:
        for _ in range(4):
            engine.forward_backward(*batch)
        profiles = {}  # by the seconds of the step
        for _ in range(TRIES):
            with profile(experimental_config=every_thread) as profiler:
                engine.forward_backward(*batch)
            profiles[sum(engine.last_step.seconds.values())] = profiler
    # The step that other processes have disturbed least.
    profiler = profiles[min(profiles)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [
        event
        for event in events
        if event["name"].startswith(PREFIX) and event["ph"] == "X"
    ]


def draw(events: list[dict[str, Any]]) -> Figure:
    """A line for the caller's thread, and one per replica."""
    events = sorted(events, key=lambda event: float(event["ts"]))
    start = float(events[0]["ts"])
    length = max(float(event["ts"]) + float(event["dur"]) for event in events) - start
    length /= 1e3
    caller, *workers = dict.fromkeys(event["tid"] for event in events)
    # Either may begin first. Their threads were made in the order of the replicas.
    threads = [caller, *sorted(workers)]
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    axes = figure.subplots()
    for event in events:
        part, _, sub_step = event["name"].removeprefix(PREFIX).partition(" ")
        line = threads.index(event["tid"])
        left = (float(event["ts"]) - start) / 1e3
        width = float(event["dur"]) / 1e3
        axes.barh(line, width, 0.8, left, color=COLOURS.get(part, "#cccccc"))
        if width > 0.06 * length:  # else the name has no room
            text = f"{part} {sub_step}".strip()
            middle = left + width / 2
            axes.text(middle, line, text, ha="center", va="center", fontsize=7)
    names = ["caller", *[f"replica {number}" for number in range(len(DEVICES))]]
    axes.set_yticks(range(len(threads)), names[: len(threads)])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    return figure


def main() -> None:
    """Profile a step and draw it."""
    torch.manual_seed(0)
    folder = DOCS if "--write" in sys.argv else Path("runs")
    folder.mkdir(exist_ok=True)
    picture = folder / "profile.png"
    draw(blocks()).savefig(picture, dpi=100)
    print(picture)


if __name__ == "__main__":
    main()
