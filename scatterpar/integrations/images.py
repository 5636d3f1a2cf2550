"""Divide the images of a vision-language batch among its rows.

A processor joins the images of all rows: ``pixel_values`` has one entry per image, or
one per patch, and ``image_grid_thw`` the patches of each image. The rows' texts have
placeholder tokens, as many as the model makes of the images. So the images of a row are
found by counting::

    input_ids        row 0: 8 placeholders    row 1: 4 placeholders
    pixel_values     image 0   image 1        image 2                   4 tokens each
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch.markers import Rows

# By the name of what has images or videos: the patches of each, the placeholder.
_KINDS = {
    "pixel_values": ("image_grid_thw", ("image_token_id", "image_token_index")),
    "pixel_values_videos": ("video_grid_thw", ("video_token_id", "video_token_index")),
}


def images_by_row(batch: Any, config: Any) -> Any:
    """``batch`` with images marked as ``Rows``, if its texts say whose they are."""
    if not isinstance(batch, MutableMapping):
        return batch
    divided = copy.copy(batch)
    # Packed rows are one row, which cannot be divided.
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return divided
    for name, (grid_name, token_names) in _KINDS.items():
        values = batch.get(name)
        tokens = [getattr(config, name, None) for name in token_names]
        token = next((token for token in tokens if token is not None), None)
        # Without a placeholder nothing says whose an image is.
        if isinstance(values, Tensor) and token is not None:
            placeholders = ids.eq(token).sum(1).tolist()
            divided.update(_divided(batch, name, grid_name, placeholders))
    return divided


def _divided(
    batch: Mapping[str, Any], name: str, grid_name: str, placeholders: Sequence[int]
) -> dict[str, Rows]:
    """The entries of ``batch`` that have an entry per image or patch, as ``Rows``.

    Args:
        batch: the batch.
        name: the name of the images or videos.
        grid_name: the name of the numbers of their patches.
        placeholders: the number of placeholder tokens of each row.
    """
    num_rows = len(placeholders)
    values = batch[name]
    grid = batch.get(grid_name)
    # Three rows may have no image, one and two.
    is_equal = len(set(placeholders)) == 1
    if grid is None and len(values) == num_rows and is_equal:
        return {}  # one image per row, or as many for each row
    patches = [1] * len(values) if grid is None else grid.prod(1).tolist()
    images = _images_of_rows(placeholders, patches)
    if images is None:
        return {}
    divided = {name: _rows_of(values.split(patches), images)}
    for other_name, value in batch.items():  # such as the sizes of images
        if other_name == name or not isinstance(value, Tensor) or not value.ndim:
            continue
        has_image_entries = len(value) == len(patches) != num_rows
        if has_image_entries or other_name == grid_name:
            divided[other_name] = _rows_of(value.split(1), images)
    return divided


def _images_of_rows(
    placeholders: Sequence[int], patches: Sequence[int]
) -> list[range] | None:
    """The numbers of each row's images; ``None`` if the counts do not show them."""
    if not patches or sum(placeholders) == 0:
        return None
    images: list[range] = []
    first = 0
    for tokens in placeholders:
        stop = first
        # tokens / all tokens == patches of the row's images / all patches
        wanted = tokens * sum(patches)
        # In integers: a quotient would be rounded.
        while stop < len(patches) and wanted > 0:
            wanted -= patches[stop] * sum(placeholders)
            stop += 1
        if wanted != 0:
            return None
        images.append(range(first, stop))
        first = stop
    return images if first == len(patches) else None


def _rows_of(by_image: Sequence[Tensor], images: Sequence[range]) -> Rows:
    """One entry per row: the tensors of its images, joined."""
    empty = by_image[0][:0]  # for rows without images
    entries = []
    for numbers in images:
        images_of_row = [by_image[number] for number in numbers]
        entries.append(torch.cat(images_of_row or [empty]))
    return Rows(entries, _joined)


def _joined(entries: Sequence[Tensor]) -> Tensor | None:
    """The images of a micro-batch's rows; ``None`` if they have none."""
    joined = torch.cat(list(entries))
    return joined if len(joined) else None
