"""Read the IDX files of the MNIST family, and say exactly what is wrong with one that is not.

The format: two zero bytes, a byte for the element type (8: unsigned bytes), a byte for the
number of dimensions, each dimension as a big-endian 32-bit number, and then the elements.
Source: LeCun, Cortes, Burges, "The MNIST database of handwritten digits".
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from scatterpar.train.errors import UsageError

_UNSIGNED_BYTES = 8
_GZIP_MAGIC = b"\x1f\x8b"
_KINDS = {1: "labels", 3: "images"}


def read_images(path: Path) -> Tensor:
    """Read a file of images: uint8, shape (images, height, width).

    Raises:
        UsageError: the file cannot be read, or is not a whole IDX file of images.
    """
    return _read(path, dimensions=3)


def read_labels(path: Path) -> Tensor:
    """Read a file of labels: uint8, shape (labels,).

    Raises:
        UsageError: the file cannot be read, or is not a whole IDX file of labels.
    """
    return _read(path, dimensions=1)


def _read(path: Path, dimensions: int) -> Tensor:
    content = _bytes_of(path)
    shape = _shape(path, content, dimensions)
    found, expected = len(content) - 4 - 4 * dimensions, math.prod(shape)
    if found != expected:
        fault = "truncated" if found < expected else "longer than it says"
        sizes = " x ".join(str(size) for size in shape)
        raise UsageError(
            f"{path} is {fault}: its header promises {sizes} = {expected} bytes of data, "
            f"but {found} follow it"
        )
    if expected == 0:
        raise UsageError(f"{path} is empty: its header says {' x '.join(map(str, shape))}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * dimensions).view(shape)


def _bytes_of(path: Path) -> bytearray:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    is_compressed, says_compressed = content.startswith(_GZIP_MAGIC), path.suffix == ".gz"
    if says_compressed and not is_compressed:
        raise UsageError(f"{path} is not a gzip file, though its name ends in .gz")
    if is_compressed and not says_compressed:
        raise UsageError(f"{path} is a gzip file, though its name does not end in .gz: rename it")
    if not is_compressed:
        return bytearray(content)
    try:
        return bytearray(gzip.decompress(content))
    except EOFError as error:
        raise UsageError(f"{path} is truncated: its gzip data end too early") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is a damaged gzip file: {error}") from error


def _shape(path: Path, content: bytearray, dimensions: int) -> tuple[int, ...]:
    expected = f"a file of {_KINDS[dimensions]} begins with 00 00 08 {dimensions:02x}"
    if len(content) < 4:
        raise UsageError(f"{path} is truncated: it has {len(content)} bytes, but {expected}")
    begin = content[:4].hex(" ")
    if content[:2] != b"\0\0":
        raise UsageError(f"{path} is not an IDX file: it begins with {begin}, but {expected}")
    if content[2] != _UNSIGNED_BYTES:
        raise UsageError(f"{path} does not hold unsigned bytes: it begins with {begin}, {expected}")
    if content[3] != dimensions:
        kind = _KINDS.get(content[3], f"{content[3]}-dimensional data")
        raise UsageError(
            f"{path} holds {kind} where {_KINDS[dimensions]} are expected: "
            f"it begins with {begin}, but {expected}"
        )
    if len(content) < 4 + 4 * dimensions:
        raise UsageError(f"{path} is truncated: it ends within its header")
    return struct.unpack_from(f">{dimensions}I", content, 4)
