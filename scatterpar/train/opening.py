"""From what `--data` names to the data to train and to test on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scatterpar.train.data import load
from scatterpar.train.errors import UsageError
from scatterpar.train.folder import open_folder
from scatterpar.train.library import open_datasets, open_torchvision
from scatterpar.train.pictures import PictureData, Pictures
from scatterpar.train.source import Source
from scatterpar.train.transforms import Augmentation

LARGEST_DEFAULT_SIZE = 224
_LIBRARIES = {"torchvision:": open_torchvision, "datasets:": open_datasets}


@dataclass(frozen=True)
class Reading:
    """How pictures in files are read: what the command line says about it.

    Attributes:
        image_size: height and width that they are brought to; None: 224, or the shorter side
            of the first one where that is smaller.
        augmentation: how training images are varied; None: the default for pictures in files.
        seed: decides what is random about that.
        root: where data sets of libraries lie.
        download: whether these may be fetched.
    """

    image_size: int | None = None
    augmentation: Augmentation | None = None
    seed: int = 0
    root: Path = Path("data")
    download: bool = False


def open_data(name: str, reading: Reading) -> Source:
    """Open what `--data` names.

    Args:
        name: a folder of images in train/CLASS/ and test/CLASS/ (or val), what `data.load`
            takes, or `torchvision:` and the name of a set in `torchvision.datasets`, or `datasets:`
            and the name or folder of one of Hugging Face's `datasets`.
        reading: how pictures in files are read.

    Raises:
        UsageError: there is no such data, it is not whole and consistent, or it stays in memory
            and so takes no such options.
    """
    path = Path(name).expanduser()
    if path.is_dir() and is_image_folder(path):
        return _pictures(name, *open_folder(path), reading)
    for prefix, open_set in _LIBRARIES.items():
        if name.startswith(prefix):
            wanted = name.removeprefix(prefix)
            return _pictures(name, *open_set(wanted, reading.root, reading.download), reading)
    if reading.augmentation not in (None, Augmentation(kind="none")) or reading.image_size:
        raise UsageError(
            f"--data {name} is used as it is: --image-size, --augment, --erase, --mixup and "
            "--cutmix are for pictures in files"
        )
    return load(name)


def is_image_folder(path: Path) -> bool:
    """Tell whether a folder has the sides of a data set of image files."""
    return (path / "train").is_dir() and ((path / "test").is_dir() or (path / "val").is_dir())


def _pictures(
    name: str, train: Pictures, test: Pictures, classes: tuple[str, ...], reading: Reading
) -> PictureData:
    size = reading.image_size or min(LARGEST_DEFAULT_SIZE, _first_size(train))
    augmentation = reading.augmentation or Augmentation()
    return PictureData(name, train, test, classes, size, augmentation, reading.seed)


def _first_size(pictures: Pictures) -> int:
    """Return the shorter side of the first picture that can be read."""
    for row in range(len(pictures)):
        try:
            image, _ = pictures.open(row)
            return int(min(image.size))
        except Exception:  # it is named when its turn comes
            continue
    raise UsageError(f"no image can be read: {pictures.name(0)} and all others are broken")
