"""The gradients of all that a step trains: the model, and what the step leads to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scatterpar.batch import nested
from scatterpar.causes.batch_normalisation import running_statistics
from scatterpar.devices.bits import same_bits
from scatterpar.objects.walk import Walk
from scatterpar.splitting.clippings import Clippings
from scatterpar.splitting.gradients import Gradients, whole
from scatterpar.torch_private.autograd import leaves_reached


@dataclass(frozen=True)
class OneBatch:
    """A step that gets the only batch, not a list. No closure: it can be pickled.

    Attributes:
        function: a step for one batch, or a loss in plain torch.
        is_loss: whether a call runs the backward pass of what the function returns.
    """

    function: Callable[[Any, Any], Any]
    is_loss: bool = False

    def __call__(self, model: nn.Module, batches: list[Any]) -> Any:
        """Call the function with the only batch."""
        (batch,) = batches
        returned = self.function(model, batch)
        if self.is_loss:
            returned.backward()
        return returned


class NamedLeaves(NamedTuple):
    """Tensors of a step by name. A closure over ``proxies`` is ``step.proxies``.

    Attributes:
        outside: leaves that require grad, and are not the model's.
        kept: frozen parameters and buffers, of the model and other modules. Running
            statistics, which move in any training, are left out.
    """

    outside: dict[str, Tensor]
    kept: dict[str, Tensor]


def leaves_of_step(model: nn.Module, step: Any) -> NamedLeaves:
    """The tensors that ``step`` leads to, beside those that ``model`` trains."""
    # As in ``step``, so that the same leaf has the same name in both.
    root = step.function if isinstance(step, OneBatch) else step
    walk = Walk([root])
    kept: dict[str, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.requires_grad:
            kept[name] = tensor
    inside = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    modules = [*model.modules(), *walk.modules]
    registered: set[int] = set()
    for module in walk.modules:
        tensors = (*module._parameters.values(), *module._buffers.values())
        registered.update(map(id, tensors))
    outside = {}
    for number, value in enumerate(walk.values):
        if not isinstance(value, Tensor) or id(value) in inside:
            continue
        name = f"step.{walk.name_of(number)}"
        if value.is_leaf and value.requires_grad:
            outside[name] = value
        elif id(value) in registered:
            kept[name] = value
    statistics = set(map(id, running_statistics(modules)))
    kept = {n: tensor for n, tensor in kept.items() if id(tensor) not in statistics}
    return NamedLeaves(outside, kept)


class _EndOfStep(BaseException):
    """Ends a step when its optimizers have received all gradients.

    ``except Exception`` in a user's loop lets it pass.
    """


class TrainedGradients:
    """Collects gradients: what optimizers receive, else what is left in ``.grad``.

    In the body it sees which leaves backward passes reach, and optimizers change
    nothing:

    ```text
    optimizer.step()    gradients of its parameters are kept, then taken away
    ...                 the optimizer finds no gradient: parameters stay
    optimizer_2.step()  the gradients of all parameters are kept: the body ends
    ```

    A closure that is passed to ``optimizer.step`` runs first, as Lightning's does.

    Leaves outside of the model count if an optimizer receives them, or if none steps:
    then all that have a gradient are trained. Those that only optimizers hold, as a
    head that the step makes, are named by their place: ``step.AdamW.0.2``.

    Attributes:
        moves_weights: true from the first backward pass on that reaches weights that
            the body had changed, as SAM does.
        clippings: what clips gradients in the body.
    """

    def __init__(self, model: nn.Module, leaves: NamedLeaves) -> None:
        self.moves_weights = False
        self.clippings = Clippings()
        self._model = model
        self._outside = leaves.outside
        # By values, because a write to ``.data`` leaves the version.
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        for name, leaf in (*leaves.outside.items(), *model.named_parameters()):
            self._before[name] = leaf, leaf.detach().clone()
        for name, tensor in leaves.kept.items():
            self._before.setdefault(name, (tensor, tensor.detach().clone()))
        self._optimizers: list[Optimizer] = []
        # By leaf, not by its id: a new one could get the id of a lost one.
        self._received: dict[Tensor, Tensor] = {}
        self._places: dict[Tensor, str] = {}  # in the optimizers
        self._reached: dict[Tensor, None] = {}

    def __enter__(self) -> None:
        # ``Tensor.backward`` looks it up at each call.
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._run_backward
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._hook.remove()
        torch.autograd.backward = self._backward
        return kind is _EndOfStep

    def _run_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Runs in the place of ``torch.autograd.backward``."""
        self.clippings.before_backward()
        # An edge of the graph is a tuple, too. Another iterable may be read only once.
        if not isinstance(tensors, (Tensor, tuple)):
            tensors = tuple(tensors)
        # Other roots are edges of the graph.
        reached: set[int] = set()
        for root in nested.tensors(tensors):
            for leaf in leaves_reached(root, ()):
                reached.add(id(leaf))
                # Other leaves are inputs that require grad, as for a penalty.
                if isinstance(leaf, nn.Parameter):
                    self._reached[leaf] = None
        for leaf, values in self._before.values():
            if id(leaf) in reached:
                self.moves_weights |= not torch.equal(leaf, values)
        self._backward(tensors, *args, **kwargs)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Runs before ``optimizer.step(closure)``, for which ``args`` have both."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        returned = None
        if callable(closure):
            # ``Optimizer.step`` runs under ``no_grad``, its closure does not.
            with torch.enable_grad():
                returned = closure()
        self.clippings.end()
        if self.receive(optimizer):
            raise _EndOfStep
        # An optimizer skips parameters without a gradient, decay included.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        if not callable(closure):
            return None
        # Without a second run, which would accumulate each gradient again.
        return args[:1], {**kwargs, "closure": lambda: returned}

    def receive(self, optimizer: Optimizer) -> bool:
        """Copy the gradients of an optimizer that is about to step.

        Returns whether optimizers have received all gradients now.

        An optimizer outside of the model may follow, as that of a critic, until one
        steps for the second time: then the next step begins.
        """
        trained: list[Tensor] = list(self._model.parameters())
        is_second = optimizer in self._optimizers
        self._copy_gradients(optimizer)
        if not is_second:
            trained += [*self._outside.values(), *self._reached]
        return all(leaf in self._received for leaf in trained if leaf.requires_grad)

    def _copy_gradients(self, optimizer: Optimizer) -> None:
        """Copy the gradients of those parameters whose first step this is."""
        self._optimizers.append(optimizer)
        kind = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                # The first step counts: a loop may go on to the next one.
                if parameter not in self._received:
                    self._places[parameter] = f"step.{kind}.{index}.{number}"
                    self._received[parameter] = copy_of_gradient(parameter)

    def moved(self) -> tuple[str, ...]:
        """The names of parameters and buffers that have changed untrained."""
        trained = {id(leaf) for leaf in (*self._reached, *self._received)}
        return tuple(
            name
            for name, (tensor, values) in self._before.items()
            if id(tensor) not in trained and not same_bits(tensor, values)
        )

    def result(self) -> tuple[Gradients, list[str]]:
        """All gradients by name, of the model first.

        Returns also the names of parameters that got a gradient, and do not count.
        """
        names = dict(self._places)
        # Read again, because ``fully_shard`` makes other parameters.
        for name, leaf in (*self._outside.items(), *self._model.named_parameters()):
            names[leaf] = name
        # With an optimizer, what it does not hold is not trained.
        outside = self._received if self._optimizers else self._outside.values()
        compared = dict.fromkeys([*self._model.parameters(), *outside])
        gradients = {
            names[leaf]: self._gradient(names[leaf], leaf) for leaf in compared
        }
        uncompared = []
        for leaf in self._reached:
            if leaf not in compared:
                unnamed = f"a parameter of shape {tuple(leaf.shape)} that step makes"
                uncompared.append(names.get(leaf, unnamed))
        return gradients, uncompared

    def _gradient(self, name: str, leaf: Tensor) -> Tensor:
        """The gradient that an optimizer received, else what is left in ``.grad``.

        A leaf without a gradient that has changed was updated by hand, as in
        ``parameter -= 0.1 * parameter.grad``. Then the change counts as its gradient.
        """
        if leaf in self._received:
            return self._received[leaf]
        gradient = copy_of_gradient(leaf)
        _, before = self._before.get(name, (leaf, leaf))
        # FSDP's flat parameters are new, and its shards have other shapes.
        if gradient.any() or before.shape != leaf.shape or not leaf.requires_grad:
            return gradient
        return whole(before) - whole(leaf)


def copy_of_gradient(parameter: Tensor) -> Tensor:
    """The whole gradient in float64 on the host; zeros if there is none."""
    if parameter.grad is None:
        return torch.zeros_like(whole(parameter))
    return whole(parameter.grad)
