"""A table of files and labels, `--data photos/train.csv`.

image,label
1.jpg,cat           below photos/, or in --train-folder
dog/2,dog           an ending may be missing

image,cat,dog       a column per class
1.jpg,1,0
"""

from __future__ import annotations

import codecs
import csv
import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from scatterpar.train.columns import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    choose_column,
    columns_in_words,
    label_rows,
    usual_column,
)
from scatterpar.train.command_line import Options, UsageError, words_of
from scatterpar.train.folders import find_pictures, is_picture
from scatterpar.train.parts import (
    TRAIN,
    VAL,
    DataParts,
    Files,
    Unused,
    first_names,
    make_parts,
    part_of,
)

ENDINGS = (".csv", ".tsv")
_DELIMITERS = ",;\t|"
_PART_COLUMNS = ("split", "subset", "partition", "set", "is_valid")
_IS_VALID = "is_valid"  # fastai's: whether a row is for validation
_FLAGS = {
    "0": False,
    "1": True,
    "0.0": False,
    "1.0": True,
    "false": False,
    "true": True,
}


def read_table(path: Path, options: Options) -> DataParts:
    """Find the files that a table lists."""
    table = _read(path)
    part_column = _part_column(table)
    columns = [column for column in table[0] if column != part_column]
    image = choose_column(columns, IMAGE_COLUMNS, "image", options.column_image)
    others = [column for column in columns if column != image]
    class_columns = []
    if options.column_label is None and usual_column(others, LABEL_COLUMNS) is None:
        class_columns = _class_columns(table, others)
    if class_columns:
        label = _add_label_column(table, class_columns, image)
        columns = [column for column in columns if column not in class_columns]
    else:
        label = choose_column(others, LABEL_COLUMNS, "label", options.column_label)
    folder = path.parent / (options.train_folder or "")
    places = _places(folder, [row[image] for row in table])
    rows_of_parts: dict[str, list[dict[str, str]]] = {}
    unused = Unused()
    for row in table:
        part = _part_of_row(row, part_column) if part_column else TRAIN
        if part is None:
            unused.add("of other parts", row[part_column])
        else:
            rows_of_parts.setdefault(part, []).append(row)
    labels = {}
    for part, rows in rows_of_parts.items():
        labels[part] = [row[label] for row in rows]
    class_names, pairs_of_parts = label_rows(labels, label, unused)
    pictures = {}
    for part, pairs in pairs_of_parts.items():
        rows = rows_of_parts[part]
        pictures[part] = Files([(places[rows[row][image]], n) for row, n in pairs])
    parts = make_parts(pictures, class_names, unused, options.val)
    parts.notes.append(columns_in_words(image, label, columns))
    return parts


def _read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table, by the names of its columns."""
    content = path.read_bytes()
    is_utf_16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if is_utf_16 else "utf-8-sig")
        first_line = text.partition("\n")[0]
        delimiter = max(_DELIMITERS, key=first_line.count)
        lines = csv.reader(
            text.splitlines(), delimiter=delimiter, skipinitialspace=True
        )
        # A space beside a delimiter would make another class of the same name.
        stripped = [[cell.strip() for cell in line] for line in lines]
    except (ValueError, csv.Error) as error:
        raise UsageError(
            f"it is not a table in UTF-8 ({words_of(error)}); save it as CSV UTF-8, or "
            f"convert it: iconv -f latin1 -t utf-8 {path.name}"
        ) from error
    header, *rows = [line for line in stripped if any(line)] or [[]]
    if not rows:
        raise UsageError("it has no rows below a line with the names of its columns")
    if any(map(is_picture, header)):
        raise UsageError(
            f"its first line has no names of columns, but {first_names(header)}; add "
            "one above it, such as image,label"
        )
    # The last one of a name would hide the others.
    if len(set(header)) < len(header):
        raise UsageError(f"two of its columns have one name: {first_names(header)}")
    for row in rows:
        if len(row) > len(header):
            raise UsageError(
                f"the row {first_names(row)} has {len(row)} cells, and its columns are "
                f"{first_names(header)}"
            )
    return [dict(zip_longest(header, row, fillvalue="")) for row in rows]


def _part_column(table: Sequence[Mapping[str, str]]) -> str:
    """Return the column that says what a row is for, if there is one."""
    for column in table[0]:
        is_named = column.lower() in _PART_COLUMNS
        if is_named and any(_part_of_row(row, column) == TRAIN for row in table):
            return column
    return ""


def _part_of_row(row: Mapping[str, str], column: str) -> str | None:
    if column.lower() == _IS_VALID:
        is_valid = _FLAGS.get(row[column].lower())
        return None if is_valid is None else (VAL if is_valid else TRAIN)
    return part_of(row[column])


def _class_columns(
    table: Sequence[Mapping[str, str]], columns: Sequence[str]
) -> list[str]:
    """Return the columns that say of each row whether it is of their class, if there
    are two at least.
    """
    flags = []
    for column in columns:
        if all(row[column].lower() in _FLAGS for row in table):
            flags.append(column)
    return flags if len(flags) > 1 else []


def _add_label_column(
    table: Sequence[dict[str, str]], class_columns: Sequence[str], image: str
) -> str:
    """Add a column with the class of each row, and return its name.

    Raises a `UsageError` if a row is of no class or of several.
    """
    name = first_names(class_columns)
    for row in table:
        classes = []
        for column in class_columns:
            if _FLAGS[row[column].lower()]:
                classes.append(column)
        if len(classes) != 1:
            raise UsageError(
                f"{row[image]} is of {len(classes)} of the classes {name}, and the "
                "tool trains one class per image: leave out such rows, or pass "
                f"--column-label {class_columns[0]} to learn one column"
            )
        row[name] = classes[0]
    return name


def _places(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the file of each name in a column: a path, or the name of a file below the
    folder, with or without its ending.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    # Tables of competitions name files without folder and ending.
    by_name = dict[str, list[str]]()
    for path in find_pictures(folder, Unused()):
        relative = os.path.relpath(path, folder)
        stem = os.path.splitext(relative)[0]
        names_of_file = {relative, stem}
        names_of_file |= {os.path.basename(name) for name in names_of_file}
        for name in names_of_file:
            by_name.setdefault(name, []).append(path)
    places = {}
    missing = []
    for name in names:
        relative = os.path.normpath(name.replace("\\", "/"))  # as Windows has it
        path = os.path.join(folder, relative)
        matches = by_name.get(relative, [])
        if os.path.isfile(path):
            places[name] = path
        elif len(matches) == 1:
            places[name] = matches[0]
        else:
            missing.append(name)
    if missing:
        raise UsageError(
            f"{len(missing):,} of its {len(names):,} images are not below {folder}, or "
            f"are there twice: {first_names(missing)}; --train-folder names their "
            "folder, and --column-image their column"
        )
    # A picture in two rows could be trained on, and tested.
    files = set(places.values())
    if len(files) < len(names):
        raise UsageError(
            f"it lists {len(names):,} rows, but only {len(files):,} images: one row "
            "for each image is needed"
        )
    return places
