"""The tables of final errors, beside the published ones, and the picture of the curves."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.large_batch.recipes import (
    BASELINE,
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
    """Write a network's tables and picture into ``folder``, from the runs so far."""
    write = Publisher(folder, runs.environment)
    by_name = {}
    for recipe in RECIPES:
        of_recipe = runs.of(recipe.name)
        if of_recipe:
            by_name[recipe.name] = of_recipe
    baseline = statistics.mean(_final(by_name[BASELINE.name]))
    rows = []
    final = {}
    for name, of_recipe in by_name.items():
        rows.append(_row(name, of_recipe, baseline))
        final[name] = _final(of_recipe)
    data = {"final_errors": final}
    write(f"{network}-errors", Table(COLUMNS, rows), data, _curves(by_name))
    rows = []
    for change, pair in {AS_ABOVE: (BASELINE, LARGE), **VARIATIONS}.items():
        runs_of_both = [runs.of(recipe.name) for recipe in pair]
        if all(runs_of_both):
            rows.append(_pair_row(change, *runs_of_both))
    write(f"{network}-variations", Table(PAIR_COLUMNS, rows), {"rows": rows})


def publish_closing(folder: Path, network: str, runs: Runs, held_out: Runs) -> None:
    """Write what was tried against the loss of accuracy at 4096.

    Args:
        folder: that of the README.
        network: the network of the runs.
        runs: with the error on the test images.
        held_out: with the error on images held out of training.

    """
    write = Publisher(folder, runs.environment)
    rows = []
    for name in dict.fromkeys(recipe.name for recipe in VALIDATED):
        validated = held_out.of(name)
        tested = runs.of(name)
        if validated or tested:
            rows.append(_closing_row(name, validated, tested))
    write(f"{network}-closing", Table(CLOSING_COLUMNS, rows), {"rows": rows})


def _closing_row(name: str, validated: list[Run], tested: list[Run]) -> list[Any]:
    updates = (tested + validated)[0]["updates"]
    errors = [_spread(validated), len(validated), _spread(tested), len(tested)]
    return [name, updates, *errors]


def _row(name: str, runs: list[Run], baseline: float) -> list[Any]:
    over = ""
    if name != BASELINE.name:
        over = f"{statistics.mean(_final(runs)) - baseline:+.2f}"
    first = runs[0]
    training = [f"{first['rate']:g}", first["updates"], len(runs)]
    return [name, *training, _spread(runs), over, PUBLISHED.get(name, "")]


def _pair_row(change: str, baseline: list[Run], large: list[Run]) -> list[Any]:
    over = statistics.mean(_final(large)) - statistics.mean(_final(baseline))
    errors = [_spread(baseline), len(baseline), _spread(large), len(large)]
    return [change, *errors, f"{over:+.2f}"]


def _final(runs: list[Run]) -> list[float]:
    return [run["errors"][-1] for run in runs]


def _spread(runs: list[Run]) -> str:
    """Mean and deviation of the final errors, of one run its error; or empty."""
    errors = _final(runs)
    if len(errors) > 1:
        return f"{statistics.mean(errors):.2f} ± {statistics.stdev(errors):.2f}"
    return f"{errors[0]:.2f}" if errors else ""


def _curves(by_name: dict[str, list[Run]]) -> Callable[[Axes], None]:
    """Test errors after each epoch: the mean of the runs, from the lowest to the highest."""

    def draw(axes: Axes) -> None:
        for name, runs in by_name.items():
            by_epoch = list(zip(*[run["errors"] for run in runs], strict=True))
            epochs = range(1, len(by_epoch) + 1)
            means = [statistics.mean(errors) for errors in by_epoch]
            lowest = [min(errors) for errors in by_epoch]
            highest = [max(errors) for errors in by_epoch]
            axes.plot(epochs, means, label=name)
            axes.fill_between(epochs, lowest, highest, alpha=0.2)
        axes.set_yscale("log")
        ticks = [9, 10, 12, 15, 20, 30, 50, 90]
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("epoch")
        axes.set_ylabel("test error, %")
        axes.legend()

    return draw
