"""Divide the images of a vision-language batch among its rows.

A processor joins the images of all rows: ``pixel_values`` has one entry per image, or
one per patch, and ``image_grid_thw`` the patches of each image. The rows' texts have
placeholder tokens, as many as the model makes of the images. So the images of a row are
found by counting::

    input_ids        row 0: 8 placeholders    row 1: 4 placeholders
    pixel_values     image 0   image 1        image 2                   4 tokens each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch.markers import Rows

# By the name of what has images or videos: the patches of each, the placeholder.
_KINDS = {
    "pixel_values": ("image_grid_thw", ("image_token_id", "image_token_index")),
    "pixel_values_videos": ("video_grid_thw", ("video_token_id", "video_token_index")),
}


def images_by_row(batch: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """``batch`` with images marked as ``Rows``, if its texts say whose they are."""
    divided = dict(batch)
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return divided
    for name, (grid_name, token_names) in _KINDS.items():
        values, grid = batch.get(name), batch.get(grid_name)
        tokens = [getattr(config, token, None) for token in token_names]
        token = next((token for token in tokens if token is not None), None)
        if not isinstance(values, Tensor) or token is None:
            continue
        if grid is None and len(values) == len(ids):
            continue  # one image per row, or as many for each row
        placeholders = ids.eq(token).sum(1).tolist()
        patches = [1] * len(values) if grid is None else grid.prod(1).tolist()
        images = _images_of_rows(placeholders, patches)
        if images is None:
            continue
        by_image = values.split(patches)
        divided[name] = _rows_of(by_image, images)
        for other, value in batch.items():  # such as the sizes of images
            if other == name or not isinstance(value, Tensor) or not value.ndim:
                continue
            is_by_image = len(value) == len(patches) != len(ids)
            if is_by_image or other == grid_name:
                divided[other] = _rows_of(value.split(1), images)
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
    empty = by_image[0][:0]
    entries = []
    for numbers in images:
        entries.append(torch.cat([by_image[n] for n in numbers] or [empty]))
    return Rows(entries, _joined)


def _joined(entries: Sequence[Tensor]) -> Tensor | None:
    """The images of a micro-batch's rows; ``None`` if they have none."""
    joined = torch.cat(list(entries))
    return joined if len(joined) else None
