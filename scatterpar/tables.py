"""Tables and numbers as text, for ``print``, notebooks and errors."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

_SHOWN = 72  # characters of row numbers in a table or an error


class Printed:
    """IPython shows the object as ``print`` does."""

    def __init_subclass__(cls) -> None:
        """IPython asks a dataclass for ``__repr__`` before it asks its base class."""
        cls._repr_pretty_ = Printed._repr_pretty_  # type: ignore[method-assign]

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(str(self))


def shortened(numbers: str) -> str:
    """A list of numbers as text, cut off behind a number if it is too long."""
    if len(numbers) <= _SHOWN:
        return numbers
    # Numbers are separated by commas, sizes of micro-batches by plus signs.
    end = max(numbers.rfind(",", 0, _SHOWN), numbers.rfind(" +", 0, _SHOWN))
    return numbers[:end] + ", ..."


def as_text(
    table: Sequence[Sequence[str]], align: Callable[[str, int], str] = str.rjust
) -> str:
    """Rows of cells as lines of text.

    The first column is aligned left, the others by ``align``.
    """
    columns = zip(*table, strict=True)
    first_width, *widths = [max(map(len, column)) for column in columns]
    lines: list[str] = []
    for first, *cells in table:
        aligned = [first.ljust(first_width), *map(align, cells, widths)]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def as_html(table: Sequence[Sequence[str]]) -> str:
    """Rows of cells as an HTML table."""
    lines: list[str] = []
    for row in table:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"
