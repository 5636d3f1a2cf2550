"""Run a user's step once, and return the gradients that its optimizer would receive."""

from __future__ import annotations

import contextlib
import enum
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scatterpar.splitting.gradients import Gradients
from scatterpar.splitting.operator_modes import CoarsestDtype, RepeatedNumbers
from scatterpar.torch_private import clipping_replaced

# Of a Mersenne Twister, which has used all of them when it is seeded.
_WORDS_OF_STATE = 624

StepFunction = Callable[[Any, list[Any]], Any]  # of a module of the user's class


class Numbers(enum.Enum):
    """What random operators give."""

    AS_DRAWN = enum.auto()
    CONSTANT = enum.auto()
    BY_COLUMN = enum.auto()  # each row gets the same


@dataclass(frozen=True)
class Settings:
    """How a step is run.

    Attributes:
        in_double: parameters, buffers and new tensors are in float64.
        numbers: what random operators give.
        running_statistics: batch normalisation does not use the statistics of a part.
        watch_dtypes: look for the coarsest dtype to which the step casts.
    """

    in_double: bool = True
    numbers: Numbers = Numbers.AS_DRAWN
    running_statistics: bool = False
    watch_dtypes: bool = False


@dataclass
class StepResult:
    """What a step leaves on one rank.

    Attributes:
        gradients: by the name of the parameter.
        loss: what the step returned, if that is a number.
        drawn: which generators it drew from: torch, Python, NumPy.
        coarsest: the coarsest dtype to which it casts, if ``watch_dtypes``.
    """

    gradients: Gradients
    loss: float | None
    drawn: frozenset[str]
    coarsest: torch.dtype | None


def run_step(
    step: StepFunction,
    model: nn.Module,
    batches: list[Any],
    settings: Settings,
    tensors: Iterable[Tensor],
) -> StepResult:
    """Call ``step(model, batches)``. Returns gradients; the caller restores everything.

    ``tensors`` are the user's tensors that ``step`` and ``model`` refer to.
    """
    for tensor in tensors:
        if tensor.is_leaf:
            tensor.grad = None
    if settings.in_double:
        torch.set_default_dtype(torch.float64)
        _convert_to_double(tensors)
    before = {}
    for name, parameter in model.named_parameters():
        before[name] = parameter.detach().clone()
    generators = _generator_states()
    optimizers = OptimizersWithoutGradients(model)
    dtypes = CoarsestDtype()  # type: ignore[no-untyped-call]
    with contextlib.ExitStack() as stack:
        if settings.running_statistics:
            stack.enter_context(running_statistics(model))
        if settings.numbers is not Numbers.AS_DRAWN:
            by_column = settings.numbers is Numbers.BY_COLUMN
            stack.enter_context(RepeatedNumbers(by_column))
        if settings.watch_dtypes:
            stack.enter_context(dtypes)
        stack.enter_context(clipping_replaced(Clippings()))
        stack.enter_context(optimizers)
        value = step(model, batches)
        optimizers.returned = value
    return StepResult(
        gradients=_gradients_of(model, before, optimizers.received),
        loss=_as_number(optimizers.returned),
        drawn=_drawn_since(generators),
        coarsest=dtypes.coarsest,
    )


def _convert_to_double(tensors: Iterable[Tensor]) -> None:
    """Convert dense leaves to float64, in place."""
    for tensor in tensors:
        if tensor.is_leaf and tensor.layout == torch.strided and not tensor.is_meta:
            tensor.data = as_double(tensor.data)


def as_double(tensor: Tensor) -> Tensor:
    """The tensor in float64 or complex128; others stay as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


# --- where the step ends ---


class _EndOfStep(BaseException):
    """Ends a step when its optimizers have received all gradients.

    ``except Exception`` in a user's loop lets it pass.
    """


class OptimizersWithoutGradients:
    """In the body, optimizers receive gradients, but change nothing.

    ```text
    optimizer.step()    gradients of its parameters are kept, then taken away
    ...                 the optimizer finds no gradient: parameters stay
    optimizer_2.step()  the gradients of all parameters are kept: the body ends
    ```

    A closure that is passed to ``optimizer.step`` runs first, as Lightning's does.
    """

    def __init__(self, model: nn.Module) -> None:
        self.received: Gradients = {}
        self.returned: Any = None
        self._model = model

    def __enter__(self) -> None:
        self._hook = register_optimizer_step_pre_hook(self._receive)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._hook.remove()
        return kind is _EndOfStep

    def _receive(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Runs before ``optimizer.step(*args, **kwargs)``."""
        arguments = {**dict(zip(("self", "closure"), args, strict=False)), **kwargs}
        closure = arguments.get("closure")
        if callable(closure):
            with torch.enable_grad():
                self.returned = closure()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        owned = {id(parameter) for parameter in parameters}
        missing = False
        for name, parameter in self._model.named_parameters():
            if id(parameter) in owned and name not in self.received:
                self.received[name] = _copy_of_gradient(parameter)
            missing |= parameter.requires_grad and name not in self.received
        if not missing:
            raise _EndOfStep
        for parameter in parameters:
            parameter.grad = None
        if callable(closure):
            kwargs = {**kwargs, "closure": lambda: self.returned}
            return args[:1], kwargs
        return None


class Clippings:
    """Replaces torch's functions that clip gradients. The last clipping does nothing.

    So clipping hides no factor. Any clipping before the last one halves what has been
    accumulated until then, as in a loop that clips after each part:

    ```text
    gradient    clip             then
    a           is exceeded      a
    a + b       is exceeded      a / 2 + b
    a / 2 + c   is not exceeded  a / 4 + b / 2 + c
    ```

    Then parts have other weights than the whole batch.
    """

    def __init__(self) -> None:
        # By parameter: the gradient that the last clipping found, and its values.
        self._clipped: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, parameters: Sequence[Tensor], is_exceeded: bool) -> None:
        """Clip the gradients of ``parameters``, if they exceed the limit."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            clipped, values = self._clipped.pop(id(parameter), (None, gradient))
            if clipped is gradient and not torch.equal(gradient, values):
                gradient.sub_(values, alpha=0.5)
            if is_exceeded:
                self._clipped[id(parameter)] = gradient, gradient.clone()


def _copy_of_gradient(parameter: Tensor) -> Tensor:
    """The whole gradient in float64 on the host; zeros if there is none."""
    if parameter.grad is None:
        return torch.zeros_like(_whole(parameter))
    return _whole(parameter.grad)


def _whole(tensor: Tensor) -> Tensor:
    """A dense copy in float64 on the host; of a ``DTensor`` with all its shards."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    dense = as_double(tensor.to_dense().cpu()).clone()
    return torch.view_as_real(dense) if dense.is_complex() else dense


def _gradients_of(
    model: nn.Module, before: dict[str, Tensor], received: Gradients
) -> Gradients:
    """The gradients that optimizers received, or that are left on the model.

    A parameter without a gradient that has changed was updated by hand, as in
    ``parameter -= 0.1 * parameter.grad``. Then the change counts as its gradient.
    """
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = received.get(name)
        if gradient is None:
            gradient = _copy_of_gradient(parameter)
            if parameter.requires_grad and not gradient.any():
                gradient = _whole(before[name]) - _whole(parameter)
        gradients[name] = gradient
    return gradients


def _as_number(value: Any) -> float | None:
    if isinstance(value, dict):
        value = value.get("loss")
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    return float(value) if type(value) in (int, float) else None


# --- batch normalisation, random numbers ---


def layers_with_batch_statistics(model: nn.Module) -> list[nn.Module]:
    """Batch normalisations that have running statistics, but use those of a part."""
    layers = []
    for layer in model.modules():
        is_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if is_norm and layer.training and layer.running_mean is not None:
            layers.append(layer)
    return layers


@contextlib.contextmanager
def running_statistics(model: nn.Module) -> Iterator[None]:
    """In the body, batch normalisation uses its running statistics.

    A hook for each call, because a step may call ``model.train()``.
    """

    def evaluate(layer: nn.Module, _: Sequence[Any]) -> None:
        layer.training = False

    hooks = []
    for layer in layers_with_batch_statistics(model):
        hooks.append(layer.register_forward_pre_hook(evaluate))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _generator_states() -> dict[str, Any]:
    """The states of the global generators of torch, Python and NumPy."""
    states: dict[str, Any] = {"torch": torch.get_rng_state().tolist()}
    states["Python"] = random.getstate()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        states["NumPy"] = pickle.dumps(numpy.get_state())
    return states


def _drawn_since(before: dict[str, Any]) -> frozenset[str]:
    """The generators that have moved, and were not only seeded."""
    after = _generator_states()
    moved = {name for name, state in before.items() if after[name] != state}
    return frozenset(moved - _generators_at_start())


def _generators_at_start() -> set[str]:
    """The generators whose next number is the first one after they were seeded."""
    names = set()
    seeded = torch.Generator().manual_seed(torch.initial_seed())
    if torch.equal(seeded.get_state(), torch.get_rng_state()):
        names.add("torch")
    if random.getstate()[1][-1] == _WORDS_OF_STATE:
        names.add("Python")
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and numpy.get_state()[2] == _WORDS_OF_STATE:
        names.add("NumPy")
    return names
