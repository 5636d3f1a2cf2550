"""The module behind a function; what a ``functools.partial`` binds is replicated like one."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from scatterpar.replicas.mirror import Survey

__all__ = ["Bound", "holder_of", "owner_of"]


def owner_of(function: Any) -> nn.Module | None:
    """The module that ``function`` is, or is a method of."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


class Bound(nn.Module):
    """A module that holds a partial, and with it the tensors and modules that it binds."""

    def __init__(self, function: functools.partial[Any]) -> None:
        super().__init__()
        self.function = function


def holder_of(function: Any) -> nn.Module | None:
    """The module that is replicated for the sake of ``function``, if there is one.

    The one that it is, or is a method of; or one that holds what a partial binds.
    """
    if type(function) is not functools.partial:
        return owner_of(function)
    holder = Bound(function)
    survey = Survey((holder,))
    return holder if survey.tensors or len(survey.modules) > 1 else None
