"""Weights that forward hooks of ``torch.nn.utils`` compute: pruning and weight norm.

They keep ``weight`` as an attribute, which each forward pass sets anew::

    weight_orig * weight_mask            pruning
    weight_g * weight_v / norm(weight_v) weight norm

Here no forward pass of the user's module does, but later masks, for example, are
chosen by that attribute. So it is set whenever replicas are refreshed, as a forward
pass would.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.weight_norm import WeightNorm


@dataclass(frozen=True)
class ComputedWeight:
    """A weight that ``hook`` computes for ``module``."""

    module: nn.Module
    hook: Any

    def set(self) -> None:
        """Set the module's attribute. Call it under ``torch.no_grad()``."""
        if isinstance(self.hook, WeightNorm):
            name = self.hook.name
            weight = self.hook.compute_weight(self.module)
        else:
            name = self.hook._tensor_name
            weight = self.hook.apply_mask(self.module)
        present = getattr(self.module, name)
        if present.shape == weight.shape and present.device == weight.device:
            # The same tensor, so that replicas need no rebuilding. Its memory is not
            # written, because callbacks let others share it.
            present.data = weight
        else:
            setattr(self.module, name, weight)


def computed_weights(modules: Iterable[nn.Module]) -> list[ComputedWeight]:
    """The weights that forward hooks of these modules compute."""
    weights: list[ComputedWeight] = []
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, (prune.BasePruningMethod, WeightNorm)):
                weights.append(ComputedWeight(module, hook))
    return weights
