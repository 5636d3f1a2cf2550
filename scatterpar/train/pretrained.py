"""Start from weights in a file: what fits is taken, what does not is named."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.train.errors import UsageError

_PREFIXES = ("module.", "_orig_mod.", "network.")
_NAMED = 6  # names that are listed


def initialise(model: nn.Module, path: Path) -> str:
    """Copy into a model what a file holds for it; return a line that says what was done.

    A head for another number of classes differs in its shape, and stays as it was initialised.
    So does what the file lacks.

    Args:
        model: changed in place.
        path: a state dict saved by `torch.save`, as it is or under `"model"` or `"state_dict"`,
            or a checkpoint of this tool.

    Raises:
        UsageError: the file cannot be read, or nothing in it fits.
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = {name: own[name] for name in model.state_dict() if name in own}
    found = {_bare(name, wanted): tensor for name, tensor in _read(path).items()}
    fitting = {
        name: found[name]
        for name, tensor in wanted.items()
        if name in found and found[name].shape == tensor.shape
    }
    if not any(name in fitting for name, _ in model.named_parameters()):
        raise UsageError(
            f"--init {path}: nothing in it fits the model; it has {_list(found)}, the model has "
            f"{_list(wanted)}"
        )
    with torch.no_grad():
        for name, tensor in fitting.items():
            wanted[name].copy_(tensor)
    kept = [name for name in wanted if name not in fitting]
    unused = [name for name in found if name not in fitting]
    words = f"initialised from {path}: {len(fitting)} of {len(wanted)} tensors"
    if kept:
        words += f"; not loaded: {_list(kept)}"
    if unused:
        words += f"; not used: {_list(unused)}"
    return words


def _read(path: Path) -> dict[str, Tensor]:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        words = " ".join(str(error).split())
        raise UsageError(f"--init {path} cannot be read: {words:.200}") from error
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise UsageError(f"--init {path} holds a {type(content).__name__}, not a state dict")
    return {str(name): x for name, x in content.items() if isinstance(x, Tensor)}


def _bare(name: str, wanted: Container[str]) -> str:
    """Take off what wrappers put before a name, unless the model has it so."""
    for prefix in _PREFIXES:
        if name not in wanted:
            name = name.removeprefix(prefix)
    return name


def _list(names: Any) -> str:
    names = list(names)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more if names else "none"
