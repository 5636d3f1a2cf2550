"""Tables of files and labels."""

from __future__ import annotations

import os
import sys

import pytest
from PIL import Image

from scatterpar.train.command_line import Options, UsageError
from scatterpar.train.csv_files import read_table as read
from scatterpar.train.data_parts import make_parts

pytest.importorskip("pandas", reason="pandas, of the extra images, is missing")
pytestmark = [pytest.mark.pictures, pytest.mark.draws]


@pytest.fixture
def folder(tmp_path):
    for number in range(12):
        place = tmp_path / ("a" if number % 2 else "b/c")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(place / f"{number}.png")
    return tmp_path


def name_of(number):
    return f"{'a' if number % 2 else 'b/c'}/{number}.png"


def read_table(table, options):
    return make_parts(read(table, options), options.val)


def pairs(pictures, part):
    """The name of each file of a part, with its label."""
    rows = pictures.parts[part]
    names = [pictures.sources[row] for row in rows]
    return list(zip(names, pictures.labels[rows].tolist(), strict=True))


def write(folder, header, row, name="train.csv"):
    lines = [header, *(row(number) for number in range(12))]
    (folder / name).write_text("\n".join(lines), encoding="utf-8-sig")
    return folder / name


TABLES = [
    ("image,label", lambda n: f"{name_of(n)},{'xyz'[n % 3]}", {}),
    ("file_name;class", lambda n: f"{n}.png;{'xyz'[n % 3]}", {}),
    ("id\tbreed", lambda n: f"{n}\t{'xyz'[n % 3]}", {}),
    ("a,label,b", lambda n: f"1,{n % 3},./{name_of(n)}", {"column_image": "b"}),
    ("image, label", lambda n: f" {name_of(n)} , {'xyz'[n % 3]}{' ' * (n % 2)}", {}),
    ("image|label", lambda n: f"{name_of(n)}|{'xyz'[n % 3]}", {}),
    (
        '"image","label",',
        lambda n: '"' + name_of(n).replace("/", "\\") + f'","{n % 3}",',
        {},
    ),
    ("image,age,kind", lambda n: f"{n},{n},{n % 3}", {"column_label": "kind"}),
    ("Image Name, Class Label ", lambda n: f"{n}.png,{'xyz'[n % 3]}", {}),
    ("id,age,x,y0,z", lambda n: f"{n},{n},{n % 3 == 0},{n % 3 == 1},{n % 3 == 2}", {}),
    ("image,A,B,C", lambda n: f"{n},{['1.0,0.0,0', '0,1,0', '0,0,1'][n % 3]}", {}),
]


@pytest.mark.parametrize(("header", "row", "options"), TABLES)
def test_columns_and_files_are_recognised(folder, header, row, options):
    parts = read_table(write(folder, header, row), Options(val=0.25, **options))
    assert len(parts.class_names) == 3
    assert (len(parts.parts["train"]), len(parts.parts["test"])) == (9, 3)
    for part in ("train", "test"):
        for name, label in pairs(parts, part):
            number = int(name.rpartition("/")[2].removesuffix(".png"))
            assert name == str(folder / name_of(number))
            assert label == number % 3


def test_column_of_parts_divides_rows(folder):
    part = ["train"] * 6 + ["val"] * 3 + ["test"] * 2 + ["extra"]
    table = write(
        folder, "image,label,split", lambda n: f"{n}.png,{'xyz'[n % 3]},{part[n]}"
    )
    parts = read_table(table, Options())
    sizes = [len(files) for files in parts.parts.values()]
    assert sizes == [6, 3, 2]
    assert "not read: images or files 1 in other parts (extra)" in parts.notes


@pytest.mark.parametrize("flags", [("False", "True"), ("0", "1")])
def test_column_is_valid_divides_rows(folder, flags):
    table = write(
        folder, "name,label,is_valid", lambda n: f"{n}.png,{n % 2},{flags[n < 4]}"
    )
    parts = read_table(table, Options())
    assert [len(files) for files in parts.parts.values()] == [8, 4]
    assert {name for name, _ in pairs(parts, "test")} == {
        str(folder / name_of(number)) for number in range(4)
    }


def test_unlabelled_rows_left_aside(folder):
    table = write(folder, "image,label", lambda n: f"{n},{'xy'[n % 2] if n else ''}")
    parts = read_table(table, Options(val=0.2))
    assert "not read: images or files 1 without a label (train)" in parts.notes


@pytest.mark.parametrize(
    ("header", "row", "words"),
    [
        ("a,b", lambda n: f"{n}.png,cat", "--column-image NAME, one of a, b"),
        (
            "a.png,cat",
            lambda n: f"{n}.png,cat",
            "first line has no names of columns, but a.png, cat; add one above",
        ),
        ("image,cat,dog", lambda n: f"{n},1,{n % 2}", "row 2 is not of one of .*s cat"),
        ("image,cat,dog", lambda n: f"{n},0,{n % 2}", "row 1 is not of one of .*s cat"),
        ("image,tags", lambda n: f"{n},{'ab'[n % 2]};b", "several classes .* .a;b"),
        ("image,label", lambda n: f"{n + 2}.png,x", "2 of its 12 images are not below"),
        ("image,label", lambda n: f"/far/{n}.png,x", "12 of its 12 images are not"),
        ("image,label", lambda n: f"{n},x,y", "rows have more cells than the columns"),
        ("image,label", lambda n: f"{n},x{n // 9 * ',y'}", "Expected 2 fields in line"),
        ("image,label", lambda n: f"{n % 6}.png,x", "12 rows, but only 6 images"),
        ("image,a,b", lambda n: f"{n},x,y", "--column-label NAME, one of a, b"),
    ],
)
def test_wrong_table_refused_in_one_line(folder, header, row, words):
    with pytest.raises(UsageError, match=words) as caught:
        read_table(write(folder, header, row), Options(val=0.2))
    assert "\n" not in str(caught.value)


def test_files_are_in_the_train_folder(folder):
    (folder / "a").rename(folder / "train_images")
    table = write(folder, "id,label", lambda n: f"{2 * n // 2 % 6 * 2 + 1},{n % 2}")
    lines = table.read_text().splitlines()[:7]
    table.write_text("\n".join(lines))
    options = Options(val=0.3, train_folder="train_images")
    assert len(read_table(table, options).parts["train"]) == 4
    with pytest.raises(UsageError, match=r"there is no folder .*train_imgs"):
        read_table(table, Options(val=0.3, train_folder="train_imgs"))


def test_path_of_a_picture_may_lead_anywhere(folder):
    """As in tables that a notebook has written."""
    (folder / "tables").mkdir()
    places = [folder / name_of(number) for number in range(12)]
    for root in (lambda place: place, lambda place: f"../{place.relative_to(folder)}"):
        table = write(
            folder / "tables",
            "path,label",
            lambda n, root=root: f"{root(places[n])},{n % 2}",
        )
        parts = read_table(table, Options(val=0.25))
        listed = []
        for part in parts.parts:
            listed += [name for name, _ in pairs(parts, part)]
        assert sorted(map(os.path.normpath, listed)) == sorted(map(str, places))


def test_text_that_is_no_table_is_refused(folder):
    utf_16 = "image,label\n1,č\n".encode("utf-16")
    for text in (utf_16, "é,ü\n".encode("latin-1"), b"", b"image,label\n , \n"):
        (folder / "train.csv").write_bytes(text)
        with pytest.raises(UsageError, match=r"save it as CSV UTF-8|no rows below"):
            read_table(folder / "train.csv", Options(val=0.2))


def test_second_column_of_a_name_is_told(folder):
    table = write(folder, "image,label,label", lambda n: f"{n},{'xy'[n % 2]},{n}")
    parts = read_table(table, Options(val=0.2))
    assert parts.class_names == ("x", "y")
    assert parts.notes[-1].endswith("; not used: label.1")


def test_missing_reader_of_tables_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    table = write(folder, "image,label", lambda n: f"{n},{n % 2}")
    with pytest.raises(UsageError, match=r"pandas.*pip install .*\[images\]"):
        read_table(table, Options(val=0.2))
