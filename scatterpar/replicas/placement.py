"""Where a module is must be where its replicas are made from."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from scatterpar.devices import verbs

__all__ = ["check_placement"]


def check_placement(
    roots: Iterable[nn.Module], master: torch.device, *, lazy: bool = False
) -> None:
    """Refuse modules that cannot be replicated from ``master``, naming what is in the way.

    With ``lazy``, parameters that are not initialised yet are let pass.

    Raises:
        RuntimeError: a lazy module that has not been initialised.
        ValueError: a parameter or buffer on another device, an embedding that writes its weight.
    """
    expected = verbs.physical(master)
    for root in roots:
        _refuse_renormalised(root)
        for kind, named in (
            ("parameter", root.named_parameters()),
            ("buffer", root.named_buffers()),
        ):
            for name, tensor in named:
                if is_lazy(tensor):
                    if lazy:
                        continue
                    raise RuntimeError(
                        f"{type(root).__name__} has an uninitialised lazy {kind}, {name!r}: "
                        f"call the module once on one micro-batch before the first step"
                    )
                if tensor.device != expected:
                    raise ValueError(
                        f"{type(root).__name__} must be on device_ids[0], which is {master}, but "
                        f"its {kind} {name!r} is on {tensor.device}; call .to({str(expected)!r})"
                    )


def _refuse_renormalised(root: nn.Module) -> None:
    """Refuse torch's own modules that write a parameter in forward: replicas share it."""
    for name, module in root.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            kind, norm, order = type(module).__name__, module.max_norm, module.norm_type
            path = f"{name}.weight" if name else "weight"
            raise ValueError(
                f"{kind}(max_norm={norm}) writes the parameter {path!r} in its forward pass, and "
                f"all replicas read it; set its max_norm to None, and before the first step and "
                f"after each of the optimizer's, under torch.no_grad(), call "
                f"{path}.renorm_({order}, 0, {norm})"
            )
