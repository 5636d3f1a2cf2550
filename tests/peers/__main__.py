"""The tests of another library, with two replicas where they train on one device.

    python -m tests.peers lightning ../pytorch-lightning/tests/tests_pytorch trainer loops
    python -m tests.peers trl ../trl tests/test_dpo_trainer.py -k "not vlm"
    python -m tests.peers fastai ../fastai/nbs 13a_learner.ipynb

The first path is a folder of a clone of the library, of the version that is installed;
the others are files and folders in it. Further options are for pytest. Some tests need
models of a hub.

Each test runs with replicas. Those that fail run again as they are. Printed are the
numbers of tests that pass as they are, of those among them that train on one device,
and of these that pass with replicas; and each that does not, with its error.
``build/peers`` has the whole texts. A cell of a notebook is a test; it trains if a cell
before it does.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "build/peers"
# The words of refusals: the pages of the guide name what is refused.
REFUSALS = (
    "does not go together with",
    "It is none of these: ",
)


def outcomes_of(library, folder, paths, options, only=None):
    """Run pytest there, with replicas, or those tests as they are. Returns the outcomes
    by the names of tests.
    """
    RECORD.mkdir(parents=True, exist_ok=True)
    outcomes = RECORD / ("replicas.jsonl" if only is None else "stock.jsonl")
    outcomes.write_text("")
    plugin = ["-p", "peers.plugin", "--peer", library, "--outcomes", str(outcomes)]
    if only is None:
        plugin.append("--replicas")
    else:
        names = RECORD / "failed.txt"
        names.write_text("\n".join(only), encoding="utf-8")
        plugin += ["--only", str(names)]
    path = [str(ROOT), str(ROOT / "tests")]
    if library != "fastai":  # beside its notebooks is its source, of another version
        path += [str(folder), str(folder.parent)]
    path.append(os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    pytest = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-r", "N"]
    pytest += ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    pytest += ["--continue-on-collection-errors", *plugin, *options, *paths]
    subprocess.run(pytest, cwd=folder, env=environment, stdin=subprocess.DEVNULL)
    lines = outcomes.read_text(encoding="utf-8").splitlines()
    return {line["name"]: line for line in map(json.loads, lines)}


def kind_of(outcome):
    """Whether a test passed with replicas, was refused in words, or failed."""
    is_refused = any(words in outcome["text"] for words in REFUSALS)
    return "refused" if is_refused else outcome["outcome"]


def error_of(outcome):
    """The first line of a failed test's error."""
    lines = outcome["text"].splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines[-1:])[0][:200]


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.peers")
    parser.add_argument("library")
    parser.add_argument("folder", type=Path)
    parser.add_argument("paths", nargs="*")
    arguments, options = parser.parse_known_args()
    folder = arguments.folder.resolve()
    where = (arguments.library, folder, arguments.paths, options)
    replicated = outcomes_of(*where)
    failed = [n for n, outcome in replicated.items() if outcome["outcome"] == "failed"]
    stock = outcomes_of(*where, only=failed) if failed else {}
    kinds = Counter()
    num_passed = 0
    for name, outcome in replicated.items():
        as_it_is = stock.get(name, outcome)
        if as_it_is["outcome"] != "passed":
            continue
        num_passed += 1
        kind = kind_of(outcome)
        if kind != "passed":
            print(f"{kind}: {name}: {error_of(outcome)}")
        # A test that never trains on one device meets no replicas.
        if as_it_is["trainings"]:
            kinds[kind] += 1
    numbers = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    print(
        f"{num_passed} tests pass as they are, of which {kinds.total()} train on one "
        f"device; with replicas: {numbers}"
    )


if __name__ == "__main__":
    main()
