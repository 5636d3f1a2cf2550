"""Does the accuracy hold when the batch grows from 256 to 16,384?

::

    for each network, recipe and seed without a run:
        train, and store the run          training.py, runs.py
    write tables and pictures             report.py

``python -m benchmarks.large_batch`` goes on where an earlier one stopped. ``--report``
trains nothing. ``--validate`` tries the recipes of the last table on images that were
held out of training, once each.
"""

import argparse
from pathlib import Path

from benchmarks.environment import describe
from benchmarks.large_batch.recipes import CLOSING, RECIPES, VALIDATED, VARIATIONS
from benchmarks.large_batch.report import publish, publish_closing
from benchmarks.large_batch.runs import Runs
from benchmarks.large_batch.training import HELD_OUT, NETWORKS, Recipe, train

HERE = Path(__file__).parent
SEEDS = 3
CLOSED = "cnn"  # the network whose loss of accuracy is looked into


def main() -> None:
    """Train what is missing, then report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.large_batch", description=__doc__
    )
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each recipe")
    parser.add_argument(
        "--network", choices=NETWORKS, action="append", help="by default all"
    )
    parser.add_argument(
        "--validate", action="store_true", help=f"test on {HELD_OUT:,} held out"
    )
    parser.add_argument(
        "--closing", action="store_true", help="the last table's rows first"
    )
    arguments = parser.parse_args()
    for network in arguments.network or NETWORKS:
        runs = Runs(HERE / f"runs-{network}.json", describe())
        validated = Runs(HERE / f"runs-{network}-held-out.json", describe())
        if arguments.validate:
            pairs = [(0, recipe) for recipe in VALIDATED]
            make(network, validated, pairs, HELD_OUT)
        elif not arguments.report:
            make(network, runs, wanted(network, arguments.seeds, arguments.closing))
        publish(HERE, network, runs)
        if network == CLOSED:
            publish_closing(HERE, network, runs, validated)


def make(
    network: str, runs: Runs, pairs: list[tuple[int, Recipe]], held_out: int = 0
) -> None:
    """Make the runs of these seeds and recipes that are missing.

    Each run is stored as soon as it is done.
    """
    for seed, recipe in pairs:
        if runs.has(recipe.name, seed):
            continue
        run = train(network, recipe, seed, held_out)
        runs.add(run)
        error = f"{run['errors'][-1]:.2f} %"
        print(f"{network}: {recipe.name}, seed {seed}: {error}", flush=True)


def wanted(network: str, seeds: int, closing: bool) -> list[tuple[int, Recipe]]:
    """All seeds and recipes, the most important first: those of the first table.

    With ``closing`` those of the last table come first.
    """
    variations = [recipe for pair in VARIATIONS.values() for recipe in pair]
    tables = [RECIPES, variations]
    if network == CLOSED:
        tables.insert(0 if closing else len(tables), CLOSING)
    pairs = []
    for recipes in tables:
        # Whole rounds of seeds: a table is complete with one run of each row.
        for seed in range(seeds):
            pairs += [(seed, recipe) for recipe in recipes]
    return pairs


if __name__ == "__main__":
    main()
