"""A table of files and labels, `--data photos/train.csv`.

image,label
1.jpg,cat           below photos/, or in --train-folder
dog/2,dog           an ending may be missing

image,cat,dog       a column per class
1.jpg,1,0
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scatterpar.train.columns import (
    choose_column,
    class_names_of,
    columns_in_words,
    usual_column,
)
from scatterpar.train.command_line import Options, UsageError, words_of
from scatterpar.train.data_parts import TRAIN, VAL, Listing, first_names, part_of
from scatterpar.train.folders import find_pictures, is_picture
from scatterpar.train.libraries import installed

_DELIMITERS = ",;\t|"
_ENCODING = "utf-8-sig"  # spreadsheets begin a file with a mark
_PART_COLUMNS = ("split", "subset", "partition", "set")
_IS_VALID = "is_valid"  # fastai's: whether a row is for validation
# As spreadsheets and pandas write them.
_YES = ("1", "1.0", "true", "True", "TRUE")
_NO = ("0", "0.0", "false", "False", "FALSE")


def read_table(path: Path, options: Options) -> Listing:
    """Find the files that a table lists."""
    table = _read(path)
    parts = _parts_of_rows(table)
    columns = [column for column in table if column != parts.name]
    image = choose_column("image", columns, options)
    other_columns = [column for column in columns if column != image]
    label_columns, labels = _labels(table, other_columns, options)
    folder = path.parent / (options.train_folder or "")
    rows = list(zip(parts, labels, strict=True))
    return Listing(
        _places(folder, table[image]),
        rows,
        class_names_of(rows, label_columns[0]),
        notes=[columns_in_words(image, label_columns, columns)],
    )


def _labels(
    table: Any, columns: Sequence[str], options: Options
) -> tuple[list[str], Any]:
    """Return the column of labels, or all columns of classes; and the label of each
    row.
    """
    flags = [column for column in columns if table[column].isin(_YES + _NO).all()]
    is_named = options.column_label or usual_column("label", columns)
    if is_named or len(flags) < 2:
        label = choose_column("label", columns, options)
        return [label], table[label]
    is_of_class = table[flags].isin(_YES)
    has_one_class = is_of_class.sum(axis=1) == 1
    if not has_one_class.all():
        raise UsageError(
            f"row {has_one_class.idxmin() + 1} is not of one of the classes "
            f"{first_names(flags)}, and the tool trains one class per image: leave out "
            f"such rows, or pass --column-label {flags[0]} to learn one column"
        )
    return flags, is_of_class.idxmax(axis=1)


def _read(path: Path) -> Any:
    """Return a table of texts, by the names of its columns."""
    pandas = installed("pandas", "images")
    try:
        with path.open(encoding=_ENCODING) as file:
            # Not pandas' own guess, which takes letters for delimiters.
            delimiter = max(_DELIMITERS, key=file.readline().count)
        table = pandas.read_csv(
            path,
            sep=delimiter,
            encoding=_ENCODING,
            dtype=str,
            keep_default_na=False,  # a class may be called NA
            skipinitialspace=True,
        )
    except ValueError as error:  # also pandas' errors
        raise UsageError(
            f"it is not a table in UTF-8 ({words_of(error)}); save it as CSV UTF-8"
        ) from error
    # pandas takes cells beyond the names of columns for names of rows.
    if not isinstance(table.index, pandas.RangeIndex):
        raise UsageError(
            f"its rows have more cells than the columns {first_names(list(table))}"
        )
    # A space beside a delimiter would make another class of the same name.
    table.columns = table.columns.str.strip()
    table = table.fillna("").apply(lambda column: column.str.strip())
    # Spreadsheets leave rows without content at the end.
    table = table[(table != "").any(axis=1)].reset_index(drop=True)
    if any(map(is_picture, table)):
        raise UsageError(
            f"its first line has no names of columns, but {first_names(list(table))}; "
            "add one above it, such as image,label"
        )
    if table.empty:
        raise UsageError("it has no rows below a line with the names of its columns")
    return table


def _parts_of_rows(table: Any) -> Any:
    """Return the part of each row, a column with the name of the table's column that
    says so.
    """
    for column in table:
        name = column.lower()
        if name == _IS_VALID:
            parts = table[column].isin(_YES).map({True: VAL, False: TRAIN})
        elif name in _PART_COLUMNS:
            parts = table[column].map(part_of).fillna(table[column])
        else:
            continue
        # Otherwise the column has other values, such as the set of a card.
        if (parts == TRAIN).any():
            return parts
    return table.index.to_series().map(lambda row: TRAIN)


def _places(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the file of each name in a column: a path, or the name of a file below the
    folder, with or without its ending.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    # Tables of competitions name files without folder and ending.
    by_name = defaultdict[str, set[str]](set)
    for path in find_pictures(folder, Counter()):
        for name in (os.path.relpath(path, folder), os.path.basename(path)):
            stem = os.path.splitext(name)[0]
            by_name[name].add(path)
            by_name[stem].add(path)
    places = list[str]()
    missing = []
    for name in names:
        relative = os.path.normpath(name.replace("\\", "/"))  # as Windows has it
        path = os.path.join(folder, relative)
        matches = {path} if os.path.isfile(path) else by_name[relative]
        if len(matches) != 1:
            missing.append(name)
        places += matches
    if missing:
        raise UsageError(
            f"{len(missing):,} of its {len(names):,} images are not below {folder}, or "
            f"are there twice: {first_names(missing)}; --train-folder names their "
            "folder, and --column-image their column"
        )
    # A picture in two rows could be trained on, and tested.
    number = len(set(places))
    if number < len(names):
        raise UsageError(
            f"it lists {len(names):,} rows, but only {number:,} images: one row for "
            "each image is needed"
        )
    return places
