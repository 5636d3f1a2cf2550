"""Folders of pictures: which of them is for what, and the files of each class.

photos/Training/cat/1.jpg        photos/cat/1.jpg      with --val 0.1
photos/valid/cat/2.jpg           photos/dog/2.jpg
photos/test/cat/3.jpg
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from scatterpar.train.command_line import Options, UsageError
from scatterpar.train.data_parts import (
    TEST,
    TRAIN,
    VAL,
    DataParts,
    ListedPictures,
    Names,
    first_names,
    is_part_name,
    make_parts,
    part_of,
    unread_in_words,
)
from scatterpar.train.libraries import library

_MAC_COPY = "__MACOSX"  # a folder that macOS adds to its archives
_WHICH = (
    "--train-folder NAME and --val-folder NAME say which is which (--train-folder . "
    "if all are classes)"
)

_MOST_PARTS = 10  # of a data set, such as folds


def read_folders(path: Path, options: Options) -> DataParts:
    """Find the files of a data set in the folders of `path`."""
    parts = _chosen_parts(path, options) or _find_parts(path)
    folders = {part: _unwrapped(folder, part) for part, folder in parts.items()}
    train = folders[TRAIN]
    class_folders = visible_folders(train)
    class_names = [folder.name for folder in class_folders]
    if len(class_names) < 2:
        raise UsageError(
            f"{train} needs a folder for each class, two at least; it has "
            f"{class_names}{_hint(train)}"
        )
    unread = Counter[str]()
    rows_of_parts = {}
    for part, folder in folders.items():
        rows_of_parts[part] = rows_of_folder(folder, unread)
    empty = set(class_names).difference(rows_of_parts[TRAIN].labels)
    if empty:
        raise UsageError(
            f"{train} lacks pictures of {first_names(sorted(empty))}: it is searched "
            f"for files that end in {', '.join(endings())}; convert other files, and "
            f"remove folders without any (not read: {unread_in_words(unread)})"
        )
    if train != path:  # else the other folders are the classes
        for folder in visible_folders(path):
            if folder not in parts.values():
                for _ in files_below(folder, unread):
                    unread[f"in other folders ({folder.name}/)"] += 1
    data_parts = make_parts(rows_of_parts, class_names, unread, options.val)
    data_parts.notes += _joined_folders(class_folders)
    return data_parts


def rows_of_folder(folder: Path, unread: Counter[str]) -> ListedPictures:
    """Find the pictures in folders of classes, at any depth, and count files that are
    not read. Pictures beside these folders have no class.
    """
    names = list(find_pictures(folder, unread))
    labels = []
    for name in names:
        names_on_way = Path(name).relative_to(folder).parts
        labels.append(names_on_way[0] if len(names_on_way) > 1 else "")
    return ListedPictures(Names(names), labels)


def _joined_folders(class_folders: Sequence[Path]) -> list[str]:
    """Return a line that names folders whose pictures become one class."""
    joined = []
    for folder in class_folders:
        inner = visible_folders(folder)
        if len(inner) > 1:
            joined.append(f"{folder.name} ({first_names([e.name for e in inner], 3)})")
    if not joined:
        return []
    return [f"the folders in a class are one class: {first_names(joined)}"]


def _chosen_parts(path: Path, options: Options) -> dict[str, Path]:
    """Return the folders that the options name."""
    chosen = {
        TRAIN: options.train_folder,
        VAL: options.val_folder,
        TEST: options.test_folder,
    }
    parts = {}
    for part, folder in chosen.items():
        if folder is None:
            continue
        parts[part] = path / folder
        if not parts[part].is_dir():
            raise UsageError(f"--{part}-folder: there is no folder {parts[part]}")
    if parts and TRAIN not in parts:
        raise UsageError("--train-folder is missing, beside --val-folder")
    return parts


def _find_parts(path: Path) -> dict[str, Path]:
    """Return the folders of `path` whose names are those of parts; `path` itself, to
    train on, if its folders are classes.
    """
    folders = visible_folders(path)
    folders_of_parts = defaultdict[str, list[Path]](list)
    for folder in folders:
        part = part_of(folder.name)
        if part is not None:
            folders_of_parts[part].append(folder)
    named = list(chain.from_iterable(folders_of_parts.values()))
    exact = [folder for folder in named if is_part_name(folder.name)]
    listed = ", ".join(f"{folder.name}/" for folder in folders)
    if not any(map(visible_folders, named)):
        # Classes may have such names: trains beside buses, or crash tests.
        are_parts = 0 < len(folders) == len(folders_of_parts)
        if are_parts or len(exact) == len(named) > 1:
            raise UsageError(
                f"the pictures in {listed} are in no folders of classes, as "
                f"train/cat/1.jpg; {_labels_elsewhere(path)}"
            )
        _refuse_unnamed_parts(folders)
        return {TRAIN: path}
    parts = {}
    for part, candidates in folders_of_parts.items():
        # train/ is meant, if there is train_masks/, too.
        chosen = [folder for folder in candidates if folder in exact] or candidates
        if len(chosen) == 1:
            parts[part] = chosen[0]
    is_complete = len(parts) > 1 or len(folders) == 1
    are_clear = len(parts) == len(folders_of_parts) and is_complete
    if not (are_clear and TRAIN in parts and visible_folders(parts[TRAIN])):
        raise UsageError(
            f"which of its folders {listed} has the classes to train on, and which is "
            f"to test on, is not clear: {_WHICH}"
        )
    return parts


def _unwrapped(folder: Path, part: str) -> Path:
    """Return the folder of a part in a folder of the same part, as archives have it:
    seg_train/seg_train/cat.
    """
    folders = visible_folders(folder)
    if len(folders) == 1 and part_of(folders[0].name) == part:
        return _unwrapped(folders[0], part)
    return folder


def _refuse_unnamed_parts(folders: Sequence[Path]) -> None:
    """Raise a `UsageError` if folders that would be classes have the same folders."""
    # Many folders are classes, each with images/ and masks/.
    if len(folders) > _MOST_PARTS:
        return
    counts = Counter[str]()
    for folder in folders:
        counts.update({entry.name.lower() for entry in visible_folders(folder)})
    common = sorted(name for name, number in counts.items() if number > 1)
    if len(common) > 1:
        names = " and ".join(f"{folder.name}/" for folder in folders)
        raise UsageError(
            f"its folders {names} have the same folders ({first_names(common)}), so "
            f"they are no classes: {_WHICH}"
        )


def _hint(path: Path) -> str:
    """Return what may be meant by a folder without folders of classes."""
    folders = visible_folders(path)
    if len(folders) == 1 and visible_folders(folders[0]):
        return f"; did you mean {folders[0]}?"
    pictures = [name for name in os.listdir(path) if is_picture(name)]
    if pictures and not folders:
        return f"; {len(pictures):,} pictures are in no folder of a class; " + (
            _labels_elsewhere(path)
        )
    return ""


def _labels_elsewhere(path: Path) -> str:
    tables = sorted([*path.glob("*.csv"), *path.glob("*.tsv")])
    if tables:
        return f"if a table has their labels, pass --data {tables[0]}"
    return "make a folder for each class, or pass a table of files and labels: x.csv"


def visible_folders(path: Path) -> list[Path]:
    """Return the folders in a folder, sorted, without hidden ones."""
    folders = []
    # Sorted: the order of a disk would number classes otherwise on another machine.
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and not _is_hidden(entry.name):
            folders.append(entry)
    return folders


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == _MAC_COPY


def endings() -> tuple[str, ...]:
    """Return the endings of files that are read: torchvision's."""
    extensions: tuple[str, ...] = library("torchvision.datasets.folder").IMG_EXTENSIONS
    return extensions


def is_picture(name: str) -> bool:
    """Whether the name of a file is that of a picture."""
    return name.lower().endswith(endings())


def find_pictures(folder: Path, unread: Counter[str]) -> Iterator[str]:
    """Yield the pictures in a folder, at any depth, sorted. Count other files."""
    for name in files_below(folder, unread):
        if is_picture(name):
            yield name
        else:
            ending = os.path.splitext(name)[1] or "none"
            unread[f"with other endings ({ending})"] += 1


def files_below(folder: Path, unread: Counter[str]) -> Iterator[str]:
    """Yield the files in a folder, at any depth and sorted, and count hidden ones."""
    visited = set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        target = os.path.realpath(place)
        if target in visited:  # by a link, which may lead up
            folders.clear()
            continue
        visited.add(target)
        # Sorted, because a row has to be the same image in each session.
        folders[:] = [name for name in sorted(folders) if not _is_hidden(name)]
        for name in sorted(names):
            if _is_hidden(name):
                unread["hidden"] += 1
            else:
                yield os.path.join(place, name)
