"""The runs that were made, in a file that is complete after each of them."""

import json
import os
from pathlib import Path
from typing import Any

Run = dict[str, Any]


class Runs:
    """What ``train`` returned, run by run, with the environment of the first.

    Args:
        path: the JSON file; made with the first run.
        environment: of this machine, for a file that is not there yet.

    """

    def __init__(self, path: Path, environment: dict[str, str]) -> None:
        self._path = path
        stored = json.loads(path.read_text()) if path.exists() else {}
        self.environment: dict[str, str] = stored.get("environment", environment)
        self._runs: list[Run] = stored.get("runs", [])

    def has(self, recipe: str, seed: int) -> bool:
        """Whether that run was made."""
        return any(run["seed"] == seed for run in self.of(recipe))

    def of(self, recipe: str) -> list[Run]:
        """The runs of a recipe."""
        return [run for run in self._runs if run["recipe"] == recipe]

    def add(self, run: Run) -> None:
        """Store a run in the file."""
        self._runs.append(run)
        stored = {"environment": self.environment, "runs": self._runs}
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(stored, indent=1) + "\n")
        os.replace(new, self._path)  # so the file is complete at any time
