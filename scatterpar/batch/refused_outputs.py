"""Outputs of a module that are refused, with what to return in their place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch.nested import atoms
from scatterpar.batch.objects import tensors_within

_DEPTH_OF_OUTPUTS = 5  # a distribution of another one, in a dict of an object


def refuse_unjoinable(output: Any) -> None:
    """Refuse distributions and sparse tensors in an output whose rows are joined.

    Nobody can detach or join a distribution's tensors. The gradients of joined rows are
    dense.
    """
    for atom in atoms(output):
        if isinstance(atom, torch.distributions.Distribution):
            raise TypeError(
                f"the module's output contains a {type(atom).__name__}, a "
                "distribution, whose tensors can be neither detached nor joined; "
                "return the tensors of the distribution, and make the distribution in "
                "the criterion"
            )
        is_tensor = isinstance(atom, Tensor) and not atom.is_nested
        if is_tensor and atom.layout != torch.strided:
            raise TypeError(
                f"the module's output contains a tensor of layout {atom.layout}, "
                "which whole_batch=True cannot join; return output.to_dense()"
            )


def refuse_generators(output: Any) -> None:
    """Refuse generators in an output.

    They would run later, outside of any replica's context.
    """
    for atom in atoms(output):
        if isinstance(atom, Iterator):
            raise TypeError(
                f"the module's output contains a {type(atom).__name__}, an iterator; "
                f"return a list or tuple of its items"
            )


def refuse_graphs(output: Any) -> None:
    """Refuse objects in an output, such as distributions, whose tensors have a graph.

    Nobody can detach these tensors, and each would keep a graph alive after the step.
    """
    for atom in atoms(output):
        # A mapping or tensor has no attributes here: its tensors are detached already.
        if any(
            tensor.grad_fn is not None
            for tensor in tensors_within(atom, _DEPTH_OF_OUTPUTS)
        ):
            raise TypeError(
                f"the output contains a {type(atom).__name__}, whose tensors have a "
                "graph and cannot be detached; return these tensors in a tuple, dict "
                "or dataclass, or pass return_outputs=function, where function(output) "
                "returns the tensors that you need"
            )
