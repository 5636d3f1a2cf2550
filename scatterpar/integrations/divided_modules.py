"""During the steps of a library's loop, calls of the model are calls of an engine.

::

    with divided.step(batch):
        loss = self.loss_module(batch)      # contains the model: called as it is
            self.model(rows) ---------+---- rows 0:m     replica 0, the model itself
                                      +---- rows m:2m    replica 1
            outputs <-----------------+     joined, with a graph

The loop, and the user's functions in it, run once, as on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from scatterpar.batch import nested
from scatterpar.devices.device_ids import DeviceLike, resolve
from scatterpar.engine import ScatterOnceParallel
from scatterpar.errors import Told, warn
from scatterpar.torch_private.autograd import current_graph_task
from scatterpar.torch_private.compiler import never_compiled, unwrapped

_MODULE_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class DividedModules:
    """Divides the calls of a model, and of what it consists of, among replicas.

    During a step, these calls are the engine's:

    - calls of the model, with any number of rows, but not of a single vector;
    - calls of its children, and of theirs, that get as many rows as the batch of the
      step has: the outermost of them.

    Calls of modules without parameters are not: they are the user's losses, or memory
    banks. Neither are those of a module that contains the model.

    Args:
        model: the model that the loop trains; ``torch.compile`` may have wrapped it.
        device_ids: as in ``ScatterOnceParallel``.
        owner: a module that is no model itself, such as a LightningModule. Its children
            are then the models, also in containers.
        excluded: classes of modules whose calls are not divided.

    Attributes:
        model: the model, without its wrapper; the owner if there is one.
        device_ids: one entry per replica.
    """

    def __init__(
        self,
        model: nn.Module,
        device_ids: Sequence[DeviceLike] | None = None,
        *,
        is_owner: bool = False,
        excluded: tuple[type[nn.Module], ...] = (),
    ) -> None:
        self.model, _ = unwrapped(model)
        self._wrapped = model
        self.device_ids = resolve(device_ids)
        self._children = _Children() if is_owner else None
        self._excluded = excluded
        self._engine: ScatterOnceParallel | None = None
        self._rows = 0
        # The parts that were divided in this step's forward passes.
        self._divided_parts: set[nn.Module] = set()
        self._calls: dict[nn.Module, _DividedCall] = {}
        self._is_in_step = False  # true in the body of the outermost ``step``
        self._told = Told()

    def is_of(self, model: nn.Module) -> bool:
        """Whether these are the calls of ``model``, or of what it wraps."""
        return unwrapped(model)[0] is self.model

    @property
    def engine(self) -> ScatterOnceParallel:
        """The engine of the model, which the first divided call makes."""
        if self._engine is None:
            root = self._wrapped if self._children is None else self._children
            self._engine = ScatterOnceParallel(root, device_ids=self.device_ids)
        return self._engine

    def close(self) -> None:
        """Close the engine: its replicas would keep memory of the devices."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """In the body, backward passes leave gradients on the replicas.

        That may be before the first call, as accelerate enters it around a batch.
        """
        has_calls = bool(self._calls) or bool(self.models())
        if len(self.device_ids) == 1 or not has_calls:
            return contextlib.nullcontext()
        return self.engine.no_sync()

    @contextlib.contextmanager
    def step(self, batch: Any = None, *, goes_on: bool = False) -> Iterator[None]:
        """In the body, calls of the model are divided.

        ``batch`` is what the loop has read; ``None`` for that of the step before. If
        this step ``goes_on``, as in its backward pass, its modules are known.
        """
        if batch is not None:
            self._rows = _num_rows(batch)
            self._divided_parts.clear()
        # Inside of a step, or on one device, which computes all calls as they are.
        if self._is_in_step or len(self.device_ids) == 1:
            yield
            return
        if not goes_on:
            self._calls = self._found_calls()
        self._is_in_step = True
        self._install()
        try:
            yield
        finally:
            self._is_in_step = False
            self._remove()

    def models(self) -> list[nn.Module]:
        """The model, or the models that its owner has now."""
        if self._children is None:
            return [self._wrapped]
        return _opened(self.model, self._excluded)

    def _found_calls(self) -> dict[nn.Module, _DividedCall]:
        """The calls of all modules with parameters, as the model is now."""
        models = self.models()
        if self._children is not None:
            self._children.update(models)
        found: dict[nn.Module, None] = {}
        for model in models:
            _find_with_parameters(model, found)
        top = {*models, self.model}
        calls: dict[nn.Module, _DividedCall] = {}
        for module in found:
            # Most modules are there in each step.
            calls[module] = self._calls.get(module) or _DividedCall(self, module)
            calls[module].is_model = module in top
            calls[module].forward = vars(module).get("forward")
        return calls

    def _install(self) -> None:
        for call in self._calls.values():
            call.install()

    def _remove(self) -> None:
        for call in self._calls.values():
            call.remove()

    @never_compiled
    def call(self, call: _DividedCall, args: Any, kwargs: Any) -> Any:
        """Run a call of a module, divided if it has the batch's rows or is a model's.

        Returns its output.
        """
        if not call.is_model and not self._is_of_batch(call, args, kwargs):
            return call.plain(*args, **kwargs)
        # A loss may exchange ``forward`` for an object that keeps outputs, as
        # MatryoshkaLoss does. It runs once, as on one device; what it calls is divided.
        if vars(call.module).get("forward") is not call.forward:
            return call.plain(*args, **kwargs)
        if self._is_of_vectors(args, kwargs):
            name = type(call.module).__name__
            if self._told.mark(name):
                warn(
                    f"a call of {name} is computed on the first device alone: its "
                    "inputs are vectors whose length is not the number of rows; "
                    "to divide this call, give each input a dimension of rows, as "
                    "x[None] does for one row"
                )
            return call.plain(*args, **kwargs)
        self._divided_parts.add(call.module)
        # Replicas are copies of the modules as the user has them.
        self._remove()
        try:
            return self.compute(unwrapped(call.module)[0], args, kwargs)
        finally:
            self._install()

    def _is_of_batch(self, call: _DividedCall, args: Any, kwargs: Any) -> bool:
        """Whether a part of the model gets the rows of the batch, to be divided."""
        # A single row is not divided.
        if self._rows < 2 or _num_rows((args, kwargs)) != self._rows:
            return False
        # A checkpoint inside of the model calls parts again in the backward pass, for
        # one replica, whose rows may be as many.
        is_again = current_graph_task() != -1
        return not is_again or call.module in self._divided_parts

    def _is_of_vectors(self, args: Any, kwargs: Any) -> bool:
        """Whether a call gets vectors alone, such as a single row of the batch.

        The first dimension of other tensors is that of rows.
        """
        tensors = nested.tensors((args, kwargs))
        for tensor in tensors:
            is_vector = tensor.ndim == 1 and tensor.is_floating_point()
            if not is_vector or tensor.size(0) == self._rows:
                return False
        return bool(tensors)

    def compute(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Let the engine call a module that it has. Returns the output."""
        return self.engine.call_part(module, args, kwargs)

    def generate(self, call: _DividedCall, args: Any, kwargs: Any) -> Any:
        """What the module's own ``generate`` returns, computed on the master."""
        if self._told.mark("generate"):
            warn(
                "generate runs on the first device alone, since its calls share a "
                "cache; call engine.map(model.generate, …) to generate on all devices"
            )
        self._remove()
        try:
            module: Any = call.module
            return module.generate(*args, **kwargs)
        finally:
            self._install()


class _DividedCall:
    """What runs the calls of a module during a step.

    Attributes:
        module: the user's module.
        is_model: whether calls with any number of rows are divided.
        forward: what replaced its ``forward`` when the step began, or ``None``.
    """

    def __init__(self, divided: DividedModules, module: nn.Module) -> None:
        self.module = module
        self.is_model = False
        self.forward: Any = None
        self._divided = divided
        self._compiled: Any = None
        self._can_generate = callable(getattr(type(module), "generate", None))

    def install(self) -> None:
        """Let this object run the module's calls, until ``remove``."""
        attributes = vars(self.module)
        # torch's own place for what runs a call of this one module.
        self._compiled = attributes.get("_compiled_call_impl")
        attributes["_compiled_call_impl"] = self
        if self._can_generate:
            attributes["generate"] = self._generate

    def remove(self) -> None:
        """Let torch run the module's calls as before ``install``."""
        attributes = vars(self.module)
        del attributes["_compiled_call_impl"]
        if self._compiled is not None:
            attributes["_compiled_call_impl"] = self._compiled
        if self._can_generate:
            del attributes["generate"]

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as it is."""
        run = self._compiled or self.module._call_impl
        return run(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._divided.call(self, args, kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._divided.generate(self, args, kwargs)


class _Children(nn.Module):
    """The children of a module that is no model itself."""

    def update(self, children: Sequence[nn.Module]) -> None:
        """Have these children, and no others."""
        if [*self._modules.values()] == [*children]:
            return
        self._modules.clear()
        for number, child in enumerate(children):
            self.add_module(f"{number}_{type(child).__name__}", child)


def _opened(owner: nn.Module, excluded: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """The children of ``owner`` that have parameters, with those in containers."""
    opened: list[nn.Module] = []
    for child in owner.children():
        if isinstance(child, excluded):
            continue
        if isinstance(child, _MODULE_CONTAINERS):
            opened += _opened(child, excluded)
        elif next(child.parameters(), None) is not None:
            opened.append(child)
    return opened


def _find_with_parameters(module: nn.Module, found: dict[nn.Module, None]) -> bool:
    """Add ``module`` and its parts that have parameters to those that are ``found``.

    Returns whether ``module`` has parameters.
    """
    if module in found:
        return True
    has_parameters = False
    for value in module._parameters.values():
        has_parameters |= value is not None
    for child in module._modules.values():
        if child is not None and _find_with_parameters(child, found):
            has_parameters = True
    if has_parameters:
        found[module] = None
    return has_parameters


def _num_rows(batch: Any) -> int:
    """The size of a batch's first tensor that has a dimension; 0 without one."""
    for tensor in nested.tensors(batch):
        if tensor.ndim:
            return tensor.size(0)
    return 0
