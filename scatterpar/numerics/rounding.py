"""How far rounding may change the results of a computation.

Right results of one gradient, computed in two ways, differ by rounding. How far depends
on the coarsest format that the computation rounds to::

    format     eps      two right gradients of a few rows   the largest of a step
    float64    2e-16    1e-6                                1e-10
    float32    1e-7     3e-3                                1e-4
    TF32       1e-3     3e-2                                1e-2
    float16    1e-3     3e-2                                1e-2
    bfloat16   8e-3     3e-2                                5e-2

The second column is generous: kernels round by the number of rows, and wrong weights of
losses change a gradient by far more, if they matter. Formats are read from the graph,
so autocast is seen wherever the user's code enters it. On GPUs torch may round float32
numbers to TF32 inside of convolutions, recurrences and products: settings say where.

This file knows neither the engine nor its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from scatterpar.torch_private.autograd import (
    is_function_of_user,
    is_of_leaf,
    nodes_reached,
)


@dataclass(frozen=True)
class Format:
    """A floating-point format.

    Attributes:
        eps: the distance from 1 to the next larger number.
        tolerance: the largest relative difference between two right gradients of a few
            rows.
        limit: the largest relative difference of a parameter between two right steps.
    """

    eps: float
    tolerance: float
    limit: float


FLOAT64 = Format(2.0**-52, tolerance=1e-6, limit=1e-10)
FLOAT32 = Format(2.0**-23, tolerance=3e-3, limit=1e-4)
TF32 = Format(2.0**-10, tolerance=3e-2, limit=1e-2)
FLOAT16 = Format(2.0**-10, tolerance=3e-2, limit=1e-2)
BFLOAT16 = Format(2.0**-7, tolerance=3e-2, limit=5e-2)
# A kernel may round to half precision, also of numbers that are widened.
HALF_IN_KERNELS = Format(0.0, tolerance=3e-2, limit=0.0)
# Of a step in single precision that a look computes in double precision.
SINGLE_IN_DOUBLE = Format(0.0, tolerance=FLOAT32.tolerance, limit=0.0)
# Such as float8: what is off by more is seldom more than rounding, say the nudges.
COARSER = Format(2.0**-2, tolerance=3e-2, limit=2.0**-2)

_FORMATS = {
    torch.float64: FLOAT64,
    torch.complex128: FLOAT64,
    torch.float32: FLOAT32,
    torch.complex64: FLOAT32,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
}
HALF_PRECISION = (torch.float16, torch.bfloat16)
# How torch names the format that it rounds float32 numbers to inside of operators.
_FORMATS_BY_SETTING = {"tf32": TF32, "bf16": BFLOAT16}
_FIRST_CAPABILITY_WITH_TF32 = 8, 0  # Ampere

# The beginnings of the names of nodes in autograd's graph, by the setting that applies
# to them.
_NODES_BY_OPERATION = {
    "convolution": ("Convolution", "CudnnConvolution", "SlowConv"),
    "recurrence": ("CudnnRnn", "MkldnnRnn"),
    "product": (
        "Mm",
        "Addmm",
        "Bmm",
        "Baddbmm",
        "Addbmm",
        "Mv",
        "Addmv",
        "Linear",
        "Trilinear",
        "ScaledDotProduct",
        "EfficientAttention",
        "FlashAttention",
        "Cdist",
    ),
}


def format_of(dtype: torch.dtype) -> Format:
    """The format of a floating-point or complex dtype."""
    return _FORMATS.get(dtype, COARSER)


def formats_inside_operators(device: torch.device) -> dict[str, Format]:
    """By operation, the format that float32 numbers are rounded to inside of its
    kernels.

    Operations that compute in float32 are left out.
    """
    if device.type == "cuda":
        # Older GPUs compute in float32, whatever the settings say.
        if torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY_WITH_TF32:
            return {}
        cudnn: Any = torch.backends.cudnn
        backends = [cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul]
    elif device.type == "cpu":
        mkldnn: Any = torch.backends.mkldnn
        backends = [mkldnn.conv, mkldnn.rnn, mkldnn.matmul]
    else:
        return {}
    formats: dict[str, Format] = {}
    # In the order of the operations in this table.
    for operation, backend in zip(_NODES_BY_OPERATION, backends, strict=True):
        setting = backend.fp32_precision
        # The few processors that have TF32 are not told apart.
        has_format = device.type == "cuda" or setting != "tf32"
        if has_format and setting in _FORMATS_BY_SETTING:
            formats[operation] = _FORMATS_BY_SETTING[setting]
    return formats


class Rounding:
    """The formats that computations on one device round to.

    ``watch`` a loss before its backward pass. While that runs, autograd shows the
    dtypes in it.

    Attributes:
        formats: those of the computations so far.
        has_functions: true from the first graph on that has an ``autograd.Function`` of
            the user's, whose backward pass may do anything.
    """

    def __init__(self, device: torch.device) -> None:
        self.formats: set[Format] = set()
        self.has_functions = False
        self._inside_operators = formats_inside_operators(device)

    def add(self, dtype: torch.dtype) -> None:
        """Results are rounded to ``dtype``, too."""
        self.formats.add(format_of(dtype))

    def watch(self, loss: Tensor) -> None:
        """Record the formats of the graph of ``loss``, when its backward pass runs."""
        self.add(loss.dtype)
        # The whole graph, because autocast changes dtypes in the middle of it.
        for node in nodes_reached(loss):
            # A leaf's node, and hooks on it, may stay for as long as the leaf. It does
            # not run, because gradients are asked for by ``autograd.grad``.
            if not is_of_leaf(node):
                self._watch_node(node)

    def _watch_node(self, node: Any) -> None:
        self.has_functions |= is_function_of_user(node)
        inside = self._format_inside(node)

        def record(gradients: Sequence[Tensor | None]) -> None:
            for gradient in gradients:
                if gradient is None:
                    continue
                self.add(gradient.dtype)
                if inside is not None and format_of(gradient.dtype) == FLOAT32:
                    self.formats.add(inside)

        # Only the backward pass itself shows the dtypes of its gradients.
        node.register_prehook(record)

    def _format_inside(self, node: Any) -> Format | None:
        """The format of float32 numbers inside of the node's kernels, if another."""
        if not self._inside_operators:
            return None
        # A function of the user's may do anything.
        if isinstance(node, BackwardCFunction):
            return max(self._inside_operators.values(), key=lambda inside: inside.eps)
        for operation, inside in self._inside_operators.items():
            if node.name().startswith(_NODES_BY_OPERATION[operation]):
                return inside
        return None

    @property
    def tolerance(self) -> float:
        """The largest relative difference between two right gradients of a few rows."""
        return max((known.tolerance for known in self.formats), default=0.0)

    @property
    def limit(self) -> float:
        """The largest relative difference of a parameter between two right steps."""
        return max((known.limit for known in self.formats), default=0.0)

    @property
    def coarsest_eps(self) -> float:
        """The relative size of the largest rounding errors of single results."""
        return max((known.eps for known in self.formats), default=0.0)
