"""Results into the README of their benchmark: table, environment, data and picture."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


@dataclass(frozen=True)
class Table:
    """Columns and rows, as text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __str__(self) -> str:
        head = ["| " + " | ".join(self.columns) + " |"]
        rule = ["|" + "|".join(["---", *["---:"] * (len(self.columns) - 1)]) + "|"]
        body = ["| " + " | ".join(map(str, row)) + " |" for row in self.rows]
        return "\n".join(head + rule + body)


@dataclass(frozen=True)
class Publisher:
    """Writes what one benchmark found into its ``folder``."""

    folder: Path
    environment: dict[str, str]

    def __call__(
        self,
        name: str,
        table: Table,
        data: dict[str, Any],
        draw: Callable[[Any], None] | None = None,
    ) -> None:
        """Put ``table`` between the README's markers for ``name``, and its data beside
        it.

        Args:
            name: what the README's markers and the files are called.
            table: what a reader sees.
            data: all numbers, to be kept as JSON.
            draw: draws the picture on the pair (figure, axes) that it is given.

        """
        print(f"\n{name}\n{table}\n")
        found = {"environment": self.environment, **data}
        (self.folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        environment = "; ".join(
            f"{key} {value}" for key, value in self.environment.items()
        )
        self._replace(name, f"{table}\n\nMeasured on: {environment}.")
        if draw is not None:
            figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
            draw(axes)
            figure.savefig(self.folder / f"{name}.png", dpi=100)
            pyplot.close(figure)

    def _replace(self, name: str, text: str) -> None:
        readme = self.folder / "README.md"
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        page, times = re.subn(
            pattern,
            lambda found: found[1] + text + "\n" + found[2],
            readme.read_text(),
            flags=re.S,
        )
        if times != 1:
            raise ValueError(
                f"{readme.name} needs the markers of {name!r} once, has {times}"
            )
        readme.write_text(page)
