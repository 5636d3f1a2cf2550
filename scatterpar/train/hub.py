"""Data sets of Hugging Face: of the hub, saved by `save_to_disk`, or parquet files."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset

from scatterpar.train.columns import (
    choose_column,
    class_names_of,
    columns_in_words,
)
from scatterpar.train.command_line import Options, UsageError, words_of
from scatterpar.train.data_parts import TRAIN, Listing, part_of
from scatterpar.train.libraries import installed

PARQUET = ".parquet"
_SAVED = ("dataset_dict.json", "state.json")  # files of `save_to_disk`
# Files of other folders that the library reads: parquet, and tables beside pictures.
_READ = ("*.parquet", "*/*.parquet", "metadata.*", "*/metadata.*")


def is_saved(folder: Path) -> bool:
    """Whether the files in a folder are those of a data set of the library's."""
    return any(any(folder.glob(pattern)) for pattern in (*_SAVED, *_READ))


def read_hub(name: str | Path, options: Options) -> Listing:
    """Open a data set by its name on the hub, or by its folder."""
    splits = _load(str(name), options)
    parts = dict[str, Any]()
    unread = Counter[str]()
    for split_name, dataset in splits.items():
        # A set with one split may call it anything: there is nothing else to train on.
        part = part_of(split_name) if len(splits) > 1 else TRAIN
        if part is None or part in parts:
            unread[f"in other splits ({split_name})"] = len(dataset)
        else:
            parts[part] = dataset
    if TRAIN not in parts:
        raise UsageError(f"it has no split to train on; its splits are {list(splits)}")
    features = parts[TRAIN].features
    image, label = _columns(features, options)
    decoded = installed("datasets", "datasets").Image()
    pictures = []
    rows = []
    for part, dataset in parts.items():
        pictures.append(dataset.cast_column(image, decoded)[image])
        rows += [(part, text) for text in _labels(dataset, label)]
    class_names = getattr(features[label], "names", None)
    if class_names is None:
        class_names = class_names_of(rows, label)
    notes = [columns_in_words(image, [label], list(features))]
    return Listing(ConcatDataset(pictures), rows, class_names, unread, notes)


def _load(name: str, options: Options) -> dict[str, Any]:
    """Return the splits by their names."""
    if not options.download:
        # The library reads this variable when it is imported.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    datasets = installed("datasets", "datasets")
    # The library would write into the home folder.
    cache = {"cache_dir": str(options.data_root)}
    try:
        if any(Path(name, file).exists() for file in _SAVED):
            loaded = datasets.load_from_disk(name)
        elif name.endswith(PARQUET):
            loaded = datasets.load_dataset("parquet", data_files=name, **cache)
        else:
            loaded = datasets.load_dataset(name, **cache)
    except Exception as error:
        remedy = f"looked in --data-root {options.data_root}; --download fetches it"
        raise UsageError(f"{words_of(error):.300} ({remedy})") from error
    return loaded if isinstance(loaded, dict) else {TRAIN: loaded}


def _columns(features: Any, options: Options) -> tuple[str, str]:
    """Return the columns of pictures and of labels, found by type and name."""
    by_type = defaultdict[str, list[str]](list)
    for column, feature in features.items():
        by_type[type(feature).__name__].append(column)
    images = by_type["Image"] or by_type["Value"]
    image = choose_column("image", list(features), options, images)
    # A list of labels is no class.
    columns = by_type["ClassLabel"] + by_type["Value"]
    columns = [column for column in columns if column != image]
    labels = by_type["ClassLabel"] or by_type["Value"]
    likely = [column for column in labels if column != image]
    label = choose_column("label", columns, options, likely)
    return image, label


def _labels(dataset: Any, column: str) -> list[str]:
    """Return the label of each row as text; empty if there is none."""
    feature = dataset.features.get(column)
    if feature is None:
        return [""] * len(dataset)
    # The names of this part: another part may have them in another order. The hub's
    # sets number an unknown label as -1.
    names = dict(enumerate(getattr(feature, "names", ())))
    labels = []
    for label in dataset[column]:
        is_missing = label is None or label != label  # NaN
        text = "" if is_missing else str(label)
        labels.append(names.get(label, "") if names else text)
    return labels
