"""Refuse backward passes that user code runs inside a sub-step.

Such a pass adds to a replica's gradients at once, in every micro-batch, with the weight
one. The weight of a micro-batch in the loss of the whole batch never reaches it, so the
sum would be wrong, and nothing afterwards can tell it from the gradients of the loss::

    before   gradients of earlier sub-steps
    body     forward and criterion: gradients must not change
    after    the engine's own backward pass adds the gradients of the loss

A backward pass that ends in detached tensors, as that of gradient caching, changes no
parameter's gradient, and is not refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

from scatterpar.replicas.refused_modules import parameters_of
from scatterpar.replicas.replicas import Replica

_GRADIENT = attrgetter("grad")
_VERSION_OF_GRADIENT = attrgetter("grad._version")


def gradient_versions(leaves: Sequence[Tensor]) -> list[int | None]:
    """How often each leaf's gradient was written; ``None`` for a leaf without one."""
    # Each sub-step asks twice. Mostly all leaves have one, which needs no Python call
    # per leaf.
    with contextlib.suppress(AttributeError):
        return list(map(_VERSION_OF_GRADIENT, leaves))
    return [
        gradient if gradient is None else gradient._version
        for gradient in map(_GRADIENT, leaves)
    ]


def inner_backward(
    leaves: Sequence[Tensor],
    before: Sequence[int | None],
    replicas: Sequence[Replica],
) -> ValueError:
    """The error for ``leaves`` whose gradients are no longer those of ``before``.

    ``replicas`` have the leaves, and know their names.
    """
    after = gradient_versions(leaves)
    # One name is enough: the user looks for one backward().
    changed = next(
        leaf for leaf, old, new in zip(leaves, before, after, strict=True) if old != new
    )
    name = f"a parameter of shape {tuple(changed.shape)}"
    for replica in replicas:
        for path, parameter in parameters_of(replica.root):
            # By identity: ``==`` compares elements.
            if parameter is changed:
                name = f"the parameter {path!r}"
    return inner_backward_at(name)


def inner_backward_at(name: str) -> ValueError:
    """The error for a gradient that a backward pass of user code has brought."""
    return ValueError(
        f"backward() inside forward or the criterion: its gradient arrived at {name}, "
        f"in each micro-batch, and cannot be weighted as the loss is; return that loss "
        f"from forward, and add it to the loss in the criterion. Nothing was changed"
    )
