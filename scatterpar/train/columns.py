"""Columns of pictures and labels, in a table or a data set of Hugging Face: which they
are, and which classes the labels name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from scatterpar.train.command_line import Options, UsageError
from scatterpar.train.data_parts import TRAIN, first_names

# Usual names of columns, the most usual first, in lower case and without other signs.
_USUAL = {
    "image": "image img picture photo filename file filepath path imagepath imagename "
    "imageid id name",
    "label": "label labels class classname classlabel category finelabel target "
    "species breed tag tags y",
}
_FEW_CLASSES = 20  # any table may have so many


def choose_column(
    kind: str,
    columns: Sequence[str],
    options: Options,
    likely: Sequence[str] | None = None,
) -> str:
    """Return the column that an option names, else one with a usual name, else the only
    one.

    Args:
        kind: ``"image"`` or ``"label"``, as in the option's name.
        columns: the names of the columns.
        options: the options of the run.
        likely: the columns to choose from if no option names one; by default all.
    """
    column: str | None = getattr(options, f"column_{kind}")
    if column not in (None, *columns):
        raise UsageError(
            f"--column-{kind} {column}: its columns are {first_names(columns)}"
        )
    if likely is None:
        likely = columns
    column = column or usual_column(kind, likely)
    if column is None and len(likely) == 1:
        column = likely[0]
    if column is None:
        raise UsageError(
            f"which column has the {kind}s is not known: --column-{kind} NAME, one of "
            f"{first_names(likely) or 'none'}"
        )
    return column


def usual_column(kind: str, columns: Sequence[str]) -> str | None:
    """Return the column with the most usual name, or None."""
    for name in _USUAL[kind].split():
        for column in columns:
            if re.sub("[^a-z0-9]", "", column.lower()) == name:
                return column
    return None


def columns_in_words(image: str, labels: list[str], columns: Sequence[str]) -> str:
    """Return a line that says which columns are read, and which are not."""
    words = f"images from the column {image}, classes from {first_names(labels)}"
    unused = [column for column in columns if column not in [image, *labels]]
    if unused:
        words += f"; not used: {first_names(unused)}"
    return words


def class_names_of(rows: Sequence[tuple[str, str]], column: str) -> list[str]:
    """Return the classes of the rows to train on, as those of a `Listing`, sorted; by
    number if they are numbers.
    """
    labels = [label for part, label in rows if part == TRAIN]
    names = sorted(set(labels) - {""})
    if len(names) > max(_FEW_CLASSES, len(labels) // 2):
        raise UsageError(
            f"the column {column} has {len(names):,} values for {len(labels):,} "
            "images: --column-label NAME names the column of their classes"
        )
    _refuse_several_classes(names, column)
    # As text 10 would come before 9.
    if all(name.isdigit() for name in names):
        names.sort(key=int)
    return names


def _refuse_several_classes(names: Sequence[str], column: str) -> None:
    """Raise a `UsageError` if a label names several classes: each combination would
    become a class of its own.
    """
    known = set(names)
    counts = Counter(part for name in names for part in name.split(","))
    for name in names:
        words = re.findall(r"""[^\s,;|'"\[\]]+""", name)
        # A name may have spaces and commas, as "great dane" and ImageNet's "tench,
        # Tinca tinca": then its words are no classes.
        is_list = name.startswith("[") or bool(re.search("[;|]", name))
        # As a,b beside b,c and a,c.
        is_joined = "," in name and all(counts[part] > 1 for part in name.split(","))
        are_classes = known.issuperset(words) or is_joined
        if len(words) > 1 and (is_list or are_classes):
            raise UsageError(
                f"the column {column} has several classes for one image ({name}), and "
                "the tool trains one class per image: keep the rows with one class, or "
                "make a column with one of them, and pass --column-label NAME"
            )
