"""What a criterion does with two micro-batches joined, beside each: told by gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.step import nested
from scatterpar.step.join import join_rows
from scatterpar.step.markers import transform
from scatterpar.step.slices import opened, together
from scatterpar.step.substeps import scalar_loss
from scatterpar.step.task import as_call
from scatterpar.verify.evidence import Finding, Pieces, Unsure, tolerance_of

__all__ = ["by_gradients", "in_parameters"]

# Right gradients agree to 2e-16, 1.2e-7, 1e-3 and 8e-3, and wrong ones are off by 1e-2 and more.
_TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
_SMALLEST_SCALE = 1e-6  # gradients smaller than this part of the largest are measured against it


def by_gradients(criterion: Callable[[Any, Any], Any], pieces: Pieces) -> Finding | None:
    """Compare gradients with respect to outputs, in float64 where the criterion lets us.

    Returns:
        What was found; ``None`` where no output with rows has a part in the loss.

    Raises:
        Unsure: numbers that are not finite, all zero, of an unknown dtype, or that are others
            when they are computed again.
        Exception: what the criterion raises.
    """
    try:
        return _by_gradients(criterion, pieces, wide=True)
    except Unsure:
        raise
    except Exception:
        return _by_gradients(criterion, pieces, wide=False)


def _by_gradients(
    criterion: Callable[[Any, Any], Any], pieces: Pieces, *, wide: bool
) -> Finding | None:
    dtypes: set[torch.dtype] = set()
    losses: list[float] = []
    slopes = partial(_slopes, criterion, wide=wide, dtypes=dtypes, losses=losses)
    with torch.inference_mode(False), torch.enable_grad():
        joined = slopes(pieces)
        if not any(map(_tells, joined)):
            return None
        apart = [
            slopes(pieces.only(k))[0] if factor else _zeros(joined[k])
            for k, factor in enumerate(pieces.factors)
        ]
        if not all(slope.isfinite().all() for own in (*joined, *apart) for slope in own):
            raise Unsure("a gradient is NaN or infinite", lasting=False)
        tolerance = tolerance_of(dtypes, _TOLERANCES)
        off = _difference(joined, apart, pieces.factors)
        if off <= tolerance:
            if pieces.factors != (1.0, 1.0):
                return Finding()
            if not all(map(_tells, apart)):
                raise Unsure("a mean of one thing alone is its sum", lasting=False)
            slopes(pieces)
            return _beside_a_sum(losses, tolerance)
        k = 0 if pieces.factors[0] else 1
        again = slopes(pieces.only(k))
        if _difference(again, [apart[k]], (1.0,)) > tolerance:
            raise Unsure("the criterion gives another result each time")
    taken = [
        [slope * factor for slope in own] for own, factor in zip(apart, pieces.factors, strict=True)
    ]
    return replace(_explained(off, tolerance, joined, apart, pieces), slopes=(joined, taken))


def _beside_a_sum(losses: Sequence[float], tolerance: float) -> Finding:
    """Whether a sum has a part that is the same for all rows, which its gradients do not show.

    Args:
        losses: of two pieces joined, of each of them, and of both joined again.
        tolerance: relative.
    """
    joined, one, other, again = losses
    size = max(map(abs, losses))
    if abs(joined - again) > tolerance * size:
        raise Unsure("the criterion gives another result each time")
    off = abs(joined - one - other) / size if size else 0.0
    return Finding() if off <= tolerance else Finding(off, "more than a sum")


def _slopes(
    criterion: Callable[[Any, Any], Any],
    pieces: Pieces,
    *,
    wide: bool,
    dtypes: set[torch.dtype],
    losses: list[float],
) -> list[list[Tensor]]:
    """Gradients of the criterion of all pieces joined, for each piece's outputs that have rows.

    The dtypes that they go through on their way are added to ``dtypes``, the loss to ``losses``.
    """
    found: list[list[Tensor]] = []
    outputs: list[Any] = []
    for output in pieces.given:
        own: list[Tensor] = []
        outputs.append(nested.transform(partial(_leaf, wide=wide, found=own), output))
        found.append(own)
    flat = [leaf for own in found for leaf in own]
    if not flat:
        return found
    given = together(pieces.targets, pieces.dim)
    targets = opened(transform(partial(_copy, wide=wide), given))
    output = join_rows(outputs, pieces.dim, pieces.factors, pieces.rows, lists=True)
    loss = scalar_loss(criterion(output, targets), "the criterion")
    losses.append(loss.item())
    _note_dtypes(loss, dtypes)
    slopes = torch.autograd.grad(loss, flat, allow_unused=True, materialize_grads=True)
    remaining = iter(slopes)
    return [[next(remaining).detach() for _ in own] for own in found]


def _note_dtypes(loss: Tensor, found: set[torch.dtype]) -> None:
    """Have the backward pass from ``loss`` say which dtypes the operators before it produced."""

    def look(gradients: Sequence[Tensor | None]) -> None:
        found.update(gradient.dtype for gradient in gradients if gradient is not None)

    found.add(loss.dtype)
    nodes = [loss.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            node.register_prehook(look)
            nodes += [following for following, _ in node.next_functions]


def _leaf(leaf: Any, wide: bool, found: list[Tensor]) -> Any:
    """A copy that gradients are asked for, where it has rows; criteria may write into it."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return _copy(leaf, wide)
    made: Tensor = _copy(leaf, wide).requires_grad_()
    if made.ndim:
        found.append(made)
    return made.clone()


def _copy(leaf: Any, wide: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if wide and (leaf.is_floating_point() or leaf.is_complex()):
        return _wide(leaf.detach().clone())
    return leaf.detach().clone()


def _tells(slopes: Sequence[Tensor]) -> bool:
    """Whether a piece has a part in the loss: where all its labels are left out it has none."""
    return any(slope.any() for slope in slopes)


def _zeros(slopes: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(slope) for slope in slopes]


def _difference(
    joined: Sequence[Sequence[Tensor]],
    apart: Sequence[Sequence[Tensor]],
    factors: Sequence[float],
) -> float:
    """The largest relative difference of a tensor's gradients, each measured by its own size."""
    pairs = [
        (_wide(one), _wide(other) * factor)
        for own, its, factor in zip(joined, apart, factors, strict=True)
        for one, other in zip(own, its, strict=True)
    ]
    sizes = [max(_norm(one), _norm(other)) for one, other in pairs]
    floor = _SMALLEST_SCALE * max(sizes)
    return max(
        _norm(one - other) / max(size, floor) if size else 0.0
        for (one, other), size in zip(pairs, sizes, strict=True)
    )


def _explained(
    off: float,
    tolerance: float,
    joined: list[list[Tensor]],
    apart: list[list[Tensor]],
    pieces: Pieces,
) -> Finding:
    if all(map(_tells, apart)) and _difference(joined, apart, (1.0, 1.0)) <= tolerance:
        return Finding(off, "sum", (1.0, 1.0))
    if _difference(joined, apart, pieces.by_rows) <= tolerance:
        return Finding(off, "mean", pieces.by_rows)
    first, second = (_multiple(one, other) for one, other in zip(joined, apart, strict=True))
    is_mean = abs(first + second - 1) <= 10 * tolerance
    if is_mean and _difference(joined, apart, (first, second)) <= tolerance:
        return Finding(off, "weighted", (first, second))
    return Finding(off, "coupled")


def _multiple(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The number that ``other`` is best multiplied with to give ``one``."""
    pairs = [(_wide(a), _wide(b)) for a, b in zip(one, other, strict=True)]
    product = sum(float((b.conj() * a).sum().real) for a, b in pairs)
    square = sum(_norm(b) ** 2 for _, b in pairs)
    return product / square if square else 0.0


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def in_parameters(
    module: nn.Module, inputs: Pieces, finding: Finding, autocast: Sequence[str]
) -> Finding:
    """The finding, told by the parameters' gradients instead of the outputs'.

    What a module merely passes on, such as a mask beside the logits, is no output in this sense:
    a criterion that divides by it has a gradient there, but no parameter ever gets it.

    Args:
        module: computed the outputs.
        inputs: the pieces, with the inputs as what is given.
        finding: what was found, with its slopes.
        autocast: the device types that autocast is enabled for.
    """
    assert finding.slopes is not None
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return finding
    joined, taken = (
        _pulled(module, parameters, inputs.given, slopes, autocast) for slopes in finding.slopes
    )
    size = max(_size(joined), _size(taken))
    off = _size([a - b for a, b in zip(joined, taken, strict=True)]) / size if size else 0.0
    tolerance = tolerance_of({p.dtype for p in parameters}, _TOLERANCES)
    return Finding() if off <= tolerance else replace(finding, off=off, slopes=None)


def _pulled(
    module: nn.Module,
    parameters: Sequence[nn.Parameter],
    inputs: Sequence[Any],
    slopes: Sequence[Sequence[Tensor]],
    autocast: Sequence[str],
) -> list[Tensor]:
    """What the parameters get of the outputs' gradients, each piece's graph by itself."""
    total = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
    for given, own in zip(inputs, slopes, strict=True):
        with torch.inference_mode(False), torch.enable_grad():
            args, kwargs = as_call(opened(given, copy=True))
            output = module(*args, **kwargs)
        roots = [t for t in nested.tensors(output) if t.requires_grad and t.ndim]
        gradients = [slope.to(root.dtype) for slope, root in zip(own, roots, strict=True)]
        with contextlib.ExitStack() as stack:
            for kind in autocast:
                stack.enter_context(torch.autocast(kind, enabled=False))
            found = torch.autograd.grad(roots, parameters, gradients, allow_unused=True)
        total = [a if b is None else a + b for a, b in zip(total, found, strict=True)]
    return total


def _size(tensors: Sequence[Tensor]) -> float:
    return math.hypot(*(_norm(_wide(tensor.to_dense())) for tensor in tensors))
