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


def shown(numbers: str) -> str:
    """A list of numbers as text, cut off behind one of them if it is too long for a
    line.
    """
    if len(numbers) <= _SHOWN:
        return numbers
    return (
        numbers[: max(numbers.rfind(sign, 0, _SHOWN) for sign in (",", " +"))] + ", ..."
    )


def as_text(
    table: Sequence[Sequence[str]], align: Callable[[str, int], str] = str.rjust
) -> str:
    """Rows of cells as lines of text. The first column is aligned left, the others by
    ``align``.
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(align, row[1:], widths[1:])]).rstrip()
        for row in table
    )


def as_html(table: Sequence[Sequence[str]]) -> str:
    """Rows of cells as an HTML table."""
    lines: list[str] = []
    for row in table:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"
