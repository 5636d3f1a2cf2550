"""The table of final errors, beside the published ones, and the picture
of the curves.
"""

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.large_batch.recipes import (
    BASELINE,
    GROWING,
    LARGE,
    PUBLISHED,
    RECIPES,
    VALIDATED,
    VARIATIONS,
)
from benchmarks.large_batch.runs import Run, Runs
from benchmarks.tables import Publisher, Table

COLUMNS = [
    "batch and recipe",
    "learning rate",
    "updates",
    "runs",
    "test error, %",
    "over the baseline",
    "Goyal et al., 256 and 8192, %",
]
CLOSING_COLUMNS = [
    "batch and recipe",
    "updates",
    "error on images held out, %",
    "runs",
    "test error, %",
    "runs",
]
NOISE_COLUMNS = [
    "epoch",
    "noise scale of the baseline, images",
    "batch that follows it",
]
AS_ABOVE = "as above"
PAIR_COLUMNS = [
    "change",
    "256, %",
    "runs",
    "4096 with warm-up, %",
    "runs",
    "difference",
]


def publish(folder: Path, network: str, runs: Runs) -> None:
    """Write a network's tables and picture into ``folder``, from the runs that there
    are.
    """
    write = Publisher(folder, runs.environment)
    found = {
        recipe.name: runs.of(recipe.name) for recipe in RECIPES if runs.of(recipe.name)
    }
    baseline = statistics.mean(_final(found[BASELINE.name]))
    rows = [_row(name, some, baseline) for name, some in found.items()]
    final = {name: _final(some) for name, some in found.items()}
    draw = partial(_draw, found=found)
    write(f"{network}-errors", Table(COLUMNS, rows), {"final_errors": final}, draw)
    pairs = {AS_ABOVE: (BASELINE, LARGE), **VARIATIONS}
    found_pairs = {
        change: [runs.of(recipe.name) for recipe in pairs[change]] for change in pairs
    }
    rows = [
        _pair_row(change, *pair) for change, pair in found_pairs.items() if all(pair)
    ]
    write(f"{network}-variations", Table(PAIR_COLUMNS, rows), {"rows": rows})


def publish_closing(folder: Path, network: str, runs: Runs, held_out: Runs) -> None:
    """Write what was tried against the loss of accuracy at 4096, and the noise scale
    beside it.

    Args:
        folder: that of the README.
        network: the one of the runs.
        runs: with the error on the test images.
        held_out: with the error on images held out of training.

    """
    write = Publisher(folder, runs.environment)
    names = dict.fromkeys([recipe.name for recipe in VALIDATED])
    found = [(name, held_out.of(name), runs.of(name)) for name in names]
    rows = [_closing_row(*row) for row in found if row[1] or row[2]]
    write(f"{network}-closing", Table(CLOSING_COLUMNS, rows), {"rows": rows})
    measured = held_out.of(BASELINE.name) + held_out.of(GROWING.name)
    if len(measured) == 2:
        baseline, growing = measured
        scales = [f"{scale:,.0f}" for scale in baseline["noise_scales"]]
        batches = [f"{batch:,}" for batch in growing["batches"]]
        lines = [
            list(row)
            for row in zip(range(1, len(scales) + 1), scales, batches, strict=True)
        ]
        write(f"{network}-noise", Table(NOISE_COLUMNS, lines), {"rows": lines})


def _closing_row(name: str, held_out: list[Run], tested: list[Run]) -> list[Any]:
    updates = next((run["updates"] for run in tested + held_out), "")
    cells = [
        cell
        for some in (held_out, tested)
        for cell in (_spread(_final(some)), len(some))
    ]
    return [name, updates, *cells]


def _row(name: str, runs: list[Run], baseline: float) -> list[Any]:
    errors = _final(runs)
    return [
        name,
        f"{runs[0]['rate']:g}",
        runs[0]["updates"],
        len(runs),
        _spread(errors),
        "" if name == BASELINE.name else f"{statistics.mean(errors) - baseline:+.2f}",
        PUBLISHED.get(name, ""),
    ]


def _pair_row(change: str, baseline: list[Run], large: list[Run]) -> list[Any]:
    over = ""
    if baseline and large:
        over = (
            f"{statistics.mean(_final(large)) - statistics.mean(_final(baseline)):+.2f}"
        )
    cells = [
        cell
        for runs in (baseline, large)
        for cell in (_spread(_final(runs)), len(runs))
    ]
    return [change, *cells, over]


def _final(runs: list[Run]) -> list[float]:
    return [run["errors"][-1] for run in runs]


def _spread(errors: list[float]) -> str:
    if len(errors) > 1:
        return f"{statistics.mean(errors):.2f} ± {statistics.stdev(errors):.2f}"
    return "".join(f"{error:.2f}" for error in errors)


def _draw(axes: Axes, found: dict[str, list[Run]]) -> None:
    """Test errors after each epoch: the mean of the runs, and from the lowest to the
    highest.
    """
    for name, runs in found.items():
        curves = list(zip(*[run["errors"] for run in runs], strict=True))
        epochs = range(1, len(curves) + 1)
        axes.plot(epochs, [statistics.mean(errors) for errors in curves], label=name)
        axes.fill_between(
            epochs, *zip(*[(min(e), max(e)) for e in curves], strict=True), alpha=0.2
        )
    axes.set_yscale("log")
    ticks = [9, 10, 12, 15, 20, 30, 50, 90]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("epoch")
    axes.set_ylabel("test error, %")
    axes.legend()
