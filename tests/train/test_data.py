"""Images: the included ones, folders that timm lists, sets of libraries; what is held out."""

from __future__ import annotations

import gzip
import itertools
import os
import shutil
import unicodedata
from pathlib import Path

import pytest
import torch
from harness.pictures import CLASSES, truncate, write_folder
from PIL import Image

from scatterpar.train import data as data_module
from scatterpar.train.command_line import Options, UsageError
from scatterpar.train.data import TEST, TRAIN, VAL, BatchRequest, load, open_data

pytestmark = pytest.mark.draws
EMBEDDED = Path(data_module.__file__).with_name("embedded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pictures"), train=60, size=(32, 32))


def opened(folder, **options):
    return open_data(Options(data=str(folder), **options))


def refused(words, folder, **options):
    with pytest.raises(UsageError, match=words) as caught:
        opened(folder, **options)
    assert "\n" not in str(caught.value)


def read(data, rows, epoch=0, part=TRAIN):
    return data[BatchRequest(part, torch.tensor(rows), epoch)]


def files(data, part):
    """The files of a part, as CLASS/NAME."""
    pictures, rows, _, _ = data.parts[part]
    return {"/".join(Path(pictures[row]).parts[-2:]) for row in rows.tolist()}


def write(folder, names, size=(8, 8)):
    """Write a picture of its own colours for each name, CLASS/FILE."""
    for number, name in enumerate(names):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (number % 251, number // 251, 9)).save(file)
    return folder


def classes_of(names="cat dog", number=40):
    return [f"{name}/{k}.png" for name in names.split() for k in range(number)]


def test_included_images_in_two_parts():
    data = load()
    assert [sum(numbers) for numbers in data.class_counts.values()] == [8192, 1808]
    assert str(data).endswith(
        "8,192 images to train on, 1,808 to test, 10 classes, 1 x 28 x 28"
    )
    assert data.tested == TEST
    images = read(data, [0, 3], part=TEST).images
    assert torch.equal(images[1], data.parts[TEST].pictures[8192 + 3])


# --- folders ---


@pytest.mark.pictures
def test_folder_gives_parts_and_classes(folder):
    data = opened(folder)
    counts = "180 images to train on, 12 to test each epoch, 3 classes, brought to "
    counts += "3 x 32 x 32"
    assert str(data) == f"{folder}: {counts}"
    assert data.class_names == tuple(sorted(CLASSES))
    said = "images of each class: Bag 60 + 4, Sandal 60 + 4, Trouser 60 + 4"
    assert data.classes_in_words() == said
    batch = read(data, [0, 5, 11], part=VAL)
    assert batch.labels.tolist() == [0, 1, 2]
    file = Path(data.parts[VAL].pictures[5])
    assert file.parent.name == "Sandal"
    grey = torch.frombuffer(bytearray(Image.open(file).tobytes()), dtype=torch.uint8)
    assert torch.equal(batch.images[1, 0].flatten(), grey)
    assert torch.equal(batch.images[1, 0], batch.images[1, 2])


@pytest.mark.pictures
@pytest.mark.parametrize("val", ["val", "valid", "validation"])
def test_val_chooses_and_test_is_last(tmp_path, val):
    for part, number in (("train", 3), (val, 2), ("test", 1)):
        write(tmp_path / part, classes_of(number=number))
    data = opened(tmp_path)
    words = "6 images to train on, 4 to test each epoch, 2 to test"
    assert words in str(data)
    assert data.tested == VAL
    assert len(read(data, [0, 3], part=VAL).images) == 2


@pytest.mark.pictures
def test_test_never_chooses_the_best_epoch(tmp_path):
    write(tmp_path / "train", classes_of())
    write(tmp_path / "test", classes_of(number=4))
    refused(
        r"best epoch on \(test is used once, at the end\): --val 0.1 holds", tmp_path
    )
    data = opened(tmp_path, val=0.1)
    assert (data.tested, len(data.parts[TEST].rows)) == (VAL, 8)
    assert len(data.parts[TRAIN].rows) + len(data.parts[VAL].rows) == 80
    refused("there are no images to test on: --val 0.1", tmp_path / "train")


def layout(tmp_path, kind):
    """Write a folder that is none of the two layouts."""
    photos = tmp_path / "photos"
    if kind == "two names of a part":
        for name in ("train", "val", "valid"):
            write(photos / name, classes_of(number=2))
    elif kind == "other names of parts":
        for name in ("training_set", "test_set"):
            write(photos / name, classes_of(number=2))
    elif kind == "one level too high":
        write(photos / "train" / "train", classes_of(number=2))
        write(photos / "train" / "val", classes_of(number=2))
    elif kind == "folders in a class":
        write(photos, [*classes_of(number=2), "cat/young/9.png", "cat/old/9.png"])
    elif kind == "beside":
        write(photos, [*classes_of(number=2), "stray.jpg"])
    elif kind == "side by side":
        write(photos, ["1.png", "2.png"])
        (photos / "train.csv").write_text("image,label\n")
    elif kind == "no labels":
        write(photos, ["test/1.png"])
        write(photos / "train", classes_of(number=2))
    elif kind == "strange class":
        write(photos / "train", classes_of(number=2))
        write(photos / "val", classes_of("cat bird", number=2))
    elif kind == "other endings":
        write(photos, classes_of(number=2))
        (photos / "bird").mkdir()
        (photos / "bird" / "1.gif").touch()
    elif kind == "a file":
        photos.write_text("image,label\n")
    return photos


LAYOUTS = {
    "two names of a part": "val/ and valid/ are the same part",
    "other names of parts": "test_set has folders, such as cat/, where a class has",
    "one level too high": "has folders, such as cat/, where a class has pictures",
    "folders in a class": "cat has folders, such as old/, where a class has pictures",
    "beside": "stray.jpg is beside the folders of classes",
    "side by side": r"has 0 folders of classes.*such as train.csv is not read",
    "no labels": r"photos/test has no folders of classes.*--data .*photos/train --val",
    "strange class": "val has classes that there are no images to train on for: bird",
    "other endings": "lacks pictures of bird: .*not read: 1 files .gif",
    "a file": "it is no folder",
}


# What the error names is done: what is moved or removed, or is written or named instead.
REMEDIES = {
    "two names of a part": lambda photos: shutil.rmtree(photos / "valid"),
    "other names of parts": lambda photos: [
        (photos / "training_set").rename(photos / "train"),
        (photos / "test_set").rename(photos / "val"),
    ],
    "one level too high": lambda photos: photos / "train",
    "folders in a class": lambda photos: [
        shutil.rmtree(photos / "cat" / name) for name in ("young", "old")
    ],
    "beside": lambda photos: (photos / "stray.jpg").unlink(),
    "side by side": lambda photos: write(photos.with_name("own"), classes_of()),
    "no labels": lambda photos: photos / "train",
    "strange class": lambda photos: write(photos / "train", classes_of("bird")),
    "other endings": lambda photos: (
        Image.new("RGB", (8, 8)).save(photos / "bird" / "2.png"),
        Image.new("RGB", (8, 8)).save(photos / "bird" / "3.png"),
    ),
    "a file": lambda photos: write(photos.with_name("own"), classes_of()),
}


@pytest.mark.pictures
@pytest.mark.parametrize("kind", LAYOUTS)
def test_other_layout_refused_with_the_right_one(tmp_path, kind):
    photos = layout(tmp_path, kind)
    options = {} if (photos / "val").exists() else {"val": 0.5}
    refused(LAYOUTS[kind], photos, **options)
    if kind not in ("strange class", "other endings"):
        refused("train/CLASS/1.jpg with val/CLASS/2.jpg", photos, **options)
    remedy = REMEDIES[kind](photos)
    folder = remedy if isinstance(remedy, Path) else photos
    options = {} if (folder / "val").exists() else {"val": 0.5}
    assert {*opened(folder, **options).parts} >= {TRAIN, VAL}


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("words", "data", "options"),
    [
        ("torch/absent: Unknown torchvision dataset absent", "torch/absent", {}),
        ("absent: there is no such folder; known by name are", "absent", {}),
        (r"did you mean scatterpar[,?]", "scatterpr", {}),
        ("wds/ is a stream, whose pictures have no names", "wds/imagenet", {}),
        ("hfids/ is a stream", "hfids/food101", {}),
        ("it has images to test on; leave out --val", None, {"val": 0.1}),
        ("is neither none, nor crop, nor a policy", None, {"augment": "nonsense"}),
    ],
)
def test_wrong_data_refused_in_one_line(folder, words, data, options, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    refused(words, data or folder, **options)


@pytest.mark.pictures
def test_other_files_change_nothing(tmp_path):
    """metadata.txt and metadata.csv let Hugging Face read only some of the pictures."""
    plain = opened(write(tmp_path, classes_of()), val=0.25)
    (tmp_path / "metadata.txt").write_text("taken in May\n")
    (tmp_path / "metadata.csv").write_text("class,english\ncat,cat\n")
    write(tmp_path, [".cache/1.png", "__MACOSX/cat/1.png", "cat/.2.png"])
    (tmp_path / "cat" / "notes.txt").touch()
    data = opened(tmp_path, val=0.25)
    assert (data.digest, data.class_names) == (plain.digest, plain.class_names)
    assert data.class_names == ("cat", "dog")
    assert [note for note in data.notes if note not in plain.notes] == [
        f"not read in {tmp_path.name}/: 1 files .txt"
    ]


@pytest.mark.pictures
def test_folder_with_a_run_is_no_class(tmp_path):
    write(tmp_path, [*classes_of(), "runs/a/curves.png", "runs/a/confusion.png"])
    (tmp_path / "runs" / "a" / "metrics.jsonl").touch()
    data = opened(tmp_path, val=0.25)
    assert data.class_names == ("cat", "dog")
    assert (
        f"left aside: {tmp_path / 'runs'}/, which has runs of this tool" in data.notes
    )
    (tmp_path / "runs" / "a" / "metrics.jsonl").rename(
        tmp_path / "runs" / "a" / ".lock"
    )
    assert opened(tmp_path, val=0.25).class_names == ("cat", "dog")


@pytest.mark.pictures
def test_class_may_have_name_of_a_part(tmp_path):
    """Trains beside buses, and crash tests."""
    write(tmp_path, classes_of("bus train test"))
    assert opened(tmp_path, val=0.2).class_names == ("bus", "test", "train")


@pytest.mark.pictures
def test_classes_are_numbered_as_by_timm(tmp_path):
    write(tmp_path, classes_of("c10 c2 C1"))
    assert opened(tmp_path, val=0.2).class_names == ("C1", "c2", "c10")


@pytest.mark.pictures
def test_untested_classes_told(tmp_path):
    write(tmp_path, [*classes_of(number=30), "bird/1.png"])
    notes = " ".join(opened(tmp_path, val=0.1).notes)
    assert "not tested, as there is no picture for it: bird" in notes


# --- what --val holds out ---


@pytest.mark.pictures
def test_new_or_renamed_picture_moves_no_other(tmp_path):
    names = classes_of(number=100)
    data = opened(write(tmp_path, names), val=0.2)
    held_out = files(data, VAL)
    assert 20 <= len(held_out) <= 60
    assert {name.split("/")[0] for name in held_out} == {"cat", "dog"}
    # Other classes, places and orders of names change nothing, too.
    write(tmp_path, ["aardvark/0.png", "cat/00.png", "cat/new.png", "zebra/1.png"])
    (tmp_path / "dog" / "7.png").rename(tmp_path / "dog" / "renamed.png")
    again = opened(tmp_path, val=0.2)
    kept = set(names) - {"dog/7.png"}
    assert files(again, VAL) & kept == held_out & kept
    more = files(opened(tmp_path, val=0.3), VAL)
    assert more > files(again, VAL)


@pytest.mark.pictures
def test_held_out_is_the_same_on_a_mac(tmp_path):
    """Its disks write ü as two letters; the folder may have any name."""
    found = []
    for form in ("NFC", "NFD"):
        names = [
            unicodedata.normalize(form, f"{c}/ü{k}.png")
            for c in ("ä", "b")
            for k in range(40)
        ]
        found.append(opened(write(tmp_path / form, names), val=0.25))
    first, second = found
    assert first.class_names == second.class_names
    assert first.digest == second.digest
    assert first.parts[VAL].names == second.parts[VAL].names


@pytest.mark.pictures
def test_each_class_keeps_one_to_train_on(tmp_path):
    write(tmp_path, classes_of(number=3))
    data = opened(tmp_path, val=0.9)
    assert min(data.class_counts[TRAIN]) == 1
    refused("too few pictures", write(tmp_path / "b", ["x/1.png", "y/1.png"]), val=0.1)


@pytest.mark.pictures
@pytest.mark.parametrize("change", ["name", "class", "part"])
def test_digest_sees_names_classes_and_parts(tmp_path, change):
    write(tmp_path / "train", classes_of(number=3))
    write(tmp_path / "val", classes_of(number=3), size=(9, 9))
    before = opened(tmp_path).digest
    first = tmp_path / "train" / "cat" / "0.png"
    place = {
        "name": first.with_name("x.png"),
        "class": tmp_path / "train" / "dog" / "x.png",
        "part": tmp_path / "val" / "cat" / "x.png",
    }[change]
    first.rename(place)
    assert opened(tmp_path).digest != before
    place.rename(first)
    os.utime(first)
    assert opened(tmp_path).digest == before


# --- pictures ---


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("sizes", "options", "side"),
    [
        ([(300, 260)], {}, 224),
        ([(40, 34)], {}, 34),
        ([(28, 28)], {}, 32),
        ([(28, 28)], {"image_size": 20}, 20),
        ([(28, 28)], {"model": "timm:resnet18"}, 224),
        ([(28, 28)], {"model": "timm:inception_v3"}, 299),
        ([(28, 28)], {"model": "timm:resnet18", "image_size": 20}, 20),
        # The first one's shorter side, or the mean, would say little.
        ([(1, 1), (90, 64), (64, 90), (64, 64), (5000, 4000)], {}, 64),
    ],
)
def test_pictures_resized_to_sample_median(tmp_path, sizes, options, side):
    for name in ("a", "b"):
        for part in ("train", "val"):
            place = tmp_path / part / name
            place.mkdir(parents=True)
            for number, size in enumerate(sizes):
                Image.new("L", size).save(place / f"{number}.png")
    (tmp_path / "train" / "a" / "0.jpg").write_bytes(b"nothing")
    assert opened(tmp_path, **options).image_shape == (3, side, side)


@pytest.mark.pictures
def test_all_kinds_read_broken_ones_named(tmp_path):
    """16 bits and floats as bright as 8 bits, transparent ones on white."""
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("L", (32, 32), 100).save(tmp_path / part / name / "0.png")
    place = tmp_path / "train" / "a"
    Image.new("I;16", (32, 32), 100 * 257).save(place / "1.png")
    Image.new("F", (32, 32), 100 / 255).save(place / "2.tif")
    Image.new("RGBA", (32, 32), (0, 0, 0, 155)).save(place / "3.png")
    Image.new("F", (32, 32), 100).save(place / "4.tif")
    (place / "5.jpg").write_bytes(b"<html>")
    Image.new("L", (64, 64), 100).save(place / "6.jpg")
    truncate(place / "6.jpg")
    data = opened(tmp_path, augment="none")
    images, labels, broken = read(data, range(8))
    assert labels.tolist() == [0, 0, 0, 0, 1]
    assert images.unique().tolist() == [100]
    reasons = {Path(name).name: reason for name, reason in broken}
    assert reasons.keys() == {"4.tif", "5.jpg", "6.jpg"}
    assert "floats from 100 to 100" in reasons["4.tif"]
    assert "cannot identify image file" in reasons["5.jpg"]
    found = [picture for picture in data.broken_pictures(2) if picture is not None]
    assert [(Path(p.file).name, p.reason) for p in found] == list(reasons.items())
    data.leave_out(found)
    assert data.class_counts[TRAIN] == [4, 1]
    assert read(data, range(5)).broken == []


@pytest.mark.pictures
def test_augmentation_varies_by_epoch(folder):
    """The same epoch gives the same images again."""
    data, other = (opened(folder, seed=seed) for seed in (1, 2))
    rows = list(range(100))
    first = read(data, rows).images
    assert torch.equal(first, read(data, rows).images)
    assert torch.equal(first[50:], read(data, rows[50:]).images)
    for images in (read(data, rows, 1).images, read(other, rows).images):
        assert (images != first).flatten(1).any(1).sum() > 90
    plain = opened(folder, augment="none")
    assert torch.equal(*(read(plain, rows, epoch).images for epoch in (0, 1)))


# --- sets of libraries ---


@pytest.mark.pictures
def test_torchvision_sets_found_by_name(tmp_path, monkeypatch):
    """Fashion-MNIST, of which only the included test images are there, as both parts."""
    raw = tmp_path / "data" / "FashionMNIST" / "raw"
    included = load().parts[TRAIN]
    monkeypatch.chdir(tmp_path)
    words = (
        "torch/fashion_mnist: Dataset not found.*looked in data/; --download fetches"
    )
    refused(words, "torch/fashion_mnist")
    raw.mkdir(parents=True)
    for file in EMBEDDED.glob("*.gz"):
        for part in ("train", "t10k"):
            target = raw / file.name.replace("t10k", part).removesuffix(".gz")
            target.write_bytes(gzip.decompress(file.read_bytes()))
    data = opened("torch/fashion_mnist", augment="none", image_size=28)
    assert [len(part.rows) for part in data.parts.values()] == [10_000, 10_000]
    assert data.class_names[0] == "T-shirt/top"
    batch = read(data, range(6))
    assert torch.equal(batch.labels, included.labels[:6])
    assert torch.equal(batch.images[:, :1], included.pictures[:6])
    assert data.class_counts[TRAIN] == data.class_counts[VAL]
    assert data.name_of(TRAIN, 5) == "torch/fashion_mnist (train), image 5"
    assert [*itertools.islice(data.broken_pictures(1), 3)] == [None] * 3


@pytest.mark.pictures
def test_hugging_face_reads_same_folder(folder, tmp_path, monkeypatch):
    datasets = pytest.importorskip(
        "datasets", reason="Hugging Face's datasets is not installed"
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread of its own
    ours = opened(folder, augment="none")
    options = {"augment": "none", "image_size": 32}
    data = opened(f"hfds/{folder}", **options)
    assert data.class_names == ours.class_names
    assert [len(part.rows) for part in data.parts.values()] == [180, 12]
    one, other = (read(source, [0, 5, 11], part=VAL) for source in (data, ours))
    assert one.broken == other.broken == []
    assert all(map(torch.equal, one[:2], other[:2]))
    refused(
        "--input-key and --target-key name",
        f"hfds/{folder}",
        input_key="photo",
        **options,
    )
