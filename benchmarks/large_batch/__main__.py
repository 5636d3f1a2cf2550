"""Train every recipe with every seed that is missing, and write the tables and the
pictures.

``python -m benchmarks.large_batch`` goes on where an earlier one stopped; ``--report``
writes the tables and the pictures from the runs that there are; ``--validate`` tries
the recipes of the last table on images that were held out of training, once each.
"""

import argparse
import itertools
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
    """Train, each run kept as soon as it is done, then report."""
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
            make(network, validated, [(0, recipe) for recipe in VALIDATED], HELD_OUT)
        elif not arguments.report:
            make(network, runs, wanted(network, arguments.seeds, arguments.closing))
        publish(HERE, network, runs)
        if network == CLOSED:
            publish_closing(HERE, network, runs, validated)


def make(
    network: str, runs: Runs, wanted: list[tuple[int, Recipe]], held_out: int = 0
) -> None:
    """Make the runs that are missing; each is kept as soon as it is done."""
    for seed, recipe in wanted:
        if not runs.has(recipe.name, seed):
            run = train(network, recipe, seed, held_out)
            runs.add(run)
            print(
                f"{network}: {recipe.name}, seed {seed}: {run['errors'][-1]:.2f} %",
                flush=True,
            )


def wanted(network: str, seeds: int, closing: bool) -> list[tuple[int, Recipe]]:
    """All runs in the order of their importance: whole rows of the first table come
    first.
    """
    tables = [RECIPES, list(itertools.chain(*VARIATIONS.values()))]
    if network == CLOSED:
        tables.insert(0 if closing else len(tables), CLOSING)
    return [
        run for recipes in tables for run in itertools.product(range(seeds), recipes)
    ]


if __name__ == "__main__":
    main()
