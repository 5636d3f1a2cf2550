"""Images: the included ones, and pictures in files: found, varied, and read ahead by
workers.
"""

from __future__ import annotations

import gzip
import multiprocessing
import os
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
    PIECE,
    TEST,
    TRAIN,
    Feed,
    FeedError,
    Files,
    Request,
    load,
    open_data,
)
from scatterpar.train.options import Options, UsageError

pytestmark = pytest.mark.draws
EMBEDDED = Path(data_module.__file__).with_name("embedded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pictures"), train=60)


def opened(folder, **options):
    return open_data(Options(data=str(folder), **options))


def refused(words, folder, **options):
    with pytest.raises(UsageError, match=words) as caught:
        opened(folder, **options)
    assert "\n" not in str(caught.value)


def read(data, rows, epoch=0, part=TRAIN):
    return data[Request(part, torch.tensor(rows), epoch)]


def names(pairs):
    return [pairs[row][0] for row in range(len(pairs))]


@pytest.mark.pictures
def test_a_folder_of_pictures_is_two_lists_and_the_names_of_classes(folder):
    data = opened(folder)
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


def test_names_of_files_are_kept_whatever_they_are():
    listed = ["a/ü x.jpg", os.fsdecode(b"b/\xff.png"), "c.jpg", "n01/n01_17.JPEG"]
    files = Files([(name, label) for label, name in enumerate(listed)])
    assert [files[row] for row in range(4)] == [
        (name, row) for row, name in enumerate(listed)
    ]


@pytest.mark.pictures
def test_a_folder_that_lacks_pictures_is_refused(tmp_path):
    write_folder(tmp_path, train=2, test=1, held_out="val")
    (tmp_path / "train" / ".cache").mkdir()  # hidden folders are no classes
    (tmp_path / "train" / "Bag" / "notes.txt").touch()
    assert len(opened(tmp_path).train) == 6
    (tmp_path / "train" / "Hat").mkdir()
    refused(
        r"train lacks pictures: Found no valid file for the classes Hat.*\.jpg, ",
        tmp_path,
    )
    (tmp_path / "train" / "Hat").rmdir()
    shutil.rmtree(tmp_path / "train")
    # as of --data one level too high
    (tmp_path / "train" / "photos").mkdir(parents=True)
    refused(
        r"train needs a folder for each class, two at least; it has \['photos'\]",
        tmp_path,
    )


@pytest.mark.pictures
def test_classes_without_a_split_are_split_as_val_says(tmp_path):
    write_folder(tmp_path, train=20, test=1)
    refused("class folders, no split: --val 0.1", tmp_path / "train")
    refused("has too few pictures", tmp_path / "test", val=0.1)
    refused("it has images to test on; leave out --val", tmp_path, val=0.1)
    first, second = (opened(tmp_path / "train", val=0.1, seed=seed) for seed in (0, 1))
    assert names(first.train) == names(second.train)
    assert names(first.test) == names(second.test)
    listed = sorted(map(str, tmp_path.glob("train/*/*.png")))
    assert sorted([*names(first.train), *names(first.test)]) == listed
    assert first.test.labels.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("words", "data", "options"),
    [
        (
            "embedded: it is used as it is: --image_size is for",
            "embedded",
            {"image_size": 32},
        ),
        ("embedded: it is used as it is: --val is for", "embedded", {"val": 0.1}),
        ("torch/absent: Unknown torchvision dataset absent", "torch/absent", {}),
        ("it has images to test on; leave out --val", "torch/absent", {"val": 0.1}),
        ("is neither none, nor crop, nor a policy", None, {"augment": "nonsense"}),
    ],
)
def test_what_a_set_of_pictures_is_not_is_one_line(folder, words, data, options):
    refused(words, data or folder, **options)


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("size", "given", "side"),
    [((300, 260), None, 224), ((40, 32), None, 32), ((40, 32), 20, 20)],
)
def test_pictures_are_brought_to_224_pixels_or_their_own_fewer(
    tmp_path, size, given, side
):
    write_folder(tmp_path, train=1, test=1, size=size, ending="jpg")
    assert opened(tmp_path, image_size=given).image_shape == (3, side, side)


@pytest.mark.pictures
def test_an_epoch_varies_a_picture_and_repeating_it_does_not(folder):
    data, other = (opened(folder, seed=seed) for seed in (1, 2))
    rows = list(range(100))
    first = read(data, rows).images
    assert torch.equal(first, read(data, rows).images)
    assert torch.equal(first[50:], read(data, rows[50:]).images)
    for images in (read(data, rows, 1).images, read(other, rows).images):
        assert (images != first).flatten(1).any(1).sum() > 90
    plain = opened(folder, augment="none")
    assert torch.equal(*(read(plain, rows, epoch).images for epoch in (0, 1)))


# --- data sets of libraries ---


@pytest.mark.pictures
def test_torchvisions_sets_are_found_by_name(tmp_path):
    """Fashion-MNIST, of which only the included test images are there, under both
    names.
    """
    raw, tensors = tmp_path / "FashionMNIST" / "raw", load().train.tensors
    words = rf"Dataset not found.*--data-root {tmp_path}; --download fetches it"
    refused(f"torch/fashion_mnist: {words}", "torch/fashion_mnist", data_root=tmp_path)
    raw.mkdir(parents=True)
    for file in EMBEDDED.glob("*.gz"):
        for part in ("train", "t10k"):
            target = raw / file.name.replace("t10k", part).removesuffix(".gz")
            target.write_bytes(gzip.decompress(file.read_bytes()))
    data = opened("torch/fashion_mnist", augment="none", data_root=tmp_path)
    assert (len(data.train), len(data.test), data.class_names[0]) == (
        10_000,
        10_000,
        "T-shirt/top",
    )
    found = read(data, range(6))
    assert torch.equal(found.labels, tensors[1][:6])
    assert torch.equal(found.images[:, :1], tensors[0][:6])


@pytest.mark.parametrize("build", [None, "12.8"])
def test_a_missing_torchvision_names_the_line_that_installs_it(monkeypatch, build):
    """Beside torch's CPU build, PyPI's torchvision is not that line's."""
    monkeypatch.setitem(sys.modules, "torchvision.ops", None)
    monkeypatch.setattr(torch.version, "cuda", build)
    cpu = "" if build else "--extra-index-url https://download.pytorch.org/whl/cpu "
    words = f"needs torchvision, .*: pip install -c constraints.txt {cpu}-e "
    refused(words + r"'.\[images\]'", "torch/cifar10")


@pytest.mark.pictures
def test_a_folder_that_hugging_faces_library_reads(folder, tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread of its own
    ours = opened(folder, augment="none")
    data = opened(f"hfds/{folder}", augment="none", data_root=tmp_path)
    assert data.class_names == ours.class_names
    assert (len(data.train), len(data.test)) == (180, 12)
    one, other = (read(source, [0, 5, 11], part=TEST) for source in (data, ours))
    assert one.broken == other.broken == []
    assert all(map(torch.equal, one[:2], other[:2]))


# --- batches are read ahead ---


def requests(batch=70, epochs=2):
    found = []
    for epoch in range(epochs):
        order = torch.randperm(180, generator=torch.Generator().manual_seed(epoch))
        found += [Request(TRAIN, rows, epoch) for rows in order.split(batch)]
        found += [Request(TEST, torch.arange(12))]
    return found


@pytest.mark.pictures
@pytest.mark.parametrize("workers", [0, 2])
def test_other_requests_may_come_than_the_first_ones(folder, workers):
    data, rows = opened(folder, workers=workers), torch.arange(120)
    first, second = (
        [Request(TRAIN, part) for part in rows.split(size)] for size in (50, 30)
    )
    with Feed(data, iter(first)) as feed:
        assert feed.take()[0].rows.tolist() == rows[:50].tolist()
        feed.request(second)
        for request in second:
            found, batch = feed.take()
            assert torch.equal(found.rows, request.rows)
            assert torch.equal(batch.images, data[request].images)


@pytest.mark.pictures
def test_a_broken_picture_is_left_out_with_its_label(tmp_path):
    data, file = broken_folder(tmp_path)
    data.options, rows = (
        replace(data.options, workers=1, skip_broken=1),
        torch.arange(36),
    )
    with Feed(data, [Request(TRAIN, rows), Request(TRAIN, rows[1:2])]) as feed:
        (_, found), (_, nothing) = feed.take(), feed.take()
        assert feed.broken == {file: 2}
    assert len(nothing.images) == len(nothing.labels) == 0
    readable = data[Request(TRAIN, torch.cat([rows[:1], rows[2:]]))]
    assert all(map(torch.equal, found[:2], readable[:2]))


@pytest.mark.pictures
def test_a_killed_worker_is_said_in_words(folder):
    many = requests(batch=60, epochs=400)
    others = multiprocessing.active_children()  # the ranks that other tests use
    with Feed(opened(folder, workers=2), iter(many)) as feed:
        feed.take()
        for process in set(multiprocessing.active_children()).difference(others):
            process.kill()
        words = r"images cannot be read: .* \(fewer --workers need less memory\)"
        with pytest.raises(FeedError, match=words):
            [feed.take() for _ in many[1:]]


@pytest.mark.pictures
@pytest.mark.parametrize(
    "augmentation",
    [
        {"augment": "none", "erase": 1.0},
        {"mixup": 0.2, "cutmix": 1.0},
        {"augment": "rand-m9-mstd0.5-inc1"},
    ],
)
def test_any_number_of_workers_reads_the_same(folder, augmentation):
    def everything(workers, seed=1, **options):
        with Feed(
            opened(folder, workers=workers, seed=seed, **options), requests()
        ) as feed:
            return [feed.take()[1] for _ in requests()]

    alone, (plain, *_) = everything(0, **augmentation), everything(0, seed=0)
    assert [len(batch.images) for batch in alone] == [70, 70, 40, 12] * 2
    for one, other in zip(alone, everything(2, **augmentation), strict=True):
        assert all(map(torch.equal, one[:2], other[:2]))
    assert alone[0].images.dtype == torch.uint8
    assert not torch.equal(alone[0].images, plain.images)
    if "mixup" in augmentation:
        labels = alone[0].labels
        assert labels.shape == (70, 3)
        torch.testing.assert_close(labels.sum(1), torch.ones(70))
        assert len(labels) > PIECE
