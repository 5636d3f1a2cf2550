"""Files of the MNIST family: right ones are read, wrong ones named with what is off."""

import gzip
import hashlib
import re
import struct
from pathlib import Path

import pytest
import torch

import scatterpar.train
from scatterpar.train import data as data_module
from scatterpar.train.data import Split, load, make_dataset, read_idx
from scatterpar.train.errors import UsageError

EMBEDDED = Path(scatterpar.train.__file__).parent / "embedded"
PIXELS = [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]


def idx_bytes(values):
    tensor = torch.as_tensor(values, dtype=torch.uint8)
    header = bytes([0, 0, 8, tensor.ndim]) + struct.pack(f">{tensor.ndim}I", *tensor.shape)
    return header + bytes(tensor.flatten().tolist())


def write_set(folder, prefix="", labels=(0, 1), test="t10k", ending=""):
    folder.mkdir(exist_ok=True)
    for part in ("train", test):
        for kind, values in (("images-idx3", PIXELS), ("labels-idx1", labels)):
            content = idx_bytes(values)
            if ending == ".gz":
                content = gzip.compress(content)
            (folder / f"{prefix}{part}-{kind}-ubyte{ending}").write_bytes(content)
    return folder


def refused(words, call, *arguments):
    with pytest.raises(UsageError, match=words) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)


def test_the_embedded_files_are_the_published_bytes():
    source = (EMBEDDED / "SOURCE.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"`(t10k-\S+\.gz)` \| \d+ \| `([0-9a-f]{64})`", source))
    found = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in EMBEDDED.glob("*.gz")}
    assert found == listed
    assert len(found) == 2
    assert "MIT License" in source
    assert "https://github.com/zalandoresearch/fashion-mnist" in source


def test_the_embedded_data_are_split_and_standardised():
    data = load("embedded")
    assert (len(data.train), len(data.test), data.classes) == (8192, 1808, 10)
    images = data.standardise(data.train.images)
    assert images.shape == (8192, 1, 28, 28)
    assert images.dtype == torch.float32
    assert images.double().mean().item() == pytest.approx(0, abs=1e-5)
    assert images.double().std().item() == pytest.approx(1, abs=1e-5)


def test_statistics_are_those_of_each_channel():
    images = (torch.arange(7 * 3 * 5 * 4) ** 2 % 251).to(torch.uint8).view(7, 3, 5, 4)
    split = Split(images, torch.arange(7))
    data = make_dataset("colours", split, split)
    torch.testing.assert_close(data.mean, images.float().mean((0, 2, 3)))
    torch.testing.assert_close(data.std, images.float().std((0, 2, 3), correction=0))


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("test", ["t10k", "test"])
def test_a_folder_is_read_gzip_or_not(tmp_path, ending, test):
    data = load(str(write_set(tmp_path, ending=ending, test=test)))
    assert data.train.images.tolist() == [[image] for image in PIXELS]
    assert data.test.labels.tolist() == [0, 1]


def test_emnist_is_turned_upright_and_its_labels_counted_from_zero(tmp_path):
    folder = write_set(tmp_path, "emnist-letters-", labels=(1, 26), test="test")
    data = load(str(folder))
    assert data.train.images[0, 0].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert data.train.labels.tolist() == [0, 1]
    assert data.classes == 2


def test_of_several_sets_one_must_be_chosen(tmp_path):
    write_set(tmp_path, "emnist-letters-")
    write_set(tmp_path, "emnist-digits-", labels=(3, 4))
    choices = f"holds 2 data sets; choose one: --data {tmp_path}/emnist-digits, {tmp_path}/emnist-l"
    refused(choices, load, str(tmp_path))
    assert load(f"{tmp_path}/emnist-digits").train.labels.tolist() == [0, 1]


def test_a_missing_file_is_named(tmp_path):
    write_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    refused("lacks t10k-labels-idx1-ubyte", load, str(tmp_path))


def test_a_folder_without_data_says_what_was_looked_for(tmp_path):
    refused("neither MNIST-family files .* nor image folders", load, str(tmp_path))


def test_a_folder_that_is_not_there_is_named(tmp_path):
    refused("nowhere: there is no such folder", load, str(tmp_path / "nowhere"))


def test_the_installed_set_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data_module, "INSTALLED", tmp_path / "installed")
    refused("install Debian's package dataset-fashion-mnist", load, "fashion-mnist")
    write_set(tmp_path / "installed")
    assert len(load("fashion-mnist").train) == 2


def test_a_folder_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "embedded")
    assert len(load("embedded").train) == 2


GOOD = idx_bytes(PIXELS)
PACKED = gzip.compress(GOOD, mtime=0)  # the same in every process that collects these tests


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x", GOOD[:-1], "x is truncated: .* promises 2 x 2 x 3 = 12 bytes of data, but 11 follow"),
        ("x", GOOD + b"!", "x is longer than it says: .* = 12 bytes of data, but 13 follow"),
        ("x", GOOD[:9], "x is truncated: it ends within its header"),
        ("x", GOOD[:3], "x is truncated: it has 3 bytes, but a file of images begins with"),
        ("x", b"", "x is truncated: it has 0 bytes"),
        ("x", b"\x89PNG" + GOOD, "x is not an IDX file: it begins with 89 50 4e 47"),
        (
            "x",
            b"\0\0\x0d\3" + GOOD[4:],
            "x does not hold unsigned bytes: it begins with 00 00 0d 03",
        ),
        ("x", idx_bytes([1, 2]), "x holds labels where images are expected: .*00 00 08 01"),
        ("x", idx_bytes([[1]]), "x holds 2-dimensional data where images are expected"),
        ("x", b"\0\0\x08\3" + bytes(12), "x is empty: its header says 0 x 0 x 0"),
        ("x", PACKED, "x is a gzip file, though its name does not end in .gz"),
        ("x.gz", GOOD, "x.gz is not a gzip file, though its name ends in .gz"),
        ("x.gz", PACKED[:-9], "x.gz is truncated: its gzip data end too early"),
        ("x.gz", PACKED + b"!", "x.gz is a damaged gzip file: Not a gzipped file"),
        ("x.gz", PACKED[:-6] + b"abcdef", "x.gz is a damaged gzip file: CRC check"),
        ("x.gz", PACKED[:10] + b"\xff" * 30, "x.gz is a damaged gzip file: Error"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_off(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    refused(words, read_idx, tmp_path / name, 3)


def test_images_where_labels_are_expected_are_named(tmp_path):
    (tmp_path / "x").write_bytes(GOOD)
    refused("x holds images where labels are expected", read_idx, tmp_path / "x", 1)


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    refused("cannot be read: Is a directory", read_idx, tmp_path, 3)


def test_labels_and_images_must_be_as_many(tmp_path):
    write_set(tmp_path, labels=(0, 1, 2))
    words = "train-labels-idx1-ubyte has 3 labels, but .*train-images-idx3-ubyte has 2 images"
    refused(words, load, str(tmp_path))


def test_a_test_label_that_is_never_trained_is_refused():
    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    train, test = Split(images, torch.tensor([0, 1])), Split(images, torch.tensor([1, 7]))
    refused(r"test labels \[7\] do not occur", make_dataset, "odd", train, test)


def test_images_of_two_sizes_are_refused():
    labels = torch.tensor([0, 1])
    train = Split(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), labels)
    test = Split(torch.zeros(2, 1, 5, 4, dtype=torch.uint8), labels)
    words = r"training images are \(1, 4, 4\), but test images \(1, 5, 4\)"
    refused(words, make_dataset, "odd", train, test)
