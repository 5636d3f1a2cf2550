"""Layers that tie the rows of a part to each other."""

from __future__ import annotations

from torch import nn


def uses_batch_statistics(layer: nn.Module) -> bool:
    """Whether a layer is a batch normalisation that uses its input's statistics."""
    is_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
    return is_norm and (layer.training or layer.running_mean is None)
