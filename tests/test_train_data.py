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
from scatterpar.train.data import Split, UsageError, load, make_dataset, read_idx

EMBEDDED = Path(scatterpar.train.__file__).parent / "embedded"
PIXELS = [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]


def idx_bytes(values):
    tensor = torch.as_tensor(values, dtype=torch.uint8)
    header = bytes([0, 0, 8, tensor.ndim]) + struct.pack(f">{tensor.ndim}I", *tensor.shape)
    return header + bytes(tensor.flatten().tolist())


def write_set(folder, labels=(0, 1), ending=""):
    folder.mkdir(exist_ok=True)
    for part in ("train", "t10k"):
        for kind, values in (("images-idx3", PIXELS), ("labels-idx1", labels)):
            content = idx_bytes(values)
            if ending == ".gz":
                content = gzip.compress(content)
            (folder / f"{part}-{kind}-ubyte{ending}").write_bytes(content)
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
    assert (len(data.train), len(data.test), len(data.class_names)) == (8192, 1808, 10)
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
def test_a_folder_is_read_gzip_or_not(tmp_path, ending):
    data = load(str(write_set(tmp_path, ending=ending)))
    assert data.train.images.tolist() == [[image] for image in PIXELS]
    assert data.test.labels.tolist() == [0, 1]


def test_a_missing_file_is_named(tmp_path):
    write_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    refused("it lacks t10k-labels-idx1-ubyte, gzip or not", load, str(tmp_path))


def test_a_folder_without_data_says_what_was_looked_for(tmp_path):
    refused(
        "neither image folders .* nor MNIST's files: it lacks train-images", load, str(tmp_path)
    )


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
    ("content", "words"),
    [
        (GOOD[:-1], "has 27 bytes, where 00 00 08 03 and 28 are expected, for 2 x 2 x 3"),
        (GOOD + b"!", "has 29 bytes, where 00 00 08 03 and 28 are expected"),
        (GOOD[:9], "begins with 00 00 08 03 and has 9 bytes"),
        (b"", "begins with nothing and has 0 bytes"),
        (b"\x89PNG" + GOOD, "begins with 89 50 4e 47 "),
        (b"\0\0\x0d\3" + GOOD[4:], "begins with 00 00 0d 03 .* where 00 00 08 03 "),
        (idx_bytes([1, 2]), "IDX file of images: it begins with 00 00 08 01 .* where 00 00 08 03"),
        (b"\0\0\x08\3" + bytes(12), "has 16 bytes, .* for 0 x 0 x 0"),
        (PACKED[:-9], "cannot be read: Compressed file ended"),
        (PACKED + b"!", "cannot be read: Not a gzipped file"),
        (PACKED[:-6] + b"abcdef", "cannot be read: CRC check"),
        (PACKED[:10] + b"\xff" * 30, "cannot be read: Error"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_off(tmp_path, content, words):
    (tmp_path / "x").write_bytes(content)
    refused(f"x.* {words}", read_idx, tmp_path / "x", 3)


def test_images_where_labels_are_expected_are_named(tmp_path):
    (tmp_path / "x").write_bytes(GOOD)
    refused(
        "not a whole IDX file of labels: it begins with 00 00 08 03", read_idx, tmp_path / "x", 1
    )


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    refused("cannot be read: .*Is a directory", read_idx, tmp_path, 3)


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
