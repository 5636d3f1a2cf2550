"""Layers that tie the rows of a part to each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn


def uses_batch_statistics(layer: nn.Module) -> bool:
    """Whether a layer is a batch normalisation that uses its input's statistics."""
    is_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
    return is_norm and (layer.training or layer.running_mean is None)


def running_statistics(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The buffers that normalisations move in each call in training mode."""
    for module in modules:
        if isinstance(module, nn.modules.batchnorm._NormBase):
            yield from module.buffers(recurse=False)
