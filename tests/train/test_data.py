"""Images: the included ones, and pictures in files, found and varied."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.pictures import CLASSES, broken_folder, write_folder
from PIL import Image

from scatterpar.train import data as data_module
from scatterpar.train.data import (
    TEST,
    TRAIN,
    Files,
    Request,
    Split,
    find_files,
    load,
    make_dataset,
    open_data,
)
from scatterpar.train.options import Options, UsageError

pytestmark = pytest.mark.draws
NONE = Options(augment="none")
EMBEDDED = Path(data_module.__file__).with_name("embedded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pictures"), train=60)


def refused(words, folder, **reading):
    with pytest.raises(UsageError, match=words) as caught:
        open_data(Options(data=str(folder), **reading))
    assert "\n" not in str(caught.value)


def read(data, rows, epoch=0, part=TRAIN):
    return data[Request(part, torch.tensor(rows), epoch)]


def names(pairs):
    return [pairs[row][0] for row in range(len(pairs))]


def test_the_embedded_files_are_the_published_bytes():
    source = (EMBEDDED / "SOURCE.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"`(t10k-\S+\.gz)` \| \d+ \| `([0-9a-f]{64})`", source))
    files = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in EMBEDDED.glob("*.gz")}
    assert listed == files
    assert len(listed) == 2
    assert "MIT License" in source
    assert "https://github.com/zalandoresearch/fashion-mnist" in source
    data = load()
    assert (len(data.train), len(data.test), len(data.class_names)) == (8192, 1808, 10)


def test_statistics_are_those_of_each_channel():
    images = (torch.arange(7 * 3 * 5 * 4) ** 2 % 251).to(torch.uint8).view(7, 3, 5, 4)
    split = Split(images, torch.arange(7))
    data = make_dataset("colours", split, split, ())
    torch.testing.assert_close(data.mean, images.float().mean((0, 2, 3)))
    torch.testing.assert_close(data.std, images.float().std((0, 2, 3), correction=0))


@pytest.mark.pictures
def test_a_folder_of_pictures_is_two_lists_and_the_names_of_classes(folder):
    data = open_data(Options(data=str(folder)))
    counts = "180 images to train on, 12 to test, 3 classes, brought to 3 x 28 x 28"
    assert str(data) == f"{folder}: {counts}"
    assert data.class_names == tuple(sorted(CLASSES))
    found = read(data, [0, 5, 11], part=TEST)
    assert found.labels.tolist() == [0, 1, 2]
    file = Path(data.test[5][0])
    assert file.parent.name == "Sandal"
    grey = torch.frombuffer(bytearray(Image.open(file).tobytes()), dtype=torch.uint8)
    assert torch.equal(found.images[1, 0].flatten(), grey)
    assert torch.equal(found.images[1, 0], found.images[1, 2])


def test_names_of_files_are_kept_in_little_memory_whatever_they_are():
    listed = ["a/ü x.jpg", os.fsdecode(b"b/\xff.png"), "c.jpg"]
    listed += [f"n{i // 1000:08d}/n{i // 1000:08d}_{i}.JPEG" for i in range(100_000)]
    files = Files([(name, label) for label, name in enumerate(listed)])
    rows = (0, 1, 2, 100_002)
    assert [files[row] for row in rows] == [(listed[row], row) for row in rows]
    assert files._names.numel() < 3.5e6


@pytest.mark.pictures
def test_hidden_files_and_other_files_are_no_pictures(tmp_path):
    for name in ("b.PNG", "a.jpeg", "._a.jpeg", "notes.txt", ".cache/x.png", "deep/er/c.webp"):
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).touch()
    found = [os.path.relpath(name, tmp_path) for name in names(find_files(tmp_path, ["x"]))]
    assert found == ["x/a.jpeg", "x/b.PNG", "x/deep/er/c.webp"]


@pytest.mark.pictures
def test_a_folder_that_lacks_pictures_is_refused(tmp_path):
    write_folder(tmp_path, train=2, test=1, held_out="val")
    (gone,) = (tmp_path / "val" / "Bag").iterdir()
    gone.unlink()  # a class may lack test pictures
    assert len(open_data(Options(data=str(tmp_path))).test) == 2
    for file in list((tmp_path / "val").rglob("*.png")):
        file.unlink()
    refused("val contains no pictures", tmp_path)
    for part in ("train", "val"):
        (tmp_path / part / "Hat").mkdir()
    (tmp_path / "train" / "Hat" / "readme.txt").touch()
    refused(r"train: Found no valid file for the classes Hat. Pictures end in \.jpg, ", tmp_path)
    (tmp_path / "train" / "Hat").rename(tmp_path / "train" / "Cap")
    refused("train/ and its test folder have different classes: Cap, Hat", tmp_path)
    shutil.rmtree(tmp_path / "train")
    (tmp_path / "train").mkdir()
    refused("train has no folders in it: it needs one for each class", tmp_path)


@pytest.mark.pictures
def test_classes_without_a_split_are_split_as_val_says(tmp_path):
    write_folder(tmp_path, train=20, test=1)
    refused("class folders, no split: --val 0.1", tmp_path / "train")
    refused("has too few pictures", tmp_path / "test", val=0.1)
    refused("it has images to test on; leave out --val", tmp_path, val=0.1)
    first, second = (
        open_data(Options(data=str(tmp_path / "train"), val=0.1, seed=seed)) for seed in (0, 1)
    )
    assert names(first.train) == names(second.train)
    assert names(first.test) == names(second.test)
    listed = sorted(map(str, tmp_path.glob("train/*/*.png")))
    assert sorted([*names(first.train), *names(first.test)]) == listed
    assert first.test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    shutil.rmtree(tmp_path / "test")
    assert len(open_data(Options(data=str(tmp_path), val=0.25)).test) == 15


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("words", "data", "options"),
    [
        ("embedded: it is used as it is: --image-size, --augment", "embedded", {"image_size": 32}),
        ("embedded: it is used as it is", "embedded", {"augment": "rand-m9"}),
        ("torch/absent: Unknown torchvision dataset absent", "torch/absent", {}),
        ("is neither none, nor crop, nor a policy", None, {"augment": "nonsense"}),
    ],
)
def test_what_a_set_of_pictures_is_not_is_one_line(folder, words, data, options):
    refused(words, data or folder, **options)


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("size", "given", "side"), [((300, 260), None, 224), ((40, 32), None, 32), ((40, 32), 20, 20)]
)
def test_pictures_are_brought_to_224_pixels_or_their_own_fewer(tmp_path, size, given, side):
    write_folder(tmp_path, train=1, test=1, size=size, ending="jpg")
    assert open_data(Options(data=str(tmp_path), image_size=given)).image_shape == (3, side, side)


@pytest.mark.pictures
def test_an_epoch_varies_a_picture_and_repeating_it_does_not(folder):
    data, other = (open_data(Options(data=str(folder), seed=seed)) for seed in (1, 2))
    rows = list(range(100))
    first = read(data, rows).images
    assert torch.equal(first, read(data, rows).images)
    assert torch.equal(first[50:], read(data, rows[50:]).images)
    for images in (read(data, rows, 1).images, read(other, rows).images):
        assert (images != first).flatten(1).any(1).sum() > 90
    plain = open_data(replace(NONE, data=str(folder)))
    assert torch.equal(*(read(plain, rows, epoch).images for epoch in (0, 1)))


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot identify"),
        (b"<html>not found</html>", "cannot identify"),
        (b"\x89PNG\r\n\x1a\n" + b"x" * 99, "."),
        (None, "No such file"),
    ],
)
def test_whatever_is_no_picture_is_broken(tmp_path, content, words):
    data, file = broken_folder(tmp_path)
    Path(file).unlink() if content is None else Path(file).write_bytes(content)
    ((name, reason),) = read(data, range(3)).broken
    assert name == file
    assert re.search(words, reason)


@pytest.mark.pictures
def test_torchvisions_sets_are_found_by_name(tmp_path):
    """Fashion-MNIST, of which only the included test images are there, under both names."""
    raw, images = tmp_path / "FashionMNIST" / "raw", load()
    words = rf"Dataset not found.*--data-root {tmp_path}; --download fetches it"
    refused(f"torch/fashion_mnist: {words}", "torch/fashion_mnist", data_root=tmp_path)
    raw.mkdir(parents=True)
    for file in EMBEDDED.glob("*.gz"):
        for part in ("train", "t10k"):
            target = raw / file.name.replace("t10k", part).removesuffix(".gz")
            target.write_bytes(gzip.decompress(file.read_bytes()))
    data = open_data(Options(data="torch/fashion_mnist", augment="none", data_root=tmp_path))
    assert (len(data.train), len(data.test), data.class_names[0]) == (10_000, 10_000, "T-shirt/top")
    found = read(data, range(6))
    assert torch.equal(found.labels, images.train.labels[:6])
    assert torch.equal(found.images[:, :1], images.train.images[:6])


@pytest.mark.parametrize("build", [None, "12.8"])
def test_a_missing_torchvision_names_the_line_that_installs_it(monkeypatch, build):
    """Beside torch's CPU build, PyPI's torchvision is not that line's."""
    monkeypatch.setitem(sys.modules, "torchvision.ops", None)
    monkeypatch.setattr(torch.version, "cuda", build)
    cpu = "" if build else "--extra-index-url https://download.pytorch.org/whl/cpu "
    words = f"needs torchvision and timm; .*: pip install -c constraints.txt {cpu}-e "
    refused(words + r"'.\[images\]'", "torch/cifar10")


@pytest.mark.pictures
def test_a_folder_that_hugging_faces_library_reads(folder, tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread of its own
    ours = open_data(replace(NONE, data=str(folder)))
    data = open_data(replace(NONE, data=f"hfds/{folder}", data_root=tmp_path))
    assert data.class_names == ours.class_names
    assert (len(data.train), len(data.test)) == (180, 12)
    one, other = (read(source, [0, 5, 11], part=TEST) for source in (data, ours))
    assert one.broken == other.broken == []
    assert all(map(torch.equal, one[:3], other[:3]))


@pytest.mark.pictures
def test_missing_datasets_names_the_extra(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "timm.data.readers.reader_hfds", raising=False)
    refused(r"hfds/toy: .*datasets.*pip install .*\[datasets\]", "hfds/toy")
