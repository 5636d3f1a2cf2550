"""Pictures in files: found, decoded and varied the same by any number of workers."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.pictures import CLASSES, truncate, write_folder
from PIL import Image

from scatterpar.train import data as data_module
from scatterpar.train.data import TEST, TRAIN, Files, find_files, load, open_data
from scatterpar.train.feed import PIECE, Feed, FeedError, Request
from scatterpar.train.options import Options, UsageError

pytestmark = [pytest.mark.pictures, pytest.mark.draws]
NONE = Options(augment="none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pictures"), train=60)


def test_a_folder_of_pictures_is_two_lists_and_the_names_of_classes(folder):
    data = open_data(Options(data=str(folder)))
    assert str(data) == (
        f"{folder}: 180 images to train on, 12 to test, 3 classes, brought to 3 x 28 x 28"
    )
    assert data.class_names == tuple(sorted(CLASSES))
    found = data.read(TEST, torch.tensor([0, 5, 11]), 0)
    assert found.labels.tolist() == [0, 1, 2]
    file = Path(data.test[5][0])
    assert file.parent.name == "Sandal"
    assert torch.equal(found.images[1, 0].flatten(), grey(file))
    assert torch.equal(found.images[1, 0], found.images[1, 2])


def grey(file):
    return torch.frombuffer(bytearray(Image.open(file).tobytes()), dtype=torch.uint8)


def test_names_of_files_are_kept_whatever_they_are(tmp_path):
    names = ["a/ü x.jpg", os.fsdecode(b"b/\xff.png"), "c.jpg"]
    files = Files([(name, label) for label, name in enumerate(names)])
    assert [files[row] for row in range(3)] == [(name, row) for row, name in enumerate(names)]


def test_names_take_little_memory_once():
    names = [f"n{i // 1000:08d}/n{i // 1000:08d}_{i}.JPEG" for i in range(100_000)]
    files = Files([(name, 0) for name in names])
    assert files._names.numel() < 3.5e6
    assert files[99_999] == (names[-1], 0)


def test_hidden_files_and_other_files_are_no_pictures(tmp_path):
    for name in ("b.PNG", "a.jpeg", "._a.jpeg", "notes.txt", ".cache/x.png", "deep/er/c.webp"):
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).touch()
    files = find_files(tmp_path, ["x"])
    found = [os.path.relpath(files[row][0], tmp_path) for row in range(len(files))]
    assert found == ["x/a.jpeg", "x/b.PNG", "x/deep/er/c.webp"]


def refused(words, folder, **reading):
    with pytest.raises(UsageError, match=words) as caught:
        open_data(Options(data=str(folder), **reading))
    assert "\n" not in str(caught.value)


def test_a_class_without_pictures_is_named(tmp_path):
    write_folder(tmp_path, train=2, test=1)
    for part in ("train", "test"):
        (tmp_path / part / "Hat").mkdir()
    (tmp_path / "train" / "Hat" / "readme.txt").touch()
    refused(r"train: Found no valid file for the classes Hat. Pictures end in \.jpg, ", tmp_path)
    (tmp_path / "train" / "Hat").rename(tmp_path / "train" / "Cap")
    refused(r"train and test have different classes \(Cap, Hat\)", tmp_path)


def test_a_class_may_lack_test_pictures_but_not_all_classes(tmp_path):
    write_folder(tmp_path, train=2, test=1, held_out="val")
    (gone,) = (tmp_path / "val" / "Bag").iterdir()
    gone.unlink()
    assert len(open_data(Options(data=str(tmp_path))).test) == 2
    for file in list((tmp_path / "val").rglob("*.png")):
        file.unlink()
    refused("val contains no pictures", tmp_path)


def test_classes_without_a_split_are_split_as_val_says(tmp_path):
    write_folder(tmp_path, train=20, test=1)
    for folder, options in ((tmp_path / "train", {}), (tmp_path / "test", {"val": 0.1})):
        words = "class folders, no split: --val 0.1" if not options else "has too few pictures"
        refused(words, folder, **options)
    refused("it has images to test on; leave out --val", tmp_path, val=0.1)
    first, second = (
        open_data(Options(data=str(tmp_path / "train"), val=0.1, seed=seed)) for seed in (0, 1)
    )
    names = [[p[row][0] for row in range(len(p))] for p in (first.train, first.test)]
    assert names == [[p[row][0] for row in range(len(p))] for p in (second.train, second.test)]
    assert sorted([*names[0], *names[1]]) == sorted(map(str, tmp_path.glob("train/*/*.png")))
    assert first.test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    shutil.rmtree(tmp_path / "test")
    assert len(open_data(Options(data=str(tmp_path), val=0.25)).test) == 15


def test_a_side_without_class_folders_is_refused(tmp_path):
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
    refused("train has no folders in it: it needs one for each class", tmp_path)


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


def test_pictures_are_brought_to_224_pixels_or_their_own_fewer(tmp_path):
    write_folder(tmp_path / "large", train=1, test=1, size=(300, 260), ending="jpg")
    write_folder(tmp_path / "small", train=1, test=1, size=(40, 32))
    for name, given, side in (("large", None, 224), ("small", None, 32), ("small", 20, 20)):
        data = open_data(Options(data=str(tmp_path / name), image_size=given))
        assert data.image_shape == (3, side, side)


def test_an_epoch_varies_a_picture_and_repeating_it_does_not(folder):
    data, other = (open_data(Options(data=str(folder), seed=seed)) for seed in (1, 2))
    rows = torch.arange(100)
    first = data.read(TRAIN, rows, 0).images
    assert torch.equal(first, data.read(TRAIN, rows, 0).images)
    assert torch.equal(first[50:], data.read(TRAIN, rows[50:], 0).images)
    for images in (data.read(TRAIN, rows, 1).images, other.read(TRAIN, rows, 0).images):
        assert (images != first).flatten(1).any(1).sum() > 90
    plain = open_data(replace(NONE, data=str(folder)))
    epochs = [plain.read(TRAIN, rows, epoch).images for epoch in (0, 1)]
    assert torch.equal(*epochs)


def requests(number=180, batch=70, epochs=2):
    found = []
    for epoch in range(epochs):
        order = torch.randperm(number, generator=torch.Generator().manual_seed(epoch))
        found += [Request(TRAIN, rows, epoch) for rows in order.split(batch)]
        found += [Request(TEST, torch.arange(12))]
    return found


def everything(data, workers):
    found = []
    with Feed(data, iter(requests()), workers=workers) as feed:
        for _ in requests():
            found.append(feed.take()[1])
            time.sleep(0.01 * bool(workers))
    return found


def test_the_next_batch_is_read_while_this_one_is_used(folder):
    with Feed(open_data(Options(data=str(folder))), iter(requests()), workers=2) as feed:
        for request in requests():
            deadline = time.monotonic() + 60
            while not feed._next.done():  # though nobody waits for it
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert torch.equal(feed.take()[0].rows, request.rows)
        assert feed.waited > 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_picture_names_itself(tmp_path, workers):
    data, file = broken_folder(tmp_path)
    rows = torch.arange(36)
    words = rf"{file} cannot be read as an image: .*truncated.* \(--skip-broken 1 or more leaves"
    with Feed(data, [Request(TRAIN, rows)], workers) as feed, pytest.raises(FeedError, match=words):
        feed.take()
    with Feed(data, [Request(TRAIN, rows)] * 2, workers, skip_broken=1, warn=[].append) as feed:
        for _ in range(2):
            _, found = feed.take()
        assert found.rows.tolist() == [0, *range(2, 36)]
        assert len(found.images) == len(found.labels) == 35
        assert feed.broken == {str(file): 2}


def broken_folder(folder):
    data = open_data(Options(data=str(write_folder(folder, ending="jpg", size=(60, 60)))))
    truncate(Path(data.train[1][0]))
    return data, data.train[1][0]


@pytest.mark.parametrize(
    "content", [b"", b"<html>not found</html>", b"\x89PNG\r\n\x1a\n" + b"x" * 99]
)
def test_whatever_is_no_picture_is_broken(tmp_path, content):
    data, file = broken_folder(tmp_path)
    Path(file).write_bytes(content)
    ((name, reason),) = data.read(TRAIN, torch.arange(3), 0).broken
    assert name == file
    assert reason
    Path(file).unlink()
    ((_, reason),) = data.read(TRAIN, torch.arange(3), 0).broken
    assert "No such file" in reason


def test_a_batch_of_broken_pictures_alone_is_empty(tmp_path):
    data, _ = broken_folder(tmp_path)
    wanted = [Request(TRAIN, torch.tensor([1]))]
    with Feed(data, wanted, skip_broken=1, warn=[].append) as feed:
        _, found = feed.take()
    assert len(found.labels) == len(found.rows) == 0


def test_a_killed_worker_is_said_in_words(folder):
    many = requests(batch=60, epochs=400)
    others = multiprocessing.active_children()  # the ranks that other tests use
    with Feed(open_data(Options(data=str(folder))), iter(many), workers=2) as feed:
        feed.take()
        workers = set(multiprocessing.active_children()).difference(others)
        assert workers
        for process in workers:
            process.kill()
        words = r"worker process that reads images has ended by itself .*fewer --workers need less"
        with pytest.raises(FeedError, match=words):
            [feed.take() for _ in many[1:]]


@pytest.mark.parametrize(
    ("error", "seen", "words"),
    [
        (EOFError(), FeedError, r"has ended by itself \(EOFError\);"),
        (ConnectionResetError(104, "reset"), FeedError, "has ended by itself .*reset"),
        (EOFError("Caught EOFError in DataLoader worker process 0."), EOFError, "^Caught"),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0."), RuntimeError, "^C"),
    ],
)
def test_a_worker_that_was_killed_while_it_sent_is_said_in_words(error, seen, words):
    """Its piece was announced and could no longer be fetched: rare, on a busy machine."""

    def broken_off():
        raise error
        yield

    ahead = object.__new__(Feed)
    ahead._closed = False
    with pytest.raises(seen, match=words):
        ahead._piece(broken_off())


def test_torchvisions_sets_are_found_by_name(tmp_path):
    """Fashion-MNIST, of which only the included test images are there, under both names."""
    raw, images = tmp_path / "FashionMNIST" / "raw", load()
    words = rf"Dataset not found.*--data-root {tmp_path}; --download fetches it"
    refused(f"torch/fashion_mnist: {words}", "torch/fashion_mnist", data_root=tmp_path)
    raw.mkdir(parents=True)
    for file in Path(data_module.__file__).with_name("embedded").glob("*.gz"):
        for part in ("train", "t10k"):
            target = raw / file.name.replace("t10k", part).removesuffix(".gz")
            target.write_bytes(gzip.decompress(file.read_bytes()))
    data = open_data(Options(data="torch/fashion_mnist", augment="none", data_root=tmp_path))
    assert (len(data.train), len(data.test), data.class_names[0]) == (10_000, 10_000, "T-shirt/top")
    found = data.read(TRAIN, torch.arange(6), 0)
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


def test_a_folder_that_hugging_faces_library_reads(folder, tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread of its own
    ours = open_data(replace(NONE, data=str(folder)))
    data = open_data(replace(NONE, data=f"hfds/{folder}", data_root=tmp_path))
    assert data.class_names == ours.class_names
    assert (len(data.train), len(data.test)) == (180, 12)
    rows = torch.tensor([0, 5, 11])
    for one, other in zip(data.read(TEST, rows, 0), ours.read(TEST, rows, 0), strict=True):
        assert one == other if isinstance(one, list) else torch.equal(one, other)


def test_missing_datasets_names_the_extra(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "timm.data.readers.reader_hfds", raising=False)
    refused(r"hfds/toy: .*datasets.*pip install .*\[datasets\]", "hfds/toy")


@pytest.mark.parametrize(
    "augmentation",
    [
        Options(),
        Options(augment="original", erase=0.5),
        Options(augment="none", erase=1.0),
        Options(mixup=0.2),
        Options(mixup=0.2, cutmix=1.0),
        Options(augment="rand-m9-mstd0.5-inc1"),
    ],
)
def test_any_number_of_workers_reads_the_same(folder, augmentation):
    data = open_data(replace(augmentation, data=str(folder), seed=1))
    alone, plain = everything(data, workers=0), everything(open_data(Options(data=str(folder))), 0)
    assert [len(batch.rows) for batch in alone] == [70, 70, 40, 12] * 2
    for workers in (1, 3) if augmentation == Options() else (2,):
        for one, other in zip(alone, everything(data, workers), strict=True):
            assert torch.equal(one.rows, other.rows)
            assert torch.equal(one.images, other.images)
            assert torch.equal(one.labels, other.labels)
    first = alone[0]
    assert first.images.dtype == torch.uint8
    assert not torch.equal(first.images, plain[0].images)
    if augmentation.mixup:
        assert first.labels.shape == (70, 3)
        torch.testing.assert_close(first.labels.sum(1), torch.ones(70))
        assert len(first.labels) > PIECE
