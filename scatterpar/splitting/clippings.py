"""Torch's functions that clip gradients, replaced, so that clipping hides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from scatterpar.causes.vectors import is_close
from scatterpar.splitting.gradients import EXACT, whole


class Clippings:
    """Replaces torch's functions that clip gradients. The last clipping does nothing.

    So clipping hides no factor. Any clipping before the last change of a gradient
    halves what has been accumulated until then, as if a loop clips after each part:

    ```text
    gradient         clip       then
    a                by norm 1  a
    a + b            by norm 1  a / 2 + b
    a / 2 + b + c    by norm 1  a / 4 + b / 2 + c
    ```

    Then parts have other weights than the whole batch. So it is for a rank that clips
    before it averages. The limit does not matter: the gradients of a small test may be
    below it, and those of a run exceed it.
    """

    def __init__(self) -> None:
        # By parameter: the gradient that the last clipping found.
        self._clipped: dict[Tensor, Tensor] = {}

    def __call__(self, parameters: Sequence[Tensor]) -> None:
        """Clip the gradients of ``parameters``."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._halve(parameter)
                self._clipped[parameter] = parameter.grad.detach().clone()

    def before_backward(self) -> None:
        """Forget what was clipped of gradients that are zero now, or ``None``.

        The next backward pass accumulates these anew: no part of them was clipped.
        """
        for parameter in list(self._clipped):
            if parameter.grad is None or not whole(parameter.grad).any():
                del self._clipped[parameter]

    def end(self) -> None:
        """Halve what was clipped before the last change of each gradient."""
        for parameter in list(self._clipped):
            self._halve(parameter)

    def _halve(self, parameter: Tensor) -> None:
        """Halve what the last clipping found, if the gradient has changed since.

        A loop may have put another tensor in its place, as a mean over the ranks.
        """
        clipped = self._clipped.pop(parameter, None)
        if clipped is None or parameter.grad is None:
            return
        # Whole, because a shard may be unchanged where another one is not.
        gradient = whole(parameter.grad)
        # Zeros were written after an update by hand. Rounding is no change: a mean of
        # zero that a loop subtracts is a few ulp in one split, and none in another.
        if gradient.any() and not is_close(gradient, whole(clipped), EXACT):
            parameter.grad.detach().sub_(clipped, alpha=0.5)
