"""Gradients that a call in turn cannot read: those of the step's earlier calls.

With gradient accumulation on one device a call finds the sum of the calls before it::

    call 0    .grad is None, or that of earlier batches
    call 1    .grad has the gradient of call 0
    call 2    .grad has those of calls 0 and 1

A replica has a part of this sum, and some of the backward passes have not ended. So a
call finds a tensor there that raises an error if its values are read, or written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class PendingGradient(Tensor):
    """A gradient that is there, and whose values raise ``ValueError``.

    Attributes:
        words: those of the error.
    """

    words: str

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Raise the error of the first such gradient among the arguments."""
        raise ValueError(_first_pending([*args, *(kwargs or {}).values()]).words)


class PendingGradients:
    """What calls in the turns of one replica find as the gradients of its parameters.

    Args:
        names: of the parameters, by their numbers.
        function: the name of the step function, for the error.
        remedy: where gradients can be read, for the error.
    """

    def __init__(self, names: Mapping[int, str], function: str, remedy: str) -> None:
        self._names = names
        self._function = function
        self._remedy = remedy
        self._pending: dict[int, PendingGradient] = {}

    @contextlib.contextmanager
    def hiding(self, leaves: Mapping[int, Tensor]) -> Iterator[None]:
        """In the body ``leaves``, by their numbers, have gradients that nobody can
        read.

        Raises ``ValueError`` if the body reads or writes one, or sets ``.grad``.
        """
        gradients = [leaf.grad for leaf in leaves.values()]
        for number, leaf in leaves.items():
            if number not in self._pending:
                self._pending[number] = self._pending_gradient(number, leaf)
            leaf.grad = self._pending[number]
        try:
            yield
            for number, leaf in leaves.items():
                if leaf.grad is not self._pending[number]:
                    raise ValueError(self._pending[number].words)
        finally:
            for leaf, gradient in zip(leaves.values(), gradients, strict=True):
                leaf.grad = gradient

    def _pending_gradient(self, number: int, leaf: Tensor) -> PendingGradient:
        """What stands for the gradient of a leaf: one element, whatever its shape."""
        dtype = leaf.grad_dtype or leaf.dtype
        with torch.inference_mode(False), torch.no_grad():
            element = torch.zeros((), dtype=dtype, device=leaf.device)
            pending = element.expand(leaf.shape).as_subclass(PendingGradient)
        name = self._names.get(number, f"of shape {tuple(leaf.shape)}")
        pending.words = (
            f"{self._function} reads or writes .grad of the parameter {name}, where "
            "one device would have the sum of the step's earlier micro-batches; "
            f"replicas have parts of it. {self._remedy}"
        )
        return pending


def _first_pending(values: Sequence[Any]) -> PendingGradient:
    """The first pending gradient among ``values``, and in lists of them.

    Raises ``LookupError`` if there is none.
    """
    for value in values:
        if isinstance(value, PendingGradient):
            return value
        if isinstance(value, (list, tuple)):
            with contextlib.suppress(LookupError):
                return _first_pending(value)
    raise LookupError("no pending gradient")
