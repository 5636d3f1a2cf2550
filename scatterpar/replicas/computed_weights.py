"""Weights that forward hooks of ``torch.nn.utils`` compute: pruning and weight norm.

They keep ``weight`` as an attribute, which each forward pass sets anew::

    weight_orig * weight_mask            pruning
    weight_g * weight_v / norm(weight_v) weight norm

Here no forward pass of the user's module does, but later masks, for example, are
chosen by that attribute. So it is set whenever replicas are updated, as a forward
pass would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def set_computed(module: nn.Module, hook: Any) -> bool:
    """Set the attribute of ``module`` that ``hook`` computes.

    Call it under ``torch.no_grad()``. Returns whether the attribute is the same tensor
    as before.
    """
    name = name_of_computed(hook)
    if isinstance(hook, WeightNorm):
        weight = hook.compute_weight(module)
    else:
        weight = hook.apply_mask(module)
    present = getattr(module, name)
    is_alike = present.shape == weight.shape and present.device == weight.device
    # A call in inference mode has computed one that counts no writes.
    if not is_alike or present.is_inference():
        setattr(module, name, weight)
        return False
    # The same tensor, so that replicas need no rebuilding. Its memory is not written,
    # because callbacks let others share it.
    present.data = weight
    return True


def name_of_computed(hook: Any) -> str:
    """The attribute that ``hook`` computes."""
    name: str = hook.name if isinstance(hook, WeightNorm) else hook._tensor_name
    return name


def computing_hooks(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Any]]:
    """The modules that have such hooks, each with its hook."""
    hooks: list[tuple[nn.Module, Any]] = []
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, (prune.BasePruningMethod, WeightNorm)):
                hooks.append((module, hook))
    return hooks


def spectral_weights(
    modules: Iterable[nn.Module],
) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules with ``torch.nn.utils.spectral_norm``, each with the attribute
    that it computes. Forward passes alone set that attribute.
    """
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                yield module, hook.name


def computed_tensors(hooks: Iterable[tuple[nn.Module, Any]]) -> set[int]:
    """The ``id`` of each tensor that such hooks have computed."""
    return {id(getattr(module, name_of_computed(hook))) for module, hook in hooks}
