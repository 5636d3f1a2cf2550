"""A table of files and labels, `--data photos/train.csv`.

image,label
1.jpg,cat           below photos/, or in --train-folder
dog/2,dog           an ending may be missing

image,cat,dog       a column per class
1.jpg,1,0
"""

from __future__ import annotations

import codecs
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scatterpar.train.columns import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    choose_column,
    columns_in_words,
    label_rows,
    usual_column,
)
from scatterpar.train.command_line import Options, UsageError, words_of
from scatterpar.train.data_parts import (
    TRAIN,
    VAL,
    DataParts,
    Files,
    Unused,
    first_names,
    make_parts,
    part_of,
)
from scatterpar.train.folders import find_pictures, is_picture
from scatterpar.train.libraries import installed

ENDINGS = (".csv", ".tsv")
_DELIMITERS = ",;\t|"
_PART_COLUMNS = ("split", "subset", "partition", "set")
_IS_VALID = "is_valid"  # fastai's: whether a row is for validation
# As spreadsheets and pandas write them.
_YES = ("1", "1.0", "true", "True", "TRUE")
_NO = ("0", "0.0", "false", "False", "FALSE")


def read_table(path: Path, options: Options) -> DataParts:
    """Find the files that a table lists."""
    table = _read(path)
    part_column, parts = _parts_of_rows(table)
    columns = [column for column in table if column != part_column]
    image = choose_column(columns, IMAGE_COLUMNS, "image", options.column_image)
    others = [column for column in columns if column != image]
    flags = [column for column in others if table[column].isin(_YES + _NO).all()]
    is_named = options.column_label or usual_column(others, LABEL_COLUMNS)
    if len(flags) > 1 and not is_named:
        label = first_names(flags)
        table[label] = _classes_of_flags(table, flags, image)
        columns = [column for column in columns if column not in flags]
    else:
        label = choose_column(others, LABEL_COLUMNS, "label", options.column_label)
    folder = path.parent / (options.train_folder or "")
    places = _places(folder, table[image])
    unused = Unused()
    rows_of_parts = defaultdict[str, list[int]](list)
    for row, part in enumerate(parts):
        if part is None:
            unused.add("of other parts", table[part_column][row])
        else:
            rows_of_parts[part].append(row)
    labels = {part: table[label][rows] for part, rows in rows_of_parts.items()}
    class_names, pairs_of_parts = label_rows(labels, label, unused)
    pictures = {}
    for part, pairs in pairs_of_parts.items():
        rows = rows_of_parts[part]
        pictures[part] = Files([(places[rows[row]], number) for row, number in pairs])
    made = make_parts(pictures, class_names, unused, options.val)
    made.notes.append(columns_in_words(image, label, columns))
    return made


def _read(path: Path) -> Any:
    """Return a table of texts, by the names of its columns."""
    pandas = installed("pandas", "images")
    # Spreadsheets save "Unicode text" in UTF-16, which begins with a mark.
    is_utf_16 = path.read_bytes().startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = "utf-16" if is_utf_16 else "utf-8-sig"
    try:
        with path.open(encoding=encoding) as file:
            # Not pandas' own guess, which takes letters for delimiters.
            delimiter = max(_DELIMITERS, key=file.readline().count)
        table = pandas.read_csv(
            path,
            sep=delimiter,
            encoding=encoding,
            dtype=str,
            keep_default_na=False,  # a class may be called NA
            skipinitialspace=True,
        )
    except ValueError as error:  # also pandas' errors
        raise UsageError(
            f"it is not a table in UTF-8 ({words_of(error)}); save it as CSV UTF-8, or "
            f"convert it: iconv -f latin1 -t utf-8 {path.name}"
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


def _parts_of_rows(table: Any) -> tuple[str, list[str | None]]:
    """Return the column that says what a row is for, if there is one, and the part of
    each row.
    """
    parts: list[str | None]
    for column in table:
        name = column.lower()
        if name == _IS_VALID:
            parts = [
                VAL if is_valid else TRAIN for is_valid in table[column].isin(_YES)
            ]
        elif name in _PART_COLUMNS:
            parts = [part_of(text) for text in table[column]]
        else:
            continue
        # Otherwise the column has other values, such as the set of a card.
        if TRAIN in parts:
            return column, parts
    return "", [TRAIN] * len(table)


def _classes_of_flags(table: Any, flags: Sequence[str], image: str) -> Any:
    """Return the class of each row, whose column alone has a one.

    Raises a `UsageError` if a row is of no class or of several.
    """
    is_of_class = table[flags].isin(_YES)
    numbers = is_of_class.sum(axis=1)
    wrong = numbers[numbers != 1]
    if len(wrong):
        row = wrong.index[0]
        raise UsageError(
            f"{table[image][row]} is of {wrong[row]} of the classes "
            f"{first_names(flags)}, and the tool trains one class per image: leave out "
            f"such rows, or pass --column-label {flags[0]} to learn one column"
        )
    return is_of_class.idxmax(axis=1)


def _places(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the file of each name in a column: a path, or the name of a file below the
    folder, with or without its ending.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    # Tables of competitions name files without folder and ending.
    by_name = defaultdict[str, set[str]](set)
    for path in find_pictures(folder, Unused()):
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
