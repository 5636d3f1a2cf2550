"""Terms of a loss, which are compared one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# A stack, because a step may check another one. The last one is asked.
_running: list[Terms] = []


def term(name: str, loss: Tensor) -> Tensor:
    """Name a term of the loss, so that ``splitcheck`` compares its gradient alone.

    Returns ``loss`` as it is, also where no ``splitcheck`` runs::

        loss = term("sft", sft_loss) + term("dpo", dpo_loss)
    """
    # In a training without a check a name costs one look into a list.
    return _running[-1].term(name, loss) if _running else loss


class Terms:
    """In the body, keeps the names of terms, and leaves one of them out.

    The gradient of a term is that of all terms, without that of all others::

        all           d sft + d dpo
        without dpo   d sft
        of dpo        (d sft + d dpo) - d sft

    Attributes:
        names: of all terms, in order.
    """

    def __init__(self, without: str) -> None:
        self.names: dict[str, None] = {}
        self._without = without

    def __enter__(self) -> None:
        _running.append(self)

    def __exit__(self, *_: object) -> None:
        _running.pop()

    def term(self, name: str, loss: Tensor) -> Tensor:
        """The loss; if it is left out, with a gradient of zero."""
        self.names[name] = None
        # Times zero, so that its graph stays, as DDP expects it.
        return loss * 0 if name == self._without else loss

    def run_backward(self, returned: Any) -> None:
        """Run the backward pass of the terms that a step has returned in a dict."""
        if not isinstance(returned, dict):
            return
        losses = []
        for name, loss in returned.items():
            if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
                losses.append(self.term(str(name), loss.sum()))
        if losses:
            # One backward pass, because DDP averages in each.
            torch.stack(losses).sum().backward()
