"""Pictures of any kind become pixels as a model takes them: python classify.py FILE …

They are turned upright, put on white, brought to RGB with 8 bits per colour, resized,
and cropped. Pixels whose range nobody can know are a `ValueError`: they would become
black or white.
"""

# `export` copies this file beside a model, as classify.py: it imports torch and Pillow,
# and nothing else of scatterpar.

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

# The largest value of greyscale of more than 8 bits, by Pillow's modes.
_LARGEST_OF_16_BITS = 65535
_LARGEST = dict.fromkeys(("I", "I;16", "I;16L", "I;16B", "I;16N"), _LARGEST_OF_16_BITS)
_LARGEST["F"] = 1
# The largest values of 8, 12 and 16 bits.
_DEPTHS = (255, 4095, _LARGEST_OF_16_BITS)
_SCALED_TO_16 = "PPM", "PNG"  # formats whose pixels Pillow scales to 16 bits in mode I
_CROPPED_SIDE = 128  # smaller pictures have no edges that a crop could leave out


def open_picture(source: Any) -> Image.Image:
    """Open a file, of which only the header is read yet, or return a library's
    picture.
    """
    return source if isinstance(source, Image.Image) else Image.open(source)


def as_rgb(picture: Image.Image) -> Image.Image:
    """Return the picture in RGB, turned as its EXIF data says, and on white where it is
    transparent.
    """
    if picture.mode == "I" and picture.format not in _SCALED_TO_16:
        raise ValueError(
            "its pixels are 32-bit integers, of which the largest value is not known; "
            "save it with 8 or 16 bits"
        )
    upright = ImageOps.exif_transpose(picture)
    if upright.mode in _LARGEST:
        # Of a PGM file, which says its largest value, Pillow has scaled the pixels.
        has_range = picture.format == "PPM"
        upright = _with_8_bits(upright, _LARGEST[upright.mode], has_range)
    if upright.has_transparency_data:
        upright = _on_white(upright)
    return upright.convert("RGB")


def _with_8_bits(picture: Image.Image, largest: float, has_range: bool) -> Image.Image:
    """Scale greyscale from 0 to the largest value to 8 bits.

    A file of 16 bits without a larger value than one of 12 bits, or of 8, has as many:
    cameras and scanners write them so. As 16 bits it would be nearly black.
    """
    pixels = np.asarray(picture).astype(np.float32)
    transparent = picture.info.get("transparency")
    is_transparent = np.zeros_like(pixels, dtype=bool)
    if transparent is not None:
        is_transparent = pixels == transparent
        pixels[is_transparent] = 0
    lowest = float(pixels.min())
    highest = float(pixels.max())
    if not (lowest >= 0 and highest <= largest):  # also if one is NaN
        raise ValueError(
            f"its pixels are floats from {lowest:g} to {highest:g}, and are read from "
            "0 to 1 only; divide them, or save it with 8 or 16 bits"
        )
    if largest == _LARGEST_OF_16_BITS and not has_range:
        largest = min(size for size in _DEPTHS if highest <= size)
    pixels[is_transparent] = largest  # on white
    return Image.fromarray(np.rint(pixels * (255 / largest)).astype(np.uint8))


def _on_white(picture: Image.Image) -> Image.Image:
    transparent = picture.convert("RGBA")
    white = Image.new("RGBA", transparent.size, "white")
    return Image.alpha_composite(white, transparent)


def as_pixels(picture: Image.Image, size: int) -> Tensor:
    """Return a picture in RGB as a model of that size takes it: uint8, (3, size, size).

    The shorter side is resized to 8/7 of the size, or to the size if that is small.
    Then the middle is cut out. Pixels are those of timm's transform for testing.
    """
    side = size * 8 // 7 if size >= _CROPPED_SIDE else size
    shorter = min(picture.size)
    width, height = (side * length // shorter for length in picture.size)
    resized = picture.resize((width, height), Image.Resampling.BILINEAR)
    left = round((width - size) / 2)
    top = round((height - size) / 2)
    middle = resized.crop((left, top, left + size, top + size))
    return torch.from_numpy(np.array(middle)).permute(2, 0, 1)


def read_picture(source: Any, size: int) -> Tensor:
    """Return a file, or a picture of Pillow, as a model of that size takes it."""
    return as_pixels(as_rgb(open_picture(source)), size)


def main(names: list[str]) -> None:
    """Print the class of each file, with its score, by the exported model beside this
    file.
    """
    folder = Path(__file__).parent
    about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    model = torch.export.load(folder / "model.pt2").module()
    for name in names:
        images = read_picture(name, about["image_shape"][1])[None]
        score, label = model(images).softmax(1).max(1)
        print(f"{name}: {about['class_names'][int(label)]} {float(score):.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
