"""What replicas can be made of, and where it must be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scatterpar.devices import verbs
from scatterpar.replicas.kinds import is_script

__all__ = ["check_placement"]


def check_placement(
    roots: Iterable[nn.Module], device_ids: Sequence[torch.device], *, lazy: bool = False
) -> None:
    """Refuse modules that cannot be replicated from the master, naming what is in the way.

    With ``lazy``, parameters that are not initialised yet are let pass.

    Raises:
        RuntimeError: a lazy module that has not been initialised.
        TypeError: a frozen TorchScript module, or tensors that are made of others.
        ValueError: a parameter or buffer on another device, an embedding that writes its weight.
    """
    expected = verbs.physical(device_ids[0])
    for root in roots:
        _refuse_frozen(root)
        _refuse_renormalised(root)
        for kind, named in (
            ("parameter", root.named_parameters()),
            ("buffer", root.named_buffers()),
        ):
            for name, tensor in named:
                what = f"{type(root).__name__} has the {kind} {name!r}"
                if is_lazy(tensor):
                    if lazy:
                        continue
                    raise RuntimeError(
                        f"{type(root).__name__} has an uninitialised lazy {kind}, {name!r}: "
                        f"call the module once on one micro-batch before the first step"
                    )
                if tensor.device != expected:
                    raise ValueError(
                        f"{type(root).__name__} must be on device_ids[0], which is "
                        f"{device_ids[0]}, but its {kind} {name!r} is on {tensor.device}; "
                        f"call .to({str(expected)!r})"
                    )
                _refuse_packed(what, tensor, len(set(device_ids)))


def _refuse_frozen(root: nn.Module) -> None:
    for name, part in root.named_modules():
        if is_script(part) and not hasattr(part, "training"):
            which = f"its child {name!r}" if name else "the module itself"
            raise TypeError(
                f"{type(root).__name__} cannot be replicated, since {which} is a TorchScript "
                f"module that torch.jit.freeze made: its weights are constants of the code, which "
                f"cannot be trained or moved; pass what it was made of, before freeze"
            )


def _refuse_packed(what: str, tensor: Tensor, memories: int) -> None:
    """Refuse quantised tensors whose values replicas would not take along."""
    kind = type(tensor)
    if hasattr(kind, "__tensor_flatten__"):
        raise TypeError(
            f"{what}, a {kind.__name__}, which is made of other tensors, as torchao's are: "
            f"replicas of such tensors cannot be kept equal; make it a plain tensor, as its "
            f".dequantize() or .full_tensor() does, or leave the module unquantised"
        )
    state = getattr(tensor, "quant_state", None)
    if memories > 1 and (state is not None or kind.__module__.startswith("bitsandbytes.")):
        raise TypeError(
            f"{what}, a {kind.__name__}, which is quantised as bitsandbytes does it: what its "
            f"values mean stays on the first device; use one device, such as device_ids=[0], or "
            f"leave the module unquantised"
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
