"""Results into the README of their benchmark: table, environment, data and picture."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.markers import replace

matplotlib.use("Agg")  # before pyplot is imported: pictures go to files
from matplotlib import pyplot


@dataclass(frozen=True)
class Table:
    """Columns and rows, as text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __str__(self) -> str:
        """The table in Markdown: the first column to the left, the others to the right."""
        alignment = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [_line(self.columns), "|" + "|".join(alignment) + "|"]
        for row in self.rows:
            lines.append(_line(row))
        return "\n".join(lines)


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


@dataclass(frozen=True)
class Publisher:
    """Writes the results of one benchmark into its ``folder``."""

    folder: Path
    environment: dict[str, str]

    def __call__(
        self,
        name: str,
        table: Table | str,
        data: dict[str, Any],
        draw: Callable[[Any], None] | None = None,
    ) -> None:
        """Put ``table`` between the README's markers for ``name``, its data beside it.

        Args:
            name: what the README's markers and the files are called.
            table: what a reader sees.
            data: all numbers, to be kept as JSON.
            draw: draws the picture on the axes that it is given.

        """
        print(f"\n{name}\n{table}\n")
        numbers = {"environment": self.environment, **data}
        text = json.dumps(numbers, indent=1) + "\n"
        (self.folder / f"{name}.json").write_text(text)
        facts = "; ".join(f"{key} {value}" for key, value in self.environment.items())
        page = self.folder / "README.md"
        replace(page, name, f"{table}\n\nMeasured on: {facts}.")
        if draw is not None:
            figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
            draw(axes)
            figure.savefig(self.folder / f"{name}.png", dpi=100)
            pyplot.close(figure)
