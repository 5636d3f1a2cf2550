"""Train every recipe with every seed that is missing, and write the table and the picture.

``python -m benchmarks.large_batch`` goes on where an earlier one stopped; ``--report`` writes
the table and the picture from the runs that there are.
"""

import argparse
import itertools
from pathlib import Path

from benchmarks.environment import describe
from benchmarks.large_batch.recipes import RECIPES, VARIATIONS
from benchmarks.large_batch.report import publish
from benchmarks.large_batch.runs import Runs
from benchmarks.large_batch.training import train

HERE = Path(__file__).parent
SEEDS = 3


def main() -> None:
    """Train, each run kept as soon as it is done, then report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_batch", description=__doc__)
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each recipe")
    arguments = parser.parse_args()
    runs = Runs(HERE / "runs.json", describe())
    if not arguments.report:
        recipes = [*RECIPES, *itertools.chain(*VARIATIONS.values())]
        for seed, recipe in itertools.product(range(arguments.seeds), recipes):
            if not runs.has(recipe.name, seed):
                run = train(recipe, seed)
                runs.add(run)
                print(f"{recipe.name}, seed {seed}: {run['errors'][-1]:.2f} %", flush=True)
    publish(HERE, runs)


if __name__ == "__main__":
    main()
