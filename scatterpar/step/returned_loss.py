"""The errors and warnings for returned losses that a loop uses as plain torch's.

::

    loss = engine.forward_backward(…)
    loss.backward()                      gradients are in .grad already: RuntimeError

    engine.loss(…)                       its gradient waits for loss.backward()
    optimizer.step()                     UserWarning
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from scatterpar.errors import warn
from scatterpar.torch_private.tensors import plain_functions

# These ask for the class of the tensor, and would name or pickle this one.
_OF_PLAIN_TENSORS = (
    Tensor.__repr__,
    Tensor.__format__,
    Tensor.__reduce_ex__,
    Tensor.__deepcopy__,
)


class FinishedLoss(Tensor):
    """The loss of a step whose backward pass has been made, without a graph.

    So is a number that is computed from it, as ``scaler.scale(loss)``, unless it has a
    graph. It is printed, pickled and detached as a plain tensor.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        if func is Tensor.backward:
            raise RuntimeError(
                "backward() of the loss of forward_backward(…): the gradients are in "
                ".grad already (with scaler= they are scaled); leave this line out, or "
                "call engine.loss(…), whose loss has a backward pass"
            )
        with plain_functions():
            if func in _OF_PLAIN_TENSORS:
                loss, *others = args
                args = [loss.as_subclass(Tensor), *others]
            result = func(*args, **(kwargs or {}))
            if type(result) is not Tensor or func is Tensor.detach:
                return result
            is_number = result.ndim == 0 and result.is_floating_point()
            if is_number and not result.requires_grad:
                return result.as_subclass(cls)
            return result


class LossWatch:
    """Warns if an optimizer steps before the backward pass of the latest loss.

    Only an optimizer that has a parameter of the module is asked.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def begin(self, loss: Tensor) -> None:
        """Watch this loss, and no earlier one, which may have been dropped."""
        self.end()
        if loss.requires_grad:
            loss.register_hook(self._end_at_gradient)
            _listen_to_optimizers()
            _open.add(self)

    def end(self) -> None:
        """Watch no loss."""
        _open.discard(self)

    def _end_at_gradient(self, _: Tensor) -> None:
        self.end()

    def tell(self, optimizer: Optimizer) -> None:
        """Warn if the optimizer has a parameter of the module; once."""
        module = self._module()
        if module is None:
            self.end()
            return
        parameters = {id(parameter) for parameter in module.parameters()}
        for group in optimizer.param_groups:
            if not parameters.isdisjoint(map(id, group["params"])):
                self.end()
                warn(
                    "the optimizer steps without the gradient of the latest "
                    "engine.loss(…), whose backward() was not called; call "
                    "loss.backward() before the optimizer's step, or use "
                    "engine.forward_backward(…)"
                )
                return


_open: weakref.WeakSet[LossWatch] = weakref.WeakSet()


@functools.cache
def _listen_to_optimizers() -> RemovableHandle:
    """Register the one hook of all watches; later calls do nothing.

    It stays: torch iterates over the hooks while it calls them, so none can remove
    itself.
    """
    return register_optimizer_step_pre_hook(_tell)


def _tell(optimizer: Optimizer, *_: Any) -> None:
    for watch in list(_open):
        watch.tell(optimizer)
