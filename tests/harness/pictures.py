"""Folders of pictures, made of the Fashion-MNIST images that are included."""

from PIL import Image

from scatterpar.train.data import load

CLASSES = ("Trouser", "Bag", "Sandal")


def write_folder(
    folder,
    train=12,
    test=4,
    ending="png",
    size=(28, 28),
    classes=CLASSES,
    held_out="val",
):
    """Write train/CLASS and val/CLASS, with so many pictures of each class."""
    data = load()
    parts = (
        ("train", data.parts["train"], train),
        (held_out, data.parts["test"], test),
    )
    for part, (pictures, rows_of_part, labels, _), number in parts:
        images = pictures[rows_of_part]
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
