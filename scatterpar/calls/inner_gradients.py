"""Backward passes inside of a call: none may reach what is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from scatterpar.step.inner_backward import inner_backward
from scatterpar.step.substeps import set_aside


@contextlib.contextmanager
def refused_inner_backward(root: Any, leaves: Sequence[Tensor]) -> Iterator[None]:
    """In the body no gradient may arrive at ``leaves``; their own are put aside.

    Raises ``ValueError`` with the name of one. A gradient that a replica adds is not
    weighted, as the loss will be.
    """
    with set_aside(leaves):
        yield
        for leaf in leaves:
            if leaf.grad is not None:
                raise inner_backward(leaf, [root])
