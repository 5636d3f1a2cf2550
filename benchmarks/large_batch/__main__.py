"""Train every recipe with every seed that is missing, and write the tables and the pictures.

``python -m benchmarks.large_batch`` goes on where an earlier one stopped; ``--report`` writes
the tables and the pictures from the runs that there are.
"""

import argparse
import itertools
from pathlib import Path

from benchmarks.environment import describe
from benchmarks.large_batch.recipes import RECIPES, VARIATIONS
from benchmarks.large_batch.report import publish
from benchmarks.large_batch.runs import Runs
from benchmarks.large_batch.training import NETWORKS, Recipe, train

HERE = Path(__file__).parent
SEEDS = 3


def main() -> None:
    """Train, each run kept as soon as it is done, then report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_batch", description=__doc__)
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each recipe")
    parser.add_argument("--network", choices=NETWORKS, action="append", help="by default all")
    arguments = parser.parse_args()
    for network in arguments.network or NETWORKS:
        runs = Runs(HERE / f"runs-{network}.json", describe())
        for seed, recipe in wanted(arguments.seeds):
            if not arguments.report and not runs.has(recipe.name, seed):
                run = train(network, recipe, seed)
                runs.add(run)
                print(
                    f"{network}: {recipe.name}, seed {seed}: {run['errors'][-1]:.2f} %", flush=True
                )
        publish(HERE, network, runs)


def wanted(seeds: int) -> list[tuple[int, Recipe]]:
    """All runs in the order of their importance: whole rows of the first table come first."""
    variations = itertools.chain(*VARIATIONS.values())
    return [
        (seed, recipe)
        for recipes in (RECIPES, list(variations))
        for seed, recipe in itertools.product(range(seeds), recipes)
    ]


if __name__ == "__main__":
    main()
