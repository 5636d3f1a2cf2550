"""A picture of any kind becomes one of 8 bits per colour: upright, on white, in RGB.

Pixels whose range nobody can know are a `ValueError`: they would become black or white.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageOps

_GREY_16 = "I;16", "I;16L", "I;16B", "I;16N"  # Pillow's modes of 16-bit greyscale
_SCALED_TO_16 = "PPM", "PNG"  # formats whose pixels Pillow scales to 16 bits in mode I
_LARGEST_16 = 65535


def open_picture(source: Any) -> Image.Image:
    """Open a file, of which only the header is read yet, or return a library's
    picture.
    """
    if isinstance(source, Image.Image):
        return source
    return Image.open(source)


def as_rgb(picture: Image.Image) -> Image.Image:
    """Return the picture in RGB, turned as its EXIF data says, and on white where it is
    transparent.
    """
    file_format = picture.format
    upright = ImageOps.exif_transpose(picture)
    if upright.mode in _GREY_16:
        upright = _from_16_bits(upright)
    elif upright.mode == "I":
        if file_format not in _SCALED_TO_16:
            raise ValueError(
                "its pixels are 32-bit integers, of which the largest value is not "
                "known; save it with 8 or 16 bits"
            )
        upright = _from_16_bits(upright)
    elif upright.mode == "F":
        upright = _from_floats(upright)
    if upright.has_transparency_data:
        upright = _on_white(upright)
    return upright.convert("RGB")


def _from_16_bits(picture: Image.Image) -> Image.Image:
    """Scale greyscale from 0 to 65535 to 8 bits."""
    pixels = np.asarray(picture).astype(np.float32)
    transparent = picture.info.get("transparency")
    if transparent is not None:
        pixels[pixels == transparent] = _LARGEST_16  # on white
    scaled = np.rint(pixels * (255 / _LARGEST_16))
    return Image.fromarray(scaled.astype(np.uint8))


def _from_floats(picture: Image.Image) -> Image.Image:
    """Scale greyscale from 0 to 1 to 8 bits."""
    pixels = np.asarray(picture)
    lowest = float(pixels.min())
    highest = float(pixels.max())
    if not (lowest >= 0 and highest <= 1):  # also if one is NaN
        raise ValueError(
            f"its pixels are floats from {lowest:g} to {highest:g}, and are read from "
            "0 to 1 only; divide them, or save it with 8 or 16 bits"
        )
    scaled = np.rint(pixels * 255)
    return Image.fromarray(scaled.astype(np.uint8))


def _on_white(picture: Image.Image) -> Image.Image:
    transparent = picture.convert("RGBA")
    white = Image.new("RGBA", transparent.size, "white")
    return Image.alpha_composite(white, transparent)
