"""Folders of pictures: which of them is for what, and the files of each class.

photos/Training/cat/1.jpg        photos/cat/1.jpg      with --val 0.1
photos/valid/cat/2.jpg           photos/dog/2.jpg
photos/test/cat/3.jpg
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from scatterpar.train.command_line import Options, UsageError
from scatterpar.train.data_parts import (
    TEST,
    TRAIN,
    VAL,
    Listing,
    first_names,
    is_part_name,
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


def read_folders(path: Path, options: Options) -> Listing:
    """Find the files of a data set in the folders of `path`."""
    parts = _chosen_parts(path, options) or _find_parts(path)
    folders = {part: _unwrapped(folder, part) for part, folder in parts.items()}
    train = folders[TRAIN]
    class_folders = visible_folders(train)
    class_names = [folder.name for folder in class_folders]
    if len(class_names) < 2:
        raise UsageError(
            f"{train} needs a folder for each class, two at least, and has "
            f"{class_names}; {_labels_elsewhere(train)}"
        )
    listing = Listing(class_names=class_names)
    for part, folder in folders.items():
        list_pictures(listing, part, folder)
    listed = set(listing.rows)
    empty = [name for name in class_names if (TRAIN, name) not in listed]
    unread = listing.unread
    if empty:
        raise UsageError(
            f"{train} lacks pictures of {first_names(empty)}: it is searched for files "
            f"that end in {', '.join(endings())}; convert other files, and remove "
            f"folders without any (not read: {unread_in_words(unread)})"
        )
    if train != path:  # else the other folders are the classes
        for folder in visible_folders(path):
            if folder not in parts.values():
                for _ in files_below(folder, unread):
                    unread[f"in other folders ({folder.name}/)"] += 1
    joined = [
        folder.name for folder in class_folders if len(visible_folders(folder)) > 1
    ]
    if joined:
        names = first_names(joined)
        listing.notes.append(f"the folders in a class are one class: {names}")
    return listing


def list_pictures(listing: Listing, part: str, folder: Path) -> None:
    """Add the pictures of a part, in folders of classes, at any depth, and count files
    that are not read. Pictures beside these folders have no class.
    """
    for name in find_pictures(folder, listing.unread):
        label, _, is_below = os.path.relpath(name, folder).partition(os.sep)
        listing.sources.append(name)
        listing.rows.append((part, label if is_below else ""))


def _chosen_parts(path: Path, options: Options) -> dict[str, Path]:
    """Return the folders that the options name."""
    parts = {}
    for part in (TRAIN, VAL, TEST):
        name = getattr(options, f"{part}_folder")
        if name is None:
            continue
        parts[part] = path / name
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
    named = {folder: part for folder in folders if (part := part_of(folder.name))}
    exact = {
        folder: part for folder, part in named.items() if is_part_name(folder.name)
    }
    listed = ", ".join(f"{folder.name}/" for folder in folders)
    if not any(map(visible_folders, named)):
        # Classes may have such names: trains beside buses, or crash tests.
        are_parts = len(folders) == len(set(named.values())) or len(named) == len(exact)
        if are_parts and len(named) > 1:
            raise UsageError(
                f"the pictures in {listed} are in no folders of classes, as "
                f"train/cat/1.jpg; {_labels_elsewhere(path)}"
            )
        _refuse_unnamed_parts(folders)
        return {TRAIN: path}
    # train/ is meant, if there is train_masks/, too.
    chosen = [f for f in named if f in exact or named[f] not in exact.values()]
    parts = {named[folder]: folder for folder in chosen}
    # Of each part there is one folder, and there is none beside a single one.
    is_clear = len(folders) == 1 or 1 < len(chosen) == len(parts)
    if not (is_clear and TRAIN in parts and visible_folders(parts[TRAIN])):
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


def _labels_elsewhere(path: Path) -> str:
    tables = sorted([*path.glob("*.csv"), *path.glob("*.tsv")])
    if tables:
        return f"if a table has their labels, pass --data {tables[0]}"
    return "make a folder for each class, or pass a table of files and labels: x.csv"


def visible_folders(path: Path) -> list[Path]:
    """Return the folders in a folder, sorted, without hidden ones."""
    # Sorted: the order of a disk would number classes otherwise on another machine.
    entries = [entry for entry in sorted(path.iterdir()) if not _is_hidden(entry.name)]
    return [entry for entry in entries if entry.is_dir()]


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
