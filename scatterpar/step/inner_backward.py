"""Gradients while user code runs in a sub-step: there are none, and none may arrive.

::

    before   the gradients of earlier sub-steps are put aside
    body     forward and criterion, which find ``.grad`` as one call for all rows does
    after    they are back; the engine's own backward pass adds those of the loss

A backward pass in the body adds to a replica's gradients at once, in every micro-batch,
with the weight one. The weight of a micro-batch in the loss of the whole batch never
reaches it, so the sum would be wrong, and nothing afterwards can tell it from the
gradients of the loss. One that ends in detached tensors, as that of gradient caching,
changes no parameter's gradient, and is not refused.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from scatterpar.replicas.refused_modules import parameters_of
from scatterpar.replicas.replicas import Replica

_GRADIENT = attrgetter("grad")


@contextlib.contextmanager
def gradients_put_aside(
    leaves: Sequence[Tensor], replicas: Sequence[Replica]
) -> Iterator[None]:
    """In the body, ``leaves`` have no gradients; later they have their own again.

    ``replicas`` have the leaves, and know their names. Raises ``ValueError`` if the
    body leaves a gradient.
    """
    # Each sub-step asks twice: without a Python call per leaf.
    gradients = list(map(_GRADIENT, leaves))
    has_gradients = _has_gradients(gradients)
    if has_gradients:
        for leaf in leaves:
            leaf.grad = None
    try:
        yield
        present = list(map(_GRADIENT, leaves))
        if _has_gradients(present):
            # One name is enough: the user looks for one backward().
            pairs = zip(leaves, present, strict=True)
            leaf = next(leaf for leaf, gradient in pairs if gradient is not None)
            raise inner_backward(leaf, [replica.root for replica in replicas])
    except GeneratorExit:
        # An interrupt came as the body ended. Since then the step has failed, and the
        # leaves have no gradients.
        has_gradients = False
        raise
    finally:
        if has_gradients:
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient


def _has_gradients(gradients: Sequence[Tensor | None]) -> bool:
    return not {types.NoneType}.issuperset(map(type, gradients))


def inner_backward(leaf: Tensor, roots: Iterable[Any]) -> ValueError:
    """The error for a gradient that a backward pass of user code has brought to
    ``leaf``, which one of ``roots`` has.
    """
    name = f"a parameter of shape {tuple(leaf.shape)}"
    for root in roots:
        for path, parameter in parameters_of(root):
            # By identity: ``==`` compares elements.
            if parameter is leaf:
                name = f"the parameter {path!r}"
    return ValueError(
        f"backward() inside forward or the criterion: its gradient arrived at {name}, "
        f"in each micro-batch, and the engine cannot weight this gradient as it "
        f"weights the loss; return the inner loss from forward, and add it to the "
        f"loss in the criterion. Nothing was changed"
    )
