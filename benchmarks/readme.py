"""The tables that the guide quotes from the benchmarks: ``python -m benchmarks.readme``.

It measures nothing. It reads the numbers that are stored beside the benchmarks, and
writes the tables between their markers. A test computes them again and compares.
``python -m benchmarks figures`` measures the step times first.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.markers import replace
from benchmarks.timing import ratio

HERE = Path(__file__).parent
ROOT = HERE.parent

MODELS = {"cnn": "small CNN", "mlp": "MLP", "resnet20": "ResNet-20"}
PEERS = {
    "a plain loop with 32 micro-batches of 128 rows (scatterpar: 16 micro-batches on each of 2 replicas)": [
        "plain loop, 32 sub-steps"
    ],
    "`nn.DataParallel` in a loop with 16 micro-batches of 256 rows (on a CPU it only calls the module)": [
        "nn.DataParallel x 16"
    ],
    "DDP with `no_sync`, or accelerate, whichever was faster, in two processes": [
        "DistributedDataParallel, no_sync",
        "accelerate, accumulate",
    ],
}
RECIPES = {
    "256": "256, baseline",
    "4096, the rate of 256": "4096, rate as at 256",
    "4096, rate scaled, no warm-up": "4096, rate scaled, no warm-up",
    "4096, rate scaled, warm-up of 5 epochs": "4096, rate scaled, gradual warm-up",
    "4096, rate scaled, warm-up of 10 epochs": "4096, rate scaled, gradual warm-up, "
    "of 10 epochs",
    "256, augmented": "256, baseline, augmented",
    "4096, warm-up of 5 epochs, augmented": "4096, rate scaled, gradual warm-up, "
    "augmented",
    "256 to 4096, growing, augmented": "256 to 4096, growing, augmented",
}


def figures() -> str:
    """The engine's time relative to that of each group of peers, by model.

    Each ratio is the median over rounds. The fastest peer of a group counts.
    """
    results = [_read(f"step_time/{name}.json") for name in MODELS]
    lines = [f"| relative to | {' | '.join(MODELS.values())} |", "|---|---:|---:|---:|"]
    for title, peers in PEERS.items():
        cells = [f"{_largest_ratio(result, peers):.2f}" for result in results]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    environment = results[0]["environment"]
    cores = f"{environment['cores']} cores of an {environment['processor']}"
    for name, result in zip(MODELS.values(), results, strict=True):
        processor = result["environment"]["processor"]
        if processor != environment["processor"]:
            cores += f" ({name}: {processor})"
    lines.append("")
    lines.append(
        f"Two replicas on {cores}, torch {environment['torch']}, batches of 4096 "
        "images, `accum=16`."
    )
    return "\n".join(lines)


def _largest_ratio(result: dict[str, Any], peers: list[str]) -> float:
    """The largest of the engine's times relative to those of the peers."""
    seconds = result["seconds"]
    ratios = []
    for peer in peers:
        pairs = zip(seconds["engine"], seconds[peer], strict=True)
        # Turned over as ``timing.ratio`` does on the pages of the benchmarks, so that
        # both round the same number.
        ratios.append(1 / statistics.median(theirs / ours for ours, theirs in pairs))
    return max(ratios)


def accuracy() -> str:
    """Test errors of both networks, by batch and recipe."""
    cnn = _read("large_batch/runs-cnn.json")["runs"]
    tiny = _read("large_batch/runs-tiny.json")["runs"]
    lines = [
        "| batch and recipe | small CNN, test error, % | tiny network, test error, % |",
        "|---|---:|---:|",
    ]
    for title, recipe in RECIPES.items():
        cells = [_mean_error(runs, recipe) for runs in (cnn, tiny)]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean_error(runs: list[dict[str, Any]], recipe: str) -> str:
    """Mean and standard deviation of the last errors; empty without a run."""
    errors = [run["errors"][-1] for run in runs if run["recipe"] == recipe]
    if not errors:
        return ""
    return f"{statistics.mean(errors):.2f} ± {statistics.stdev(errors):.2f}"


def beside_the_loop() -> str:
    """What launching, a look and the engine itself cost."""
    lines = [
        "| what | figure | compared with | command |",
        "|---|---:|---|---|",
    ]
    for path, name, peer, value in _MEASURED:
        result = _read(path)
        folder, _, file = path.partition("/")
        test = file.removesuffix(".json").replace("-", "_")
        words = f"benchmarks {folder} -k {test}"
        command = f"[`{words}`](../benchmarks/{folder}/README.md)"
        cells = [name, value(result), peer, command]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _of_two_launchers(result: Any) -> str:
    """The time of a step in two processes, relative to that in one."""
    seconds = result["seconds"]
    return f"{ratio(seconds['2'], seconds['1']).median:.2f} times"


def _times_in_row(number: int, column: int) -> Callable[[Any], str]:
    """A ratio, from a cell of the result's table."""
    return lambda result: f"{result['rows'][number][column]} times"


def _microseconds_in_row(number: int, column: int) -> Callable[[Any], str]:
    """A difference in µs, from a cell of the result's table."""
    return lambda result: f"{result['rows'][number][column]} µs longer"


_MEASURED: list[tuple[str, str, str, Callable[[Any], str]]] = [
    (
        "many_cards/launchers.json",
        "time of a step in two processes with 4 replicas each (the model computes almost nothing)",
        "time of this step in one process with 8 replicas",
        _of_two_launchers,
    ),
    (
        "memory/look.json",
        "peak memory of a step that is checked, float32",
        "a step without a check",
        _times_in_row(0, 2),
    ),
    (
        "memory/look.json",
        "peak memory of a step that is checked, bfloat16",
        "a step without a check",
        _times_in_row(2, 2),
    ),
    (
        "fixed_cost/own-cost.json",
        "a step of two replicas, one sub-step each",
        "two sub-steps of a plain loop",
        _microseconds_in_row(0, 1),
    ),
]


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "figures": (ROOT / "docs" / "comparison.md", figures),
    "beside": (ROOT / "docs" / "comparison.md", beside_the_loop),
    "accuracy": (ROOT / "docs" / "large-batches.md", accuracy),
}


def _read(path: str) -> Any:
    return json.loads((HERE / path).read_text(encoding="utf-8"))


def write() -> None:
    """Write every table into its page."""
    for name, (page, table) in TABLES.items():
        replace(page, name, table())
        print(f"{page.relative_to(ROOT)}: {name}")


if __name__ == "__main__":
    write()
