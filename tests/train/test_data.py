"""Images: the included ones, and pictures in files, brought to a size and varied."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest
import torch
from harness.pictures import CLASSES, write_folder
from PIL import Image

from scatterpar.train import data as data_module
from scatterpar.train.command_line import Options, UsageError
from scatterpar.train.data import BatchRequest, load, open_data
from scatterpar.train.data_parts import TEST, TRAIN, VAL

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


@pytest.mark.pictures
def test_folder_gives_parts_and_classes(folder):
    data = opened(folder)
    counts = "180 images to train on, 12 to test, 3 classes, brought to 3 x 32 x 32"
    assert str(data) == f"{folder}: {counts}"
    assert data.class_names == tuple(sorted(CLASSES))
    found = read(data, [0, 5, 11], part=TEST)
    assert found.labels.tolist() == [0, 1, 2]
    file = Path(data.sources[data.parts["test"][5]])
    assert file.parent.name == "Sandal"
    grey = torch.frombuffer(bytearray(Image.open(file).tobytes()), dtype=torch.uint8)
    assert torch.equal(found.images[1, 0].flatten(), grey)
    assert torch.equal(found.images[1, 0], found.images[1, 2])


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("words", "data", "options"),
    [
        (
            "embedded: it is used as it is: --image-size is for",
            "embedded",
            {"image_size": 32},
        ),
        ("embedded: it is used as it is: --val is for", "embedded", {"val": 0.1}),
        ("torch/absent: Unknown torchvision dataset absent", "torch/absent", {}),
        (r"absent: there is no such folder; known by name are", "absent", {}),
        (r"did you mean scatterpar[,?]", "scatterpr", {}),
        ("setup.cfg: it is no folder and no table", "setup.cfg", {}),
        ("is neither none, nor crop, nor a policy", None, {"augment": "nonsense"}),
        ("section mst has no number", None, {"augment": "rand-m9-mst"}),
    ],
)
def test_wrong_data_refused_in_one_line(folder, words, data, options, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    refused(words, data or folder, **options)


@pytest.mark.pictures
def test_images_per_class_are_counted(folder, tmp_path):
    """Also in memory."""
    counts = opened(folder).class_counts
    assert counts == {"train": [60] * 3, "test": [4] * 3}
    said = opened(folder).classes_in_words()
    assert said == "images of each class: Bag 60 + 4, Sandal 60 + 4, Trouser 60 + 4"
    data = load()
    assert [sum(numbers) for numbers in data.class_counts.values()] == [8192, 1808]


@pytest.mark.pictures
def test_val_tested_each_epoch_test_at_end(tmp_path):
    for part, number in (("train", 3), ("val", 2), ("test", 1)):
        write_folder(tmp_path / part, train=number, test=0)
        for place in (tmp_path / part / "train").iterdir():
            place.rename(tmp_path / part / place.name)
        (tmp_path / part / "train").rmdir()
        shutil.rmtree(tmp_path / part / "test")
    data = opened(tmp_path)
    words = "9 images to train on, 6 to choose the best epoch, 3 to test"
    assert words in str(data)
    assert len(read(data, [0, 4], part=VAL).images) == 2


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("sizes", "options", "side"),
    [
        ([(300, 260)], {}, 224),
        ([(40, 34)], {}, 34),
        ([(28, 28)], {}, 32),
        ([(28, 28)], {"image_size": 20}, 20),
        ([(28, 28)], {"model": "timm:resnet18"}, 224),
        ([(28, 28)], {"model": "timm:resnet18", "image_size": 20}, 20),
        # The first one's shorter side, or the mean, would say little.
        ([(1, 1), (90, 64), (64, 90), (64, 64), (5000, 4000)], {}, 64),
    ],
)
def test_pictures_resized_to_sample_median(tmp_path, sizes, options, side):
    for name in ("a", "b"):
        for part in ("train", "test"):
            place = tmp_path / part / name
            place.mkdir(parents=True)
            for number, size in enumerate(sizes):
                Image.new("L", size).save(place / f"{number}.png")
    broken = tmp_path / "train" / "a" / "0.jpg"
    broken.write_bytes(b"nothing")
    assert opened(tmp_path, **options).image_shape == (3, side, side)


@pytest.mark.pictures
def test_all_kinds_read_broken_ones_named(tmp_path):
    """16 bits and floats as bright as 8 bits, transparent ones on white, turned ones."""
    for part in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("L", (32, 32), 100).save(tmp_path / part / name / "0.png")
    place = tmp_path / "train" / "a"
    Image.new("I;16", (32, 32), 100 * 257).save(place / "1.png")
    Image.new("F", (32, 32), 100 / 255).save(place / "2.tif")
    Image.new("RGBA", (32, 32), (0, 0, 0, 155)).save(place / "3.png")
    Image.new("F", (32, 32), 100).save(place / "4.tif")
    (place / "5.jpg").write_bytes(b"<html>")
    data = opened(tmp_path, augment="none")
    images, labels, broken = read(data, range(7))
    assert labels.tolist() == [0, 0, 0, 0, 1]
    assert images.unique().tolist() == [100]
    reasons = {Path(name).name: reason for name, reason in broken}
    assert "floats from 100 to 100" in reasons["4.tif"]
    assert "cannot identify image file" in reasons["5.jpg"]


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


# --- data sets of libraries ---


@pytest.mark.pictures
def test_torchvision_sets_found_by_name(tmp_path):
    """Fashion-MNIST, of which only the included test images are there, under both
    names.
    """
    raw = tmp_path / "FashionMNIST" / "raw"
    included = load()
    words = rf"Dataset not found.*--data-root {tmp_path}; --download fetches it"
    refused(f"torch/fashion_mnist: {words}", "torch/fashion_mnist", data_root=tmp_path)
    raw.mkdir(parents=True)
    for file in EMBEDDED.glob("*.gz"):
        for part in ("train", "t10k"):
            target = raw / file.name.replace("t10k", part).removesuffix(".gz")
            target.write_bytes(gzip.decompress(file.read_bytes()))
    data = opened(
        "torch/fashion_mnist", augment="none", data_root=tmp_path, image_size=28
    )
    assert (len(data.parts["train"]), len(data.parts["test"]), data.class_names[0]) == (
        10_000,
        10_000,
        "T-shirt/top",
    )
    found = read(data, range(6))
    assert torch.equal(found.labels, included.labels[:6])
    assert torch.equal(found.images[:, :1], included.sources[:6])
    assert data.class_counts["train"] == data.class_counts["test"]
    assert len(data.class_counts["train"]) == 10


@pytest.mark.pictures
def test_hugging_face_reads_same_folder(folder, tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread of its own
    ours = opened(folder, augment="none")
    data = opened(f"hfds/{folder}", augment="none", data_root=tmp_path)
    assert data.class_names == ours.class_names
    assert (len(data.parts["train"]), len(data.parts["test"])) == (180, 12)
    one, other = (read(source, [0, 5, 11], part=TEST) for source in (data, ours))
    assert one.broken == other.broken == []
    assert all(map(torch.equal, one[:2], other[:2]))
