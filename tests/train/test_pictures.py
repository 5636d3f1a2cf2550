"""Pictures of all kinds become what a viewer shows: upright, on white, not too bright.

Each picture is dark on its left and bright on its right, in the mode and the format of its
row. Pillow writes the files here.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import ExifTags, Image

from scatterpar.train.pictures import as_rgb, open_picture

DARK, BRIGHT = 60, 200
LOSSY = {"JPEG", "WEBP"}
FORMATS = ["JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP"]
GREY = np.full((16, 32), DARK, np.uint8)
GREY[:, 16:] = BRIGHT


def grey(mode, factor=257, kind=np.uint16):
    """Greyscale of more than 8 bits: `factor` is the step of an 8-bit one."""
    array = (GREY.astype(np.float64) * factor).astype(kind)
    picture = Image.fromarray(array)
    assert picture.mode == mode
    return picture


def in_mode(mode):
    """The picture in a mode of 8 bits, as Pillow converts it."""
    picture = Image.fromarray(GREY)
    if mode == "PA":
        return picture.convert("P").convert("PA")
    return picture.convert("RGB" if mode in ("LAB", "YCbCr") else mode).convert(mode)


# A picture, and the formats of files that can hold it.
KINDS = {
    "L": (in_mode("L"), FORMATS),
    "LA": (in_mode("LA"), ["PNG", "TIFF", "WEBP"]),
    "P": (in_mode("P"), ["PNG", "BMP", "TIFF", "WEBP"]),
    "PA": (in_mode("PA"), ["TIFF"]),
    "RGB": (in_mode("RGB"), FORMATS),
    "RGBA": (in_mode("RGBA"), ["PNG", "PPM", "BMP", "TIFF", "WEBP"]),
    "RGBX": (in_mode("RGBX"), ["JPEG", "TIFF", "WEBP"]),
    "CMYK": (in_mode("CMYK"), ["JPEG", "TIFF", "WEBP"]),
    "YCbCr": (in_mode("YCbCr"), ["JPEG", "TIFF", "WEBP"]),
    "LAB": (in_mode("LAB"), ["TIFF"]),
    "I;16": (grey("I;16"), ["PNG", "PPM", "TIFF"]),
    "I;16B": (grey("I;16B", kind=">u2"), ["PNG", "TIFF"]),
    "F": (grey("F", 1 / 255, np.float32), ["TIFF"]),
}
ROWS = [(kind, name) for kind, (_, names) in KINDS.items() for name in names]

# How programs save a format: options of Pillow's ``save``.
WAYS = {
    "JPEG": [
        {"progressive": True},
        {"optimize": True},
        {"quality": 50},
        {"quality": 100},
        {"subsampling": "4:4:4"},
        {"subsampling": "4:2:0"},
        {"dpi": (300, 300)},
        {"comment": "by a camera"},
        {"restart_marker_rows": 1},
    ],
    "PNG": [
        {"compress_level": 0},
        {"compress_level": 9},
        {"optimize": True},
        {"dpi": (72, 72)},
        {"save_all": True},
    ],
    "PPM": [],
    "BMP": [{"dpi": (300, 300)}],
    "TIFF": [
        {"compression": "tiff_lzw"},
        {"compression": "tiff_adobe_deflate"},
        {"compression": "packbits"},
        {"compression": "zstd"},
        {"compression": "lzma"},
        {"big_tiff": True},
        {"description": "by a scanner", "dpi": (600, 600)},
        {"save_all": True},
    ],
    "WEBP": [
        {"lossless": True},
        {"lossless": True, "method": 6},
        {"quality": 50},
        {"quality": 100},
        {"save_all": True},
        {"exact": True},
    ],
}
SAVED = [
    (kind, name, way)
    for kind, name in ROWS
    for way in WAYS[name]
    # Pillow cannot read what it writes there.
    if not (kind == "I;16B" and "big_tiff" in way)
]
UPRIGHT_AND_TURNED = range(1, 9)  # EXIF's orientations


def stored(picture, name, **options):
    """The picture, opened from a file of that format."""
    file = io.BytesIO()
    picture.save(file, name, **options)
    file.seek(0)
    return open_picture(file)


def levels(picture):
    """The darkest and the brightest value of the left and right half."""
    assert picture.mode == "RGB"
    array = np.asarray(picture)
    left, right = array[:, :12], array[:, -12:]
    return tuple(int(x) for x in (left.min(), left.max(), right.min(), right.max()))


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_kinds_keep_their_brightness(kind, name):
    found = levels(as_rgb(stored(KINDS[kind][0], name)))
    assert found == pytest.approx((DARK, DARK, BRIGHT, BRIGHT), abs=2)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "way"), SAVED)
def test_saved_ways_keep_brightness(kind, name, way):
    found = levels(as_rgb(stored(KINDS[kind][0], name, **way)))
    lossy = name in LOSSY and not way.get("lossless")
    assert found == pytest.approx((DARK, DARK, BRIGHT, BRIGHT), abs=4 if lossy else 2)


@pytest.mark.parametrize("bits", [8, 12])
@pytest.mark.parametrize("name", ["PNG", "TIFF"])
def test_fewer_bits_in_16_have_their_range(name, bits):
    """Cameras and microscopes write 12 bits into files of 16; they were nearly black."""
    picture = grey("I;16", (2**bits - 1) / 255)
    found = levels(as_rgb(stored(picture, name)))
    assert found == pytest.approx((DARK, DARK, BRIGHT, BRIGHT), abs=1)
    # A file of 16 bits that uses more than 12 keeps its brightness.
    dark = levels(as_rgb(stored(grey("I;16", 32), name)))
    assert dark == pytest.approx((7, 7, 25, 25), abs=1)


def test_transparent_level_is_white_in_any_depth():
    options = {"transparency": BRIGHT * 16}
    found = levels(as_rgb(stored(grey("I;16", 16), "PNG", **options)))
    assert found[2:] == (255, 255)
    assert found[0] == pytest.approx(DARK * 16 / 4095 * 255, abs=1)


@pytest.mark.parametrize("name", FORMATS)
def test_one_bit_is_black_and_white(name):
    picture = Image.fromarray(GREY > 100)
    assert picture.mode == "1"
    low, _, _, high = levels(as_rgb(stored(picture, name)))
    assert (low, high) == pytest.approx((0, 255), abs=8 if name in LOSSY else 0)


@pytest.mark.parametrize("largest", [1023, 4095, 65535])
def test_pgm_scaled_by_largest_value(largest):
    array = np.rint(GREY / 255 * largest).astype(">u2")
    text = f"P5\n{GREY.shape[1]} {GREY.shape[0]}\n{largest}\n"
    picture = open_picture(io.BytesIO(text.encode() + array.tobytes()))
    assert levels(as_rgb(picture)) == pytest.approx((DARK, DARK, BRIGHT, BRIGHT), abs=1)
    # The file says its largest value, so that a dark one stays dark.
    dark = array // 32
    picture = open_picture(io.BytesIO(text.encode() + dark.astype(">u2").tobytes()))
    assert levels(as_rgb(picture))[3] < 10


@pytest.mark.parametrize("name", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", UPRIGHT_AND_TURNED)
def test_exif_orientation_is_applied(orientation, name):
    """Each stored picture is turned so that a viewer shows the same one."""
    shown = Image.fromarray(GREY).convert("RGB")
    shown.paste((DARK, BRIGHT, DARK), (0, 0, 32, 8))  # also not the same upside down
    undo = {
        1: (),
        2: (Image.Transpose.FLIP_LEFT_RIGHT,),
        3: (Image.Transpose.ROTATE_180,),
        4: (Image.Transpose.FLIP_TOP_BOTTOM,),
        5: (Image.Transpose.TRANSPOSE,),
        6: (Image.Transpose.ROTATE_90,),
        7: (Image.Transpose.TRANSVERSE,),
        8: (Image.Transpose.ROTATE_270,),
    }
    turned = shown
    for method in undo[orientation]:
        turned = turned.transpose(method)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    options = {"lossless": True} if name == "WEBP" else {}
    found = as_rgb(stored(turned, name, exif=exif, **options))
    assert found.size == shown.size
    difference = np.asarray(found).astype(int) - np.asarray(shown)
    assert np.abs(difference).mean() < 8


def test_exif_turns_16_bit_pictures():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 3
    found = levels(as_rgb(stored(grey("I;16"), "PNG", exif=exif)))
    assert found == (BRIGHT, BRIGHT, DARK, DARK)


def holes(mode):
    """A dark picture, of which the right half is transparent."""
    picture = Image.new("RGBA", (32, 16), (DARK, DARK, DARK, 255))
    picture.paste((0, 0, 0, 0), (16, 0, 32, 16))
    return picture.convert(mode)


@pytest.mark.parametrize(
    ("name", "picture", "options"),
    [
        ("PNG", holes("RGBA"), {}),
        ("TIFF", holes("RGBA"), {}),
        ("WEBP", holes("RGBA"), {"lossless": True}),
        ("PNG", holes("LA"), {}),
        ("TIFF", holes("LA"), {}),
        ("PNG", Image.fromarray(GREY), {"transparency": BRIGHT}),
        ("PNG", in_mode("RGB"), {"transparency": (BRIGHT,) * 3}),
        ("PNG", Image.fromarray(GREY).quantize(2), {"transparency": b"\xff\x00"}),
        ("PNG", grey("I;16"), {"transparency": BRIGHT * 257}),
    ],
)
def test_transparent_pictures_on_white(name, picture, options):
    found = as_rgb(stored(picture, name, **options))
    if picture.mode == "P":  # either half is the transparent one
        assert sorted(set(np.asarray(found).flatten()))[-1] == 255
    else:
        assert levels(found) == (DARK, DARK, 255, 255)


def test_half_transparent_mixed_with_white():
    picture = Image.new("RGBA", (32, 16), (0, 0, 0, 128))
    assert levels(as_rgb(picture))[0] == 127


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        (grey("F", 1, np.float32), "floats from 60 to 200, and are read from 0 to 1"),
        (grey("F", -1, np.float32), "floats from -200 to -60"),
        (grey("F", np.nan, np.float32), "floats from nan to nan"),
        (grey("I", 1, np.int32), "32-bit integers, of which the largest value is not"),
    ],
)
def test_unknown_pixel_range_refused(picture, words):
    with pytest.raises(ValueError, match=words):
        as_rgb(stored(picture, "TIFF"))


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (6000, 4000)])
def test_any_size_is_read(size):
    picture = Image.new("L", size, BRIGHT)
    found = as_rgb(stored(picture, "PNG"))
    assert (found.size, found.getpixel((0, 0))) == (size, (BRIGHT,) * 3)
