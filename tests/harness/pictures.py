"""Folders of pictures, made of the Fashion-MNIST images that are included."""

from PIL import Image

from scatterpar.embedded import CLASSES as ALL_CLASSES
from scatterpar.embedded import load

CLASSES = ("Trouser", "Bag", "Sandal")


def write_folder(folder, train=12, test=4, ending="png", size=(28, 28)):
    """Write train/CLASS and val/CLASS, with so many pictures of each class."""
    for part, split, number in zip(
        ("train", "val"), load(), (train, test), strict=True
    ):
        for name in CLASSES:
            place = folder / part / name
            place.mkdir(parents=True)
            is_of_class = split.labels == ALL_CLASSES.index(name)
            rows = is_of_class.nonzero().flatten()
            for row in rows[:number].tolist():
                picture = Image.fromarray(split.images[row, 0].numpy())
                picture.resize(size).save(place / f"{row:05d}.{ending}")
    return folder
