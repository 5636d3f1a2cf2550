"""A table of files and labels, `--data photos/train.csv`.

image,label
1.jpg,cat           below photos/, or in --train-folder
dog/2,dog           an ending may be missing
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from scatterpar.train.command_line import Options, UsageError, words_of
from scatterpar.train.folders import find_pictures
from scatterpar.train.parts import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    PART_COLUMNS,
    TRAIN,
    DataParts,
    Files,
    Unused,
    choose_column,
    class_names_of,
    first_names,
    labelled_rows,
    make_parts,
    part_of,
)

ENDINGS = (".csv", ".tsv")


def read_table(path: Path, options: Options) -> DataParts:
    """Find the files that a table lists."""
    table = _read(path)
    columns = list(table[0])
    image = choose_column(columns, IMAGE_COLUMNS, "image", options.column_image)
    others = [column for column in columns if column != image]
    part_column = _part_column(others, table)
    if part_column:
        others.remove(part_column)
    label = choose_column(others, LABEL_COLUMNS, "label", options.column_label)
    folder = path.parent / (options.train_folder or "")
    places = _places(folder, [row[image] for row in table])
    rows_of_parts: dict[str, list[int]] = {}
    unused = Unused()
    for number, row in enumerate(table):
        part = part_of(row[part_column]) if part_column else TRAIN
        if part is None:
            unused.add("of other parts", row[part_column])
        else:
            rows_of_parts.setdefault(part, []).append(number)
    if TRAIN not in rows_of_parts:
        raise UsageError(f"its column {part_column} has no train")
    class_names = class_names_of(
        [table[number][label] for number in rows_of_parts[TRAIN]], label
    )
    pictures = {}
    for part, numbers in rows_of_parts.items():
        labels = [table[number][label] for number in numbers]
        pairs = labelled_rows(labels, class_names, unused)
        if pairs:
            files = [(places[numbers[row]], number) for row, number in pairs]
            pictures[part] = Files(files)
    parts = make_parts(pictures, class_names, unused, options.val)
    parts.notes.append(f"images from the column {image}, classes from {label}")
    return parts


def _read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table, by the names of its columns."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        first_line = text.partition("\n")[0]
        delimiter = max(",;\t", key=first_line.count)
        reader = csv.DictReader(text.splitlines(), delimiter=delimiter, restval="")
        table = list(reader)
    except (ValueError, csv.Error) as error:
        raise UsageError(f"it is not a table: {words_of(error)}") from error
    if not table:
        raise UsageError("it has no rows below a line with the names of its columns")
    return table


def _part_column(columns: Sequence[str], table: Sequence[Mapping[str, str]]) -> str:
    """Return the column that says what a row is for, if there is one."""
    for column in columns:
        is_named = column.lower() in PART_COLUMNS.split()
        if is_named and any(part_of(row[column]) == TRAIN for row in table):
            return column
    return ""


def _places(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the files that a column names, which are below the folder."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    # Names in a column are paths or names of files, with or without an ending.
    by_name = dict[str, list[str]]()
    for path in find_pictures(folder, Unused()):
        relative = os.path.relpath(path, folder)
        stem = os.path.splitext(relative)[0]
        names_of_file = {relative, stem}
        names_of_file |= {os.path.basename(name) for name in names_of_file}
        for name in names_of_file:
            by_name.setdefault(name, []).append(path)
    files = []
    missing = []
    for name in names:
        relative = os.path.normpath(name)
        matches = by_name.get(relative, [])
        path = os.path.join(folder, relative)
        if path in matches:
            files.append(path)
        elif len(matches) == 1:
            files += matches
        else:
            missing.append(name)
    if missing:
        raise UsageError(
            f"of {len(names):,} images {len(missing):,} are not below {folder}, or "
            f"are there twice: {first_names(missing)}; --train-folder names their "
            "folder"
        )
    if len(set(files)) < len(files):
        raise UsageError(
            f"it lists {len(files):,} rows, but only {len(set(files)):,} images: one "
            "row for each image is needed"
        )
    return files
