"""Nested values as bytes and back, without pickle: JSON for the structure, then the tensors."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

_LENGTH = 8  # bytes of the number that says how long the JSON is


def to_bytes(value: Any) -> bytes:
    """Encode numbers, strings, None, tensors, and dicts, lists and tuples of them.

    Raises:
        TypeError: something else is in it.

    >>> from_bytes(to_bytes({"a": (1, 2.5), 3: torch.tensor([True])}))
    {'a': (1, 2.5), 3: tensor([True])}
    """
    tensors: list[Tensor] = []
    text = json.dumps(_describe(value, tensors)).encode()
    return b"".join([len(text).to_bytes(_LENGTH), text, *map(_elements, tensors)])


def from_bytes(data: bytes | bytearray) -> Any:
    """Decode what `to_bytes` made; tensors are on the CPU."""
    start = _LENGTH + int.from_bytes(data[:_LENGTH])
    return _build(json.loads(bytes(data[_LENGTH:start])), bytearray(data[start:]))


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        start = sum(t.numel() * t.element_size() for t in tensors[:-1])
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), start]}
    if isinstance(value, dict):
        items = [[_describe(part, tensors) for part in item] for item in value.items()]
        return {"dict": items}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_describe(part, tensors) for part in value]}
    raise TypeError(f"a {type(value).__name__} cannot be sent to another machine")


def _build(described: Any, elements: bytearray) -> Any:
    if not isinstance(described, dict):
        return described
    ((kind, content),) = described.items()
    if kind == "tensor":
        return _tensor(elements, *content)
    parts = [_build(part, elements) for part in content] if kind != "dict" else []
    if kind == "dict":
        return {_build(key, elements): _build(part, elements) for key, part in content}
    return tuple(parts) if kind == "tuple" else parts


def _elements(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _tensor(elements: bytearray, name: str, shape: list[int], start: int) -> Tensor:
    empty = torch.empty(shape, dtype=getattr(torch, name))
    if not empty.numel():
        return empty
    whole = torch.frombuffer(elements, dtype=torch.uint8)
    part = whole[start : start + empty.numel() * empty.element_size()]
    return part.clone().view(empty.dtype).view(shape)
