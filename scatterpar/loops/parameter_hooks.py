"""Hooks that a call registers on parameters.

With gradient accumulation on one device they act on the gradients of this call and of
each later one. Later calls may be those of other replicas, and a hook on the user's
own parameter acts once per step. So a call that leaves a hook is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from scatterpar.verify.dropped_records import is_look

_REGISTRIES = "_backward_hooks", "_post_accumulate_grad_hooks"


@contextlib.contextmanager
def hooks_refused(
    leaves: Sequence[Tensor], module: nn.Module, function: str
) -> Iterator[None]:
    """In the body, a call of the step function has these parameters, in ``module``.

    Hooks that it leaves on them are removed, also those of a look's call.

    Raises:
        ValueError: there are such hooks, and the call is none of a look.
    """
    before = _hooks_of(leaves)
    added: list[Tensor] = []
    try:
        yield
    finally:
        added = _removed(leaves, before)
    if added and not is_look():
        names = {id(leaf): name for name, leaf in module.named_parameters()}
        name = names.get(id(added[0]), f"of shape {tuple(added[0].shape)}")
        raise ValueError(
            f"{function} registers a hook on the parameter {name!r}, which would act "
            "on the gradients of one replica; register it once, before the training: "
            "it then gets the gradient of the whole batch"
        )


def _hooks_of(leaves: Sequence[Tensor]) -> dict[tuple[int, str], list[Any]]:
    """The keys of hooks, by the number of the leaf and the registry that has some."""
    keys: dict[tuple[int, str], list[Any]] = {}
    # Most have none, and a call asks all of them.
    for number, leaf in enumerate(leaves):
        for registry in _REGISTRIES:
            hooks = getattr(leaf, registry)
            if hooks:
                keys[number, registry] = list(hooks)
    return keys


def _removed(
    leaves: Sequence[Tensor], before: Mapping[tuple[int, str], Sequence[Any]]
) -> list[Tensor]:
    """Remove the hooks that have come. Returns their parameters."""
    added: list[Tensor] = []
    for place, keys in _hooks_of(leaves).items():
        number, registry = place
        for key in set(keys) - set(before.get(place, ())):
            del getattr(leaves[number], registry)[key]
            added.append(leaves[number])
    return added
