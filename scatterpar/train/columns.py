"""Columns of pictures and labels, in a table or a data set of Hugging Face: which they
are, and which classes the labels name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from scatterpar.train.command_line import UsageError
from scatterpar.train.data_parts import (
    TRAIN,
    UNKNOWN_CLASS,
    UNLABELLED,
    Unused,
    first_names,
)

# Usual names of columns, the most usual first, in lower case and without other signs.
IMAGE_COLUMNS = (
    "image img picture photo filename file filepath path imagepath imagename imageid "
    "id name"
)
LABEL_COLUMNS = (
    "label labels class classname classlabel category finelabel target species breed "
    "tag tags y"
)
_FEW_CLASSES = 20  # any table may have so many


def choose_column(
    columns: Sequence[str], usual: str, kind: str, chosen: str | None
) -> str:
    """Return the column that an option names, else one with a usual name, else the only
    one.

    Args:
        columns: the names of the columns.
        usual: the usual names.
        kind: ``"image"`` or ``"label"``, as in the option's name.
        chosen: the value of the option.
    """
    listed = first_names(columns)
    if chosen is not None:
        if chosen not in columns:
            raise UsageError(f"--column-{kind} {chosen}: its columns are {listed}")
        return chosen
    column = usual_column(columns, usual)
    if column is not None:
        return column
    if len(columns) == 1:
        return columns[0]
    raise UsageError(
        f"which column has the {kind}s is not known: --column-{kind} NAME, one of "
        f"{listed or 'none'}"
    )


def usual_column(columns: Sequence[str], usual: str) -> str | None:
    """Return the column with the most usual name, or None."""
    for name in usual.split():
        for column in columns:
            if re.sub("[^a-z0-9]", "", column.lower()) == name:
                return column
    return None


def columns_in_words(image: str, label: str, columns: Sequence[str]) -> str:
    """Return a line that says which columns are read, and which are not."""
    words = f"images from the column {image}, classes from {label}"
    others = [column for column in columns if column not in (image, label)]
    if others:
        words += f"; not used: {first_names(others)}"
    return words


def label_rows(
    labels_of_parts: Mapping[str, Sequence[Any]],
    column: str,
    unused: Unused,
    names: Sequence[str] | None = None,
) -> tuple[Sequence[str], dict[str, list[tuple[int, int]]]]:
    """Return the names of the classes; and of each part the rows that have a class,
    each with the number of the class.

    Args:
        labels_of_parts: the labels of the rows, as text or numbers, by part.
        column: the name of their column.
        unused: counts the rows without a class.
        names: the names of the classes; by default those of the training images.
    """
    if TRAIN not in labels_of_parts:
        raise UsageError("it has no images to train on: no part is called train")
    class_names = names or class_names_of(labels_of_parts[TRAIN], column)
    pairs_of_parts = {}
    for part, labels in labels_of_parts.items():
        pairs = labelled_rows(labels, class_names, unused)
        if pairs:
            pairs_of_parts[part] = pairs
    if TRAIN not in pairs_of_parts:
        raise UsageError(f"its images to train on have no {column}")
    return class_names, pairs_of_parts


def class_names_of(labels: Sequence[Any], column: str) -> list[str]:
    """Return the classes that labels name, sorted; by number if they are numbers."""
    names = sorted({str(label) for label in labels if not _is_missing(label)})
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
    for name in names:
        words = re.findall(r"""[^\s,;|'"\[\]]+""", name)
        # A name may have spaces and commas, as "great dane" and ImageNet's "tench,
        # Tinca tinca": then its words are no classes.
        is_list = name.startswith("[") or bool(re.search("[;|]", name))
        if len(words) > 1 and (is_list or known.issuperset(words)):
            raise UsageError(
                f"the column {column} has several classes for one image ({name}), and "
                "the tool trains one class per image: keep the rows with one class, or "
                "make a column with one of them, and pass --column-label NAME"
            )


def _is_missing(label: Any) -> bool:
    return label is None or label == "" or label != label  # NaN


def labelled_rows(
    labels: Sequence[Any], class_names: Sequence[str], unused: Unused
) -> list[tuple[int, int]]:
    """Return the rows whose label is a class, each with the number of the class."""
    numbers = {name: number for number, name in enumerate(class_names)}
    pairs = []
    for row, label in enumerate(labels):
        if _is_missing(label):
            unused.add(UNLABELLED)
        elif str(label) in numbers:
            pairs.append((row, numbers[str(label)]))
        else:
            unused.add(UNKNOWN_CLASS, str(label))
    return pairs
