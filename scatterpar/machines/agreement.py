"""Before the first step: all ranks have the same module, and then rank 0's values.

Nothing is pickled: texts travel as UTF-8 bytes, tensors as the bytes of their elements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scatterpar.devices.chunks import by_dtype, copy_each
from scatterpar.machines.waiting import waiting_for
from scatterpar.torch_private import flatten, unflatten

__all__ = ["agree", "sparse_weights", "take_over"]

_LONGEST_LINE = 512  # bytes of a line in the error, so that all ranks can exchange theirs
_MODULES = "the other ranks' description of the module"


def agree(module: nn.Module, options: str, group: dist.ProcessGroup, control: torch.device) -> None:
    """Make sure that all ranks have the same module, or raise the same error on all.

    Args:
        module: this rank's.
        options: those of the engine that all ranks must have alike.
        group: the ranks.
        control: where the group exchanges small tensors.

    Raises:
        ValueError: names, number, shapes or dtypes differ, or something is not initialised.
    """
    mine = _description(module, options)
    prints = _gather(hashlib.sha256(mine.encode()).digest(), group, control)
    if len(set(prints)) > 1:
        _refuse(mine, group, control)
    lazy = [name for _, name, tensor in _named_tensors(module) if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"{lazy[0]!r} is not initialised yet, and rank 0's values cannot be taken over; call "
            f"the module once before you pass it with a process_group"
        )


def take_over(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give ``module`` rank 0's parameters and buffers: one broadcast per dtype, as bytes."""
    filled = [tensor for _, _, tensor in _named_tensors(module) if tensor.numel()]
    with torch.no_grad():
        for tensors in by_dtype((tensor, tensor) for tensor in filled).values():
            flat = flatten([tensor.detach() for tensor in tensors])
            with waiting_for("rank 0's parameters and buffers", group):
                dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
            values = unflatten(flat, tensors)
            places = [_places(tensor) for tensor in tensors]
            copy_each(
                [tensor[place] for tensor, place in zip(tensors, places, strict=True)],
                [value[place] for value, place in zip(values, places, strict=True)],
            )


def _places(tensor: Tensor) -> tuple[slice, ...]:
    """All of a tensor; of an expanded one, which torch refuses to write, each place once."""
    return tuple(slice(None) if stride else slice(1) for stride in tensor.stride())


def sparse_weights(module: nn.Module) -> set[int]:
    """Ids of the weights whose gradients are sparse: those that only sparse embeddings use."""
    sparse: set[int] = set()
    dense: set[int] = set()
    for child in module.modules():
        is_sparse = isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
        (sparse if is_sparse else dense).update(id(p) for p in child.parameters(recurse=False))
    return sparse - dense


def _refuse(mine: str, group: dist.ProcessGroup, control: torch.device) -> None:
    """Raise the first difference of the lowest rank that differs from rank 0."""
    size = torch.tensor([len(mine.encode())], device=control)
    with waiting_for(_MODULES, group):
        dist.broadcast(size, group=group, group_src=0)
    text = torch.frombuffer(bytearray(mine.encode().ljust(int(size))), dtype=torch.uint8)
    text = text[: int(size)].to(control)
    with waiting_for(_MODULES, group):
        dist.broadcast(text, group=group, group_src=0)
    theirs = bytes(text.tolist()).decode()
    here = ""
    if mine != theirs:
        pairs = zip_longest(theirs.split("\n"), mine.split("\n"), fillvalue="nothing more")
        first, other = next((first, other) for first, other in pairs if first != other)
        here = f"rank 0 has {first}, rank {dist.get_rank(group)} has {other}"
    fixed = here.encode()[:_LONGEST_LINE].ljust(_LONGEST_LINE)
    lines = [line.decode(errors="ignore").rstrip() for line in _gather(fixed, group, control)]
    found = next(line for line in lines if line)
    raise ValueError(f"the ranks' modules differ: {found}; make the same module on every rank")


def _gather(data: bytes, group: dist.ProcessGroup, control: torch.device) -> list[bytes]:
    """Every rank's ``data``, of the same length on all."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(control)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with waiting_for(_MODULES, group):
        dist.all_gather(everyones, mine, group=group)
    return [bytes(tensor.tolist()) for tensor in everyones]


def _description(module: nn.Module, options: str) -> str:
    """A line a tensor, such as ``parameter 'fc.weight' of shape (3, 5), torch.float32``."""
    sparse = sparse_weights(module)
    lines = [
        f"{kind} {name!r} {_kind_of(tensor)}{', sparse' if id(tensor) in sparse else ''}"
        for kind, name, tensor in _named_tensors(module)
    ]
    return "\n".join([*lines, options])


def _kind_of(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return f"not initialised yet, {tensor.dtype}"
    return f"of shape {tuple(tensor.shape)}, {tensor.dtype}"


def _named_tensors(module: nn.Module) -> Iterable[tuple[str, str, Tensor]]:
    for name, parameter in module.named_parameters():
        yield "parameter", name, parameter
    for name, buffer in module.named_buffers():
        yield "buffer", name, buffer
