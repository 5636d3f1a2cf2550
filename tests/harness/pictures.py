"""Folders of pictures, made of the Fashion-MNIST images that are included."""

from pathlib import Path

from PIL import Image

from scatterpar.train.command_line import Options
from scatterpar.train.data import load, open_data

CLASSES = ("Trouser", "Bag", "Sandal")


def write_folder(
    folder,
    train=12,
    test=4,
    ending="png",
    size=(28, 28),
    classes=CLASSES,
    held_out="test",
):
    """Write train/CLASS and test/CLASS, with so many pictures of each class."""
    data = load()
    parts = (
        ("train", data.parts["train"], train),
        (held_out, data.parts["test"], test),
    )
    for part, rows_of_part, number in parts:
        images = data.sources[rows_of_part]
        labels = data.labels[rows_of_part]
        for name in classes:
            place = folder / part / name
            place.mkdir(parents=True)
            is_of_class = labels == data.class_names.index(name)
            rows = is_of_class.nonzero().flatten()
            for row in rows[:number].tolist():
                picture = Image.fromarray(images[row, 0].numpy())
                picture.resize(size).save(place / f"{row:05d}.{ending}")
    return folder


def truncate(file):
    """Leave two thirds of a file, as a copy that was broken off does."""
    content = file.read_bytes()
    length = 2 * len(content) // 3
    file.write_bytes(content[:length])


def broken_folder(folder):
    """A data set of JPEG files, the second of which is truncated, and
    that file's name.
    """
    write_folder(folder, ending="jpg", size=(60, 60))
    data = open_data(Options(data=str(folder)))
    name = data.sources[data.parts["train"][1]]
    truncate(Path(name))
    return data, name
