"""Data sets of Hugging Face: splits, columns and labels of any names."""

from __future__ import annotations

import pytest
from PIL import Image

from scatterpar.train.command_line import Options, UsageError
from scatterpar.train.data_parts import make_parts
from scatterpar.train.hub import is_saved
from scatterpar.train.hub import read_hub as read

datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is missing")
pytestmark = pytest.mark.draws
NAMES = ["red", "green", "blue"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread of its own


def read_hub(name, options):
    return make_parts(read(name, options), options.val)


def make(number, label=lambda row: row % 3, kind=None, image="image", column="label"):
    """A split of so many pictures, whose brightness is their row."""
    kind = kind or datasets.ClassLabel(names=NAMES)
    features = datasets.Features({image: datasets.Image(), column: kind})
    pictures = [Image.new("L", (8, 8), row) for row in range(number)]
    labels = [label(row) for row in range(number)]
    columns = {image: pictures, column: labels}
    return datasets.Dataset.from_dict(columns, features=features)


def opened(folder, splits, *, saved=False, **options):
    place = folder / "set"
    if saved:
        datasets.DatasetDict(splits).save_to_disk(str(place))
    else:
        (place / "data").mkdir(parents=True)
        for name, split in splits.items():
            split.to_parquet(str(place / "data" / f"{name}-00000-of-00001.parquet"))
    assert is_saved(place)
    return read_hub(str(place), Options(data_root=folder / "cache", **options))


def rows_of(pictures, part):
    """The number of each picture, which is its brightness; compared with its label."""
    rows = []
    for place in pictures.parts[part].tolist():
        row = pictures.sources[place].getpixel((0, 0))
        assert pictures.labels[place] == row % 3
        rows.append(row)
    return rows


@pytest.mark.parametrize("saved", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_validation_chooses_test_is_last(tmp_path, saved):
    splits = {"train": make(9), "validation": make(6), "test": make(3)}
    parts = opened(tmp_path, splits, saved=saved)
    assert parts.class_names == tuple(NAMES)
    assert rows_of(parts, "train") == list(range(9))
    assert rows_of(parts, "val") == list(range(6))
    assert rows_of(parts, "test") == list(range(3))


def test_only_split_is_divided(tmp_path):
    with pytest.raises(UsageError, match=r"no images to test on: --val 0.1"):
        opened(tmp_path, {"train": make(12)}, saved=True)
    parts = opened(tmp_path / "b", {"data": make(12)}, saved=True, val=0.25)
    assert sorted([*rows_of(parts, "train"), *rows_of(parts, "test")]) == list(
        range(12)
    )
    assert sorted(parts.labels[parts.parts["test"]].tolist()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "label"), [(None, -1), (None, None), ("string", ""), ("int64", -1)]
)
def test_unlabelled_test_split_left_aside(tmp_path, kind, label):
    value = kind and datasets.Value(kind)
    known = (lambda row: str(row % 3)) if kind == "string" else (lambda row: row % 3)
    splits = {
        "train": make(9, known, value),
        "validation": make(3, known, value),
        "test": make(3, lambda row: label, value),
    }
    parts = opened(tmp_path, splits, saved=True)
    assert "val" not in parts.parts
    assert len(parts.parts["test"]) == 3
    assert parts.notes[0].startswith("not read: images or files 3 ")


@pytest.mark.parametrize(
    ("kind", "label", "names"),
    [
        ("string", lambda row: NAMES[row % 3], sorted(NAMES)),
        ("int64", lambda row: 9 + row % 3, ["9", "10", "11"]),
        ("bool", lambda row: row % 2 == 0, ["False", "True"]),
    ],
)
def test_columns_found_by_type(tmp_path, kind, label, names):
    made = make(12, label, datasets.Value(kind), image="img", column="fine_label")
    parts = opened(tmp_path, {"train": made, "test": made}, saved=True)
    assert parts.class_names == tuple(names)
    assert "images from the column img, classes from fine_label" in parts.notes


def test_labels_are_compared_by_name(tmp_path):
    """The splits of a set may number their classes in another order."""
    other = datasets.ClassLabel(names=NAMES[::-1])
    splits = {"train": make(9), "test": make(6, lambda row: 2 - row % 3, other)}
    parts = opened(tmp_path, splits, saved=True)
    assert rows_of(parts, "test") == list(range(6))


def test_file_of_parquet_and_metadata_are_read(tmp_path):
    make(12).to_parquet(str(tmp_path / "a.parquet"))
    options = Options(val=0.25, data_root=tmp_path / "cache")
    parts = read_hub(str(tmp_path / "a.parquet"), options)
    assert (len(parts.parts["train"]), len(parts.parts["test"])) == (9, 3)
    for part in ("train", "test"):
        (tmp_path / "photos" / part).mkdir(parents=True)
        lines = ["file_name,label"]
        for row in range(6):
            picture = Image.new("L", (8, 8), row)
            picture.save(tmp_path / "photos" / part / f"{row}.png")
            lines.append(f"{row}.png,{NAMES[row % 3]}")
        table = tmp_path / "photos" / part / "metadata.csv"
        table.write_text("\n".join(lines))
    assert is_saved(tmp_path / "photos")
    parts = read_hub(str(tmp_path / "photos"), Options(data_root=options.data_root))
    assert (len(parts.parts["train"]), len(parts.parts["test"])) == (6, 6)


def test_column_is_asked_for(tmp_path):
    made = make(12, column="fine_label")
    made = made.add_column("coarse_label", [row % 2 for row in range(12)])
    made = made.cast_column("coarse_label", datasets.ClassLabel(names=["a", "b"]))
    made = made.rename_column("fine_label", "shade")
    splits = {"train": made, "test": made}
    words = "--column-label NAME, one of shade, coarse_label"
    with pytest.raises(UsageError, match=words):
        opened(tmp_path, splits, saved=True)
    parts = opened(tmp_path / "b", splits, saved=True, column_label="coarse_label")
    assert parts.class_names == ("a", "b")


def test_lists_of_labels_are_refused(tmp_path):
    """Each combination would become a class."""
    kind = datasets.Sequence(datasets.Value("int64"))
    made = make(12, lambda row: [row % 2, 2], kind)
    splits = {"train": made, "test": made}
    with pytest.raises(UsageError, match="--column-label NAME, one of none"):
        opened(tmp_path, splits, saved=True)
    made = made.add_column("name", [NAMES[row % 3] for row in range(12)])
    splits = {"train": made, "test": made}
    with pytest.raises(UsageError, match="--column-label label: its columns are name"):
        opened(tmp_path / "b", splits, saved=True, column_label="label")
    assert opened(tmp_path / "c", splits, saved=True).class_names == tuple(
        sorted(NAMES)
    )


@pytest.mark.slow
def test_absent_set_refused_in_one_line(tmp_path):
    words = r"--data-root .* --download fetches"
    with pytest.raises(UsageError, match=words) as caught:
        read_hub("nobody/nothing", Options(data_root=tmp_path))
    assert "\n" not in str(caught.value)
