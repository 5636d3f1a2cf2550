"""The tables that the guide quotes from the benchmarks: ``python -m
benchmarks.readme``.

It measures nothing. It reads the raw numbers that are kept beside the benchmarks, and
writes the tables between their markers. A test computes them again and compares.
``python -m benchmarks figures`` measures those of the step times first.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent

MODELS = {"cnn": "small CNN", "mlp": "MLP", "resnet20": "ResNet-20"}
PEERS = {
    "the plain loop with the same micro-batches": ["plain loop, 32 sub-steps"],
    "a plain loop with 16 larger micro-batches, which `nn.DataParallel` is on a CPU": [
        "nn.DataParallel x 16"
    ],
    "DDP with `no_sync`, or accelerate, whichever was faster, in two processes": [
        "DistributedDataParallel, no_sync",
        "accelerate, accumulate",
    ],
}
NAMES = {
    "plain loop, 32 sub-steps": "loop, same micro-batches",
    "plain loop, 16 sub-steps": "loop, larger micro-batches",
    "nn.DataParallel x 16": "loop, larger micro-batches",
    "DistributedDataParallel, no_sync": "DDP",
    "accelerate, accumulate": "accelerate",
}
RECIPES = {
    "256": "256, baseline",
    "4096, the rate of 256": "4096, rate as at 256",
    "4096, rate scaled at once": "4096, rate scaled, no warm-up",
    "4096, rate scaled, warm-up of 5 epochs": "4096, rate scaled, gradual warm-up",
    "4096, rate scaled, warm-up of 10 epochs": "4096, rate scaled, gradual warm-up, "
    "of 10 epochs",
    "256, augmented": "256, baseline, augmented",
    "4096, warm-up of 5 epochs, augmented": "4096, rate scaled, gradual warm-up, "
    "augmented",
    "256 to 4096, growing, augmented": "256 to 4096, following the noise scale, "
    "augmented",
}


def figures() -> str:
    """A step's time relative to each peer's, round by round; of several peers the
    faster one.
    """
    found = {name: _read(f"step_time/{name}.json") for name in MODELS}
    where = found["cnn"]["environment"]
    lines = [f"| relative to | {' | '.join(MODELS.values())} |", "|---|---:|---:|---:|"]
    for words, peers in PEERS.items():
        ratios = [_slowest(found[name]["seconds"], peers) for name in MODELS]
        lines.append(f"| {words} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    lines.append(
        f"| the fastest of all of these | {' | '.join(map(_fastest, found.values()))} |"
    )
    hardware = (
        f"Two replicas on {where['cores']} cores of an {where['processor']}, torch "
        f"{where['torch']}, batches of 4096 images, `accum=16`."
    )
    return "\n".join([*lines, "", hardware])


def _fastest(found: dict[str, Any]) -> str:
    """The largest ratio, that beside the fastest peer, and its name."""
    ratios = {peer: _slowest(found["seconds"], [peer]) for peer in NAMES}
    fastest = max(ratios, key=lambda peer: ratios[peer])
    return f"{ratios[fastest]:.2f}, {NAMES[fastest]}"


def _slowest(seconds: dict[str, list[float]], peers: list[str]) -> float:
    """The largest median of the engine's time over a peer's."""
    pairs = [zip(seconds["engine"], seconds[peer], strict=True) for peer in peers]
    return max(1 / statistics.median(b / a for a, b in rounds) for rounds in pairs)


def accuracy() -> str:
    """Test errors by batch and recipe, of both networks."""
    networks = [
        _read(f"large_batch/runs-{name}.json")["runs"] for name in ("cnn", "tiny")
    ]
    lines = [
        "| batch and recipe | small CNN, test error, % | tiny network, test error, % |",
        "|---|---:|---:|",
    ]
    for words, recipe in RECIPES.items():
        cells = [
            _spread([r["errors"][-1] for r in runs if r["recipe"] == recipe])
            for runs in networks
        ]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(errors: list[float]) -> str:
    return (
        f"{statistics.mean(errors):.2f} ± {statistics.stdev(errors):.2f}"
        if errors
        else ""
    )


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "figures": (ROOT / "docs" / "benchmarks.md", figures),
    "accuracy": (ROOT / "docs" / "large-batches.md", accuracy),
}


def between(name: str, text: str) -> tuple[str, str, str]:
    """What a page has before, between and after the markers of ``name``."""
    before, opening, rest = text.partition(f"<!-- {name} -->\n")
    table, closing, after = rest.partition(f"\n<!-- /{name} -->")
    if not (opening and closing):
        raise ValueError(f"the page has no markers for {name}")
    return before + opening, table, closing + after


def _read(path: str) -> Any:
    return json.loads((HERE / path).read_text(encoding="utf-8"))


def write() -> None:
    """Write every table into its page."""
    for name, (page, table) in TABLES.items():
        before, _, after = between(name, page.read_text(encoding="utf-8"))
        page.write_text(before + table() + after, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {name}")


if __name__ == "__main__":
    write()
